"""Where centres come from: one pass over the frozen model, a uniform sample of its tokens, k-means in every block."""

from __future__ import annotations

import inspect
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftModel
from torch import nn
from tqdm.auto import tqdm

from monkeyjump.config import MonkeyJumpConfig
from monkeyjump.errors import ConfigError
from monkeyjump.ops import reference as ops
from monkeyjump.routing.granularity import pool_rows, select
from monkeyjump.routing.kmeans import spherical_kmeans
from monkeyjump.tuner.layer import MonkeyJumpLayer

if TYPE_CHECKING:
    from monkeyjump.tuner.gating import BlockGroup, BlockRouter, RoutingContext

# How many real tokens are read for each one that is kept: the sample then spreads over that many more sequences.
OVERSAMPLE = 4
# Bytes of fp32 states that are clustered together; more blocks at once only save kernel launches.
CLUSTERED_AT_ONCE = 2**30


@dataclass
class CalibrationReport:
    """What the initialisation saw, for people and for tests."""

    adapter: str
    method: str
    tokens_read: int
    tokens_kept: int
    shares: dict[str, list[float]]  # block -> share of the sampled tokens nearest to each centre


class Reservoir:
    """Decides which of a stream of items to keep: at any time a uniform sample of those offered so far."""

    def __init__(self, capacity: int, seed: int) -> None:
        self.capacity = capacity
        self.seen = 0
        self._keys = torch.empty(0, dtype=torch.float64)
        self._generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return self._keys.shape[0]

    def offer(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Which of `count` new items are kept, and in which slots."""
        size = len(self)
        keys = torch.cat([self._keys, torch.rand(count, dtype=torch.float64, generator=self._generator)])
        kept = torch.topk(keys, min(self.capacity, keys.shape[0]), largest=False).indices
        entering = kept[kept >= size]
        stays = torch.zeros(size, dtype=torch.bool)
        stays[kept[kept < size]] = True
        free = torch.arange(size, min(self.capacity, size + entering.shape[0]))
        slots = torch.cat([(~stays).nonzero().squeeze(-1), free])[: entering.shape[0]]
        self._keys = torch.cat([self._keys, torch.empty(max(0, len(free)), dtype=torch.float64)])
        self._keys[slots] = keys[entering]
        self.seen += count
        return entering - size, slots


class TokenCollector:
    """Listens at the entrance of every block and keeps the states of the sampled tokens."""

    def __init__(self, adapter_name: str, config: MonkeyJumpConfig, capacity: int, seed: int) -> None:
        self.adapter_name = adapter_name
        self.config = config
        self.capacity = capacity
        self.seed = seed
        self.labels: torch.Tensor | None = None
        self.tokens: dict[str, torch.Tensor] = {}  # block path -> [capacity, D]
        self.reservoirs: dict[int, Reservoir] = {}
        self._picks: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def next_batch(self, labels: torch.Tensor | None) -> None:
        self.labels = labels
        self._picks = {}

    def observe(self, router: BlockRouter, h: torch.Tensor) -> None:
        if self.adapter_name not in router.layers:
            return
        selection = select(
            router.group.call_inputs((h.shape[0], h.shape[1]), h.device),
            self.config.granularity,
            self.config.sequence_token,
        )
        if selection.pool is not None:
            h = pool_rows(h, selection.mask, selection.pool)
        flat = h.detach().reshape(-1, h.shape[-1])
        if id(router.group) not in self._picks:
            self._picks[id(router.group)] = self._pick(router.group, selection.queries, flat.shape[0])
        rows, slots = self._picks[id(router.group)]
        if router.path not in self.tokens:
            self._allocate(router.group, h)
        store = self.tokens[router.path]
        store[slots.to(store.device)] = flat[rows.to(flat.device)].to(store.device)

    def sample(self, router: BlockRouter) -> torch.Tensor:
        """The kept states of a block, [N, D]."""
        return self.tokens[router.path][: len(self.reservoirs[id(router.group)])]

    def _allocate(self, group: BlockGroup, h: torch.Tensor) -> None:
        """One tensor for all blocks of a group, in the dtype of the states, so that k-means can take many at a time."""
        paths = [path for path, router in group.routers.items() if self.adapter_name in router.layers]
        shape = (len(paths), self.capacity, h.shape[-1])
        store = torch.zeros(shape, dtype=h.dtype, device=_storage_device(shape, h))
        self.tokens.update(zip(paths, store, strict=True))

    def full(self) -> bool:
        return bool(self.reservoirs) and all(r.seen >= OVERSAMPLE * self.capacity for r in self.reservoirs.values())

    def _pick(self, group: BlockGroup, queries: torch.Tensor | None, total: int) -> tuple[torch.Tensor, torch.Tensor]:
        reservoir = self.reservoirs.setdefault(id(group), Reservoir(self.capacity, self.seed))
        candidates = torch.arange(total) if queries is None else queries.flatten().nonzero().squeeze(-1).cpu()
        entering, slots = reservoir.offer(candidates.shape[0])
        return candidates[entering], slots


def initialize_centers(
    model: nn.Module,
    dataloader: Iterable[Any] | None = None,
    num_tokens: int | None = None,
    seed: int = 0,
    *,
    adapter_name: str | None = None,
    restarts: int = 10,
    progress: bool = True,
) -> CalibrationReport:
    """Give every routed projection its centre, as the adapter's `center_init` says.

    Reads batches (dicts of tensors, labels optional) until four times `num_tokens` real tokens have passed or the data
    ends, keeps a uniform sample of `num_tokens` of them (default: the config's `init_tokens`), and clusters it block by
    block. Give it shuffled data. Adapters are off during the pass, so the states are those of the frozen model;
    training mode and random state are as before afterwards. On several ranks all end with the centres of rank 0.
    """
    from monkeyjump.tuner.model import require_context

    context = require_context(model)
    name, config = _adapter_to_initialize(context, adapter_name)
    if (
        config.center_init.startswith("random")
        and config.center_init != "random_tokens"
        and config.route_space == "raw"
    ):
        draw_random_centers(context, name, seed)
        return CalibrationReport(name, config.center_init, 0, 0, {})
    if dataloader is None:
        raise ConfigError(
            f"initialize_centers needs data for center_init={config.center_init!r}: pass any iterable of batches."
        )
    collector = TokenCollector(name, config, num_tokens or config.init_tokens, seed)
    _collect(model, context, collector, dataloader, progress)
    routers = [router for router in context.routers() if name in router.layers]
    _check_sample(collector, routers)
    found = []
    with tqdm(total=len(routers), desc=f"{config.center_init} centres", unit="block", disable=not progress) as bar:
        for chunk in _chunks(routers, collector):
            found += _centers_of(chunk, collector, seed, restarts)
            bar.update(len(chunk))
    for router, (centers, mean, _) in zip(routers, found, strict=True):
        _set_centers(router, name, centers, mean)
    reservoirs = collector.reservoirs.values()
    return CalibrationReport(
        adapter=name,
        method=config.center_init,
        tokens_read=max(r.seen for r in reservoirs),
        tokens_kept=max(len(r) for r in reservoirs),
        shares={router.key: shares for router, (_, _, shares) in zip(routers, found, strict=True)},
    )


def centers_initialized(model: nn.Module, adapter_name: str) -> bool:
    """Whether an adapter's centres are in place (an adapter that routes by task, or not at all, needs none)."""
    from monkeyjump.tuner.model import require_context

    layers = [layer for group in require_context(model).groups.values() for layer in group.layers(adapter_name)]
    return all(
        int(layer.monkeyjump_step[adapter_name]) >= 0 for layer in layers if adapter_name in layer.monkeyjump_step
    )


def draw_random_centers(context: RoutingContext, adapter_name: str, seed: int) -> None:
    """Centres drawn from N(0, 1), on the unit sphere for `random_normalized`; a function of seed and module alone."""
    for router in context.routers():
        if adapter_name in router.layers:
            centers = _random_centers(router, adapter_name, seed)
            _set_centers(router, adapter_name, centers, None)


def _random_centers(router: BlockRouter, adapter_name: str, seed: int) -> torch.Tensor:
    layers = router.layers[adapter_name]
    width = layers[0].monkeyjump_center[adapter_name].shape[0]
    centers = torch.randn(len(layers), width, generator=_generator(router, seed))
    if router.configs[adapter_name].center_init == "random_normalized":
        centers = torch.nn.functional.normalize(centers, dim=-1)
    return centers


def _adapter_to_initialize(context: RoutingContext, adapter_name: str | None) -> tuple[str, MonkeyJumpConfig]:
    known = {name: config for router in context.routers() for name, config in router.configs.items()}
    if adapter_name is None:
        active = {name for group in context.groups.values() for name in group.active()}
        adapter_name = next((name for name in known if name in active), next(iter(known), None))
    if adapter_name not in known:
        raise ConfigError(
            f"adapter {adapter_name!r} routes no block of this model; routed adapters: {', '.join(known) or 'none'}."
        )
    if not known[adapter_name].uses_centers:
        raise ConfigError(f"adapter {adapter_name!r} routes by task and has no centres: nothing to initialise.")
    return adapter_name, known[adapter_name]


@torch.no_grad()
def _collect(
    model: nn.Module, context: RoutingContext, collector: TokenCollector, dataloader: Iterable[Any], progress: bool
) -> None:
    base: nn.Module = model.get_base_model() if isinstance(model, PeftModel) else model
    device = next(base.parameters()).device
    wanted = OVERSAMPLE * collector.capacity
    with (
        _frozen(model),
        torch.random.fork_rng(),
        tqdm(total=wanted, desc="reading tokens", unit="tok", unit_scale=True, disable=not progress) as bar,
    ):
        context.collector = collector
        try:
            for batch in dataloader:
                inputs = _forward_inputs(base, batch, device)
                labels = inputs.get("labels")
                if not context.encoder_decoder:
                    inputs.pop("labels", None)
                collector.next_batch(labels)
                base(**inputs)
                seen = max((r.seen for r in collector.reservoirs.values()), default=0)
                bar.update(min(seen, wanted) - bar.n)
                if collector.full():
                    break
        finally:
            context.collector = None


def _forward_inputs(base: nn.Module, batch: Any, device: torch.device) -> dict[str, Any]:
    """The tensors of a batch, on the model's device, with as few logits asked for as the model allows."""
    if isinstance(batch, torch.Tensor):
        batch = {"input_ids": batch}
    if not isinstance(batch, Mapping):
        raise ConfigError(
            f"initialize_centers got a batch of type {type(batch).__name__}: batches are dicts of tensors."
        )
    inputs: dict[str, Any] = {key: value.to(device) for key, value in batch.items() if isinstance(value, torch.Tensor)}
    parameters = inspect.signature(base.forward).parameters
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        inputs = {k: v for k, v in inputs.items() if k in parameters or k in ("task_ids", "prompt_lengths")}
    if "logits_to_keep" in parameters:
        inputs["logits_to_keep"] = 1
    if "use_cache" in parameters:
        inputs["use_cache"] = False
    return inputs


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """The model in eval mode with its adapters off, and everything as before afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    layers = [(module, module._disable_adapters) for module in model.modules() if isinstance(module, MonkeyJumpLayer)]
    model.eval()
    for layer, _ in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for layer, disabled in layers:
            layer._disable_adapters = disabled


def _check_sample(collector: TokenCollector, routers: list[BlockRouter]) -> None:
    if not collector.reservoirs or all(len(r) == 0 for r in collector.reservoirs.values()):
        raise ConfigError("the dataloader gave no real token: it is empty, or every token is masked.")
    problems = []
    for router in routers:
        if router.path not in collector.tokens:
            problems.append(f"block {router.path!r} never ran on this data, so it has no tokens to place centres by.")
            continue
        sample, experts = collector.sample(router), len(router.layers[collector.adapter_name])
        if sample.shape[0] < experts:
            what = "sequences" if collector.config.granularity == "sequence" else "tokens"
            problems.append(
                f"block {router.path!r} has {experts} routed projections but only {sample.shape[0]} {what} were found: "
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
    """Consecutive blocks that can be clustered together: same sample, width and number of experts, bounded memory."""
    chunk: list[BlockRouter] = []
    for router in routers:
        sample = collector.sample(router)
        most = max(1, CLUSTERED_AT_ONCE // (sample.numel() * 4))
        if chunk and (len(chunk) >= most or not _stackable(chunk[0], router, collector)):
            yield chunk
            chunk = []
        chunk.append(router)
    yield chunk


def _stackable(one: BlockRouter, other: BlockRouter, collector: TokenCollector) -> bool:
    a, b, name = collector.sample(one), collector.sample(other), collector.adapter_name
    same_device = (
        one.layers[name][0].monkeyjump_center[name].device == other.layers[name][0].monkeyjump_center[name].device
    )
    return a.shape == b.shape and len(one.layers[name]) == len(other.layers[name]) and same_device


def _centers_of(
    routers: list[BlockRouter], collector: TokenCollector, seed: int, restarts: int
) -> list[tuple[torch.Tensor, torch.Tensor | None, list[float]]]:
    """For each block: centres [E, D], mean direction or None, share of the sample nearest to each centre."""
    config, name = collector.config, collector.adapter_name
    experts = len(routers[0].layers[name])
    h_LND = torch.stack([collector.sample(router) for router in routers])
    h_LND = h_LND.to(routers[0].layers[name][0].monkeyjump_center[name].device)
    means: list[torch.Tensor | None] = [None] * len(routers)
    if config.route_space == "centered":
        means = [ops.features(h, None, normalize=True).mean(0) for h in h_LND]
        h_LND = torch.stack([ops.features(h, mean, normalize=False) for h, mean in zip(h_LND, means, strict=True)])
    if config.center_init == "kmeans":
        result = spherical_kmeans(h_LND, experts, seed=seed, restarts=restarts)
        centers = result.centers if config.ema_space == "normalized" else result.centers * result.mean_norms[..., None]
    else:
        centers = torch.stack([_drawn(router, h, collector, seed) for router, h in zip(routers, h_LND, strict=True)])
    found = []
    for h, center, mean in zip(h_LND, centers, means, strict=True):
        u = ops.features(h, None, normalize=config.ema_space == "normalized")
        nearest = ops.similarity_logits(u, center, config.similarity).argmax(-1)
        shares = torch.bincount(nearest, minlength=experts) / nearest.shape[0]
        found.append((center, mean, shares.tolist()))
    return found


def _drawn(router: BlockRouter, h: torch.Tensor, collector: TokenCollector, seed: int) -> torch.Tensor:
    """Centres that are random tokens of the sample, or random vectors."""
    if collector.config.center_init != "random_tokens":
        return _random_centers(router, collector.adapter_name, seed).to(h.device)
    rows = torch.randperm(h.shape[0], generator=_generator(router, seed))[: len(router.layers[collector.adapter_name])]
    return ops.features(h[rows.to(h.device)], None, normalize=collector.config.ema_space == "normalized")


def _generator(router: BlockRouter, seed: int) -> torch.Generator:
    """Random numbers that depend on the seed and the block's name alone, not on the order of blocks or processes."""
    return torch.Generator().manual_seed(zlib.crc32(router.path.encode()) + 2**32 * seed)


@torch.no_grad()
def _set_centers(router: BlockRouter, name: str, centers: torch.Tensor, mean: torch.Tensor | None) -> None:
    """Write the centres and start the schedule at zero."""
    for layer, center in zip(router.layers[name], centers, strict=True):
        layer.monkeyjump_center[name].copy_(_same_on_all_ranks(center.to(layer.monkeyjump_center[name].device)))
        if mean is not None:
            layer.monkeyjump_mean[name].copy_(_same_on_all_ranks(mean.to(layer.monkeyjump_mean[name].device)))
        layer.monkeyjump_staged_sum[name].zero_()
        layer.monkeyjump_staged_count[name].zero_()
        layer.monkeyjump_step[name].zero_()
    router.group.initialized.add(name)


def _same_on_all_ranks(tensor: torch.Tensor) -> torch.Tensor:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        tensor = tensor.contiguous()
        distributed.broadcast(tensor, src=0)
    return tensor


def _storage_device(shape: tuple[int, ...], h: torch.Tensor) -> torch.device:
    """Beside the model if the sample takes less than half of the free memory there, else in main memory."""
    if h.device.type != "cuda":
        return h.device
    free, _ = torch.cuda.mem_get_info(h.device)
    return h.device if math.prod(shape) * h.element_size() < free / 2 else torch.device("cpu")
