"""Where centres come from: one pass over the frozen model, a uniform sample of its tokens, k-means in every block."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from monkeyjump.config import MonkeyJumpConfig
from monkeyjump.errors import ConfigError
from monkeyjump.ops import reference as ops
from monkeyjump.routing.centroid import dealt_out
from monkeyjump.routing.kmeans import spherical_kmeans
from monkeyjump.tuner.centers.pool_ranks import pool_ranks, several_ranks
from monkeyjump.tuner.centers.sample import PAPERS_TOKENS, TokenCollector, collect, default_sample

if TYPE_CHECKING:
    from monkeyjump.tuner.context import RoutingContext
    from monkeyjump.tuner.routers.base import BlockRouter

# Bytes of fp32 states that are clustered together; more blocks at once only save kernel launches.
CLUSTERED_AT_ONCE = 2**30
_FEW_TOKENS = 4096  # enough for kernels of the kind that a whole sample needs
# The fields of a config that decide where its centres start, beside its blocks and their numbers of experts.
_DECIDING = (
    *("center_init", "route_space", "ema_space", "similarity", "granularity", "sequence_token"),
    "balance_kinds",
)


@dataclass
class CalibrationReport:
    """What the initialisation saw, for people and for tests."""

    adapter: str
    method: str
    tokens_kept: int
    shares: dict[str, list[float]]  # block -> share of the sampled tokens nearest to each centre


def initialize_centers(
    model: nn.Module,
    dataloader: Iterable[Any] | None = None,
    num_tokens: int | None = None,
    seed: int = 0,
    *,
    adapter_name: str | None = None,
    restarts: int = 10,
    progress: bool = True,
    known: dict[Any, Any] | None = None,
) -> CalibrationReport:
    """Give every routed projection its centre, as the adapter's `center_init` says.

    Reads batches (dicts of tensors, labels optional) until there are `num_tokens` real tokens or the data ends, and
    clusters them block by block. Give it shuffled data. `num_tokens` is by default the config's `init_tokens`;
    where that is None, 50,000, or on a CPU as many as it reads in about a minute. Where whole texts are routed it
    counts texts, by default 5,000, or on a CPU a few hundred. Adapters are off during the pass, so the states are
    those of the frozen model; training mode and random state are as before afterwards. On several ranks the sample
    is made of the batches of all of them, in the order of the ranks; ranks that were given the same batches are
    counted once. `known` holds what earlier calls with the same frozen model and batches found, and gets what this
    one finds: an adapter that asks for the same centres reads no token.
    """
    from monkeyjump.tuner.model import require_context

    context = require_context(model)
    name, config = _adapter_to_initialize(context, adapter_name)
    if needs_no_data(config):
        draw_random_centers(context, name, seed)
        return CalibrationReport(name, config.center_init, 0, {})
    if dataloader is None:
        raise ConfigError(
            f"initialize_centers needs data for center_init={config.center_init!r}: pass any iterable of batches."
        )
    tokens = num_tokens or config.init_tokens or _default_sample(model, config, progress)
    routers = [router for router in context.routers() if name in router.layers]
    counts = [(router.path, _count(router, name)) for router in routers]
    asked = tokens, seed, restarts, *(getattr(config, field) for field in _DECIDING), *counts
    known = {} if known is None else known
    if asked not in known:
        collector = TokenCollector(name, config, tokens)
        collect(model, context, collector, dataloader, progress)
        pool_ranks(collector, routers)
        _check_sample(collector, routers)
        known[asked] = max(collector.kept.values()), _all_centers(routers, collector, seed, restarts, progress)
    kept, found = known[asked]
    for router, (centers, mean, _) in zip(routers, found, strict=True):
        _set_centers(router, name, centers, mean)
    shares = {router.key: shares for router, (_, _, shares) in zip(routers, found, strict=True)}
    return CalibrationReport(name, config.center_init, kept, shares)


def compile_early(model: nn.Module) -> None:
    """Compile the kernels of k-means on a GPU in another thread: a first run would wait some seconds for them."""
    from monkeyjump.tuner.model import find_context

    context, parameter = find_context(model), next(model.parameters())
    router = None if context is None else next(context.routers(), None)
    if router is None or not parameter.is_cuda:
        return
    for name, config in router.configs.items():
        if config.uses_centers and config.center_init == "kmeans":
            width, count = router.layers[name][0].monkeyjump_center[name].shape[-1], _count(router, name)
            generator = torch.Generator(parameter.device).manual_seed(0)
            tokens = torch.empty(1, _FEW_TOKENS, width, dtype=parameter.dtype, device=parameter.device)
            tokens.normal_(generator=generator)
            Thread(target=spherical_kmeans, args=(tokens, count), kwargs={"max_iter": 1}, daemon=True).start()


def _all_centers(
    routers: list[BlockRouter], collector: TokenCollector, seed: int, restarts: int, progress: bool
) -> list[tuple[Tensor, Tensor | None, list[float]]]:
    found = []
    what = f"{collector.config.center_init} centres"
    with tqdm(total=len(routers), desc=what, unit="block", disable=not progress) as bar:
        for chunk in _chunks(routers, collector):
            found += _centers_of(chunk, collector, seed, restarts)
            bar.update(len(chunk))
    return found


def _default_sample(model: nn.Module, config: MonkeyJumpConfig, progress: bool) -> int:
    count = default_sample(model, config)
    if config.granularity == "token" and count < PAPERS_TOKENS and progress:
        tqdm.write(
            f"centres start from {count:,} tokens, about a minute's work for a CPU, instead of the paper's "
            f"{PAPERS_TOKENS:,} (init_tokens={PAPERS_TOKENS} reads them all)"
        )
    return count


def centers_initialized(model: nn.Module, adapter_name: str) -> bool:
    """Whether an adapter's centres are in place (an adapter that routes by task, or not at all, needs none)."""
    from monkeyjump.tuner.model import require_context

    layers = [layer for blocks in require_context(model).lists.values() for layer in blocks.layers(adapter_name)]
    return all(
        int(layer.monkeyjump_step[adapter_name]) >= 0 for layer in layers if adapter_name in layer.monkeyjump_step
    )


def needs_no_data(config: MonkeyJumpConfig) -> bool:
    """Whether the centres are random vectors in the space of the raw tokens."""
    return config.center_init in ("random", "random_normalized") and config.route_space == "raw"


def draw_random_centers(context: RoutingContext, adapter_name: str, seed: int) -> None:
    """Centres drawn from N(0, 1), on the unit sphere for `random_normalized`; a function of seed and module alone."""
    for router in context.routers():
        if adapter_name in router.layers:
            centers = _random_centers(router, adapter_name, seed)
            _set_centers(router, adapter_name, centers, None)


def _random_centers(router: BlockRouter, adapter_name: str, seed: int) -> Tensor:
    width = router.layers[adapter_name][0].monkeyjump_center[adapter_name].shape[-1]
    centers = torch.randn(_count(router, adapter_name), width, generator=_generator(router, seed))
    if router.configs[adapter_name].center_init == "random_normalized":
        centers = torch.nn.functional.normalize(centers, dim=-1)
    return centers


def _adapter_to_initialize(context: RoutingContext, adapter_name: str | None) -> tuple[str, MonkeyJumpConfig]:
    known = {name: config for router in context.routers() for name, config in router.configs.items()}
    if adapter_name is None:
        active = {name for blocks in context.lists.values() for name in blocks.active()}
        adapter_name = next((name for name in known if name in active), next(iter(known), None))
    if adapter_name not in known:
        raise ConfigError(
            f"adapter {adapter_name!r} routes no block of this model; routed adapters: {', '.join(known) or 'none'}."
        )
    if not known[adapter_name].uses_centers:
        raise ConfigError(f"adapter {adapter_name!r} routes by task and has no centres: nothing to initialise.")
    return adapter_name, known[adapter_name]


def _check_sample(collector: TokenCollector, routers: list[BlockRouter]) -> None:
    if not any(collector.kept.values()):
        raise ConfigError("the dataloader gave no real token: it is empty, or every token is masked.")
    problems = []
    for router in routers:
        if router.path not in collector.tokens:
            problems.append(f"block {router.path!r} never ran on this data, so it has no tokens to place centres by.")
            continue
        sample, count = collector.sample(router), _count(router, collector.adapter_name)
        if sample.shape[0] < count:
            what = "sequences" if collector.config.granularity == "sequence" else "tokens"
            problems.append(
                f"block {router.path!r} has {count} centres but only {sample.shape[0]} {what} were found: "
                "give initialize_centers more data."
            )
        bad = int((~torch.isfinite(sample).all(-1)).sum())
        if bad:
            problems.append(
                f"{bad} of {sample.shape[0]} states entering block {router.path!r} are NaN or infinite: the model "
                f"overflows in {sample.dtype}; load it in bfloat16 or float32."
            )
    if problems:
        raise ConfigError(problems[:8], title="centres cannot be initialised")


def _chunks(routers: list[BlockRouter], collector: TokenCollector) -> Iterator[list[BlockRouter]]:
    """Consecutive blocks that can be clustered together: same sample, experts and device, bounded memory."""
    name = collector.adapter_name

    def kind(router: BlockRouter) -> tuple:
        device = router.layers[name][0].monkeyjump_center[name].device
        return collector.sample(router).shape, _count(router, name), device

    for (shape, *_), group in groupby(routers, kind):
        alike, most = list(group), max(1, CLUSTERED_AT_ONCE // (4 * shape.numel()))
        for start in range(0, len(alike), most):
            yield alike[start : start + most]


def _centers_of(
    routers: list[BlockRouter], collector: TokenCollector, seed: int, restarts: int
) -> list[tuple[Tensor, Tensor | None, list[float]]]:
    """For each block: centres [C, D], mean direction or None, share of the sample nearest to each centre."""
    config, name = collector.config, collector.adapter_name
    count = _count(routers[0], name)
    h_LND = torch.stack([collector.sample(router) for router in routers])
    h_LND = h_LND.to(routers[0].layers[name][0].monkeyjump_center[name].device)
    means: list[Tensor | None] = [None] * len(routers)
    if config.route_space == "centered":
        means = [ops.features(h, None, normalize=True).mean(0) for h in h_LND]
        h_LND = torch.stack([ops.features(h, mean, normalize=False) for h, mean in zip(h_LND, means, strict=True)])
    if config.center_init == "kmeans":
        result = spherical_kmeans(h_LND, count, seed=seed, restarts=restarts)
        centers = result.centers if config.ema_space == "normalized" else result.centers * result.mean_norms[..., None]
    else:
        centers = torch.stack([_drawn(router, h, collector, seed) for router, h in zip(routers, h_LND, strict=True)])
    found = []
    for h, center, mean in zip(h_LND, centers, means, strict=True):
        u = ops.features(h, None, normalize=config.ema_space == "normalized")
        nearest = ops.similarity_logits(u, center, config.similarity).argmax(-1)
        shares = torch.bincount(nearest, minlength=count) / nearest.shape[0]
        found.append((center, mean, shares.tolist()))
    return found


def _drawn(router: BlockRouter, h: Tensor, collector: TokenCollector, seed: int) -> Tensor:
    """Centres that are random tokens of the sample, or random vectors."""
    if collector.config.center_init != "random_tokens":
        return _random_centers(router, collector.adapter_name, seed).to(h.device)
    rows = torch.randperm(h.shape[0], generator=_generator(router, seed))[: _count(router, collector.adapter_name)]
    return ops.features(h[rows.to(h.device)], None, normalize=collector.config.ema_space == "normalized")


def _count(router: BlockRouter, name: str) -> int:
    """The centres of a block: one for each expert, or for each group that experts are dealt out to."""
    return router.configs[name].groups or len(router.names[name])


def _generator(router: BlockRouter, seed: int) -> torch.Generator:
    """Random numbers that depend on the seed and the block's name alone, not on the order of blocks or processes."""
    return torch.Generator().manual_seed(zlib.crc32(router.path.encode()) + 2**32 * seed)


@torch.no_grad()
def _set_centers(router: BlockRouter, name: str, centers: Tensor, mean: Tensor | None) -> None:
    """Write the centres, of experts or of their groups, and start the schedule at zero."""
    layers, centers = router.layers[name], dealt_out(centers, len(router.names[name]))
    for layer, own in zip(layers, centers.unflatten(0, (len(layers), -1)), strict=True):
        center = layer.monkeyjump_center[name]
        center.copy_(_same_on_all_ranks(own.to(center.device).view_as(center)))
        if mean is not None:
            layer.monkeyjump_mean[name].copy_(_same_on_all_ranks(mean.to(layer.monkeyjump_mean[name].device)))
        layer.monkeyjump_staged_sum[name].zero_()
        layer.monkeyjump_staged_count[name].zero_()
        layer.monkeyjump_step[name].zero_()
    router.blocks.initialized.add(name)


def _same_on_all_ranks(tensor: Tensor) -> Tensor:
    if several_ranks():
        tensor = tensor.contiguous()
        torch.distributed.broadcast(tensor, src=0)
    return tensor
