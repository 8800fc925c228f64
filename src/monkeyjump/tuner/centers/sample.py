"""One pass over the frozen model that samples the tokens entering every block, from which the centres start."""

from __future__ import annotations

import inspect
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from tqdm.auto import tqdm

from monkeyjump.config import MonkeyJumpConfig
from monkeyjump.errors import ConfigError
from monkeyjump.routing.granularity import Selection, pool, select
from monkeyjump.tuner.centers.pool_ranks import on_every_rank, several_ranks
from monkeyjump.tuner.layer import MonkeyJumpLayer

if TYPE_CHECKING:
    from monkeyjump.tuner.block_list import BlockList
    from monkeyjump.tuner.call import BlocksCall
    from monkeyjump.tuner.context import RoutingContext
    from monkeyjump.tuner.routers.base import BlockRouter

# How many floating-point operations of a forward a CPU is assumed to do in a minute. Nothing is measured, so that the
# centres are the same on every machine.
_MINUTE_OF_A_CPU = 60 * 30e9
PAPERS_TOKENS = 50_000
_FEWEST_TOKENS = 2_000
_TEXTS, _FEWEST_TEXTS = (
    5_000,
    200,
)  # where each has one state; k-means of tokens gains nothing beyond 5,000 in the paper
_TOKENS_OF_A_TEXT = 25  # for how many tokens a text counts on a CPU: fewer than it has, as there would be too few texts
_FEWEST_OF_A_KIND = 100  # so many tokens of a kind are kept, even if another has fewer
_MOST_READ = 4  # times the wanted tokens that are read to find those of a rare kind


def affordable_tokens(model: nn.Module) -> int:
    """How many tokens the centres start from where nobody says: the paper's 50,000, on a CPU about a minute's worth."""
    weights = [p for p in model.parameters() if p.ndim > 1 and p.device.type == "cpu"]
    operations = 2 * sum(weight.numel() for weight in weights)
    if not operations:
        return PAPERS_TOKENS
    return max(_FEWEST_TOKENS, min(PAPERS_TOKENS, int(_MINUTE_OF_A_CPU / operations) // 100 * 100))


def default_sample(model: nn.Module, config: MonkeyJumpConfig) -> int:
    """From how many states the centres start where nobody says: of tokens, or of whole texts where these decide."""
    tokens = affordable_tokens(model)
    if config.granularity != "sequence":
        return tokens
    return _TEXTS if tokens == PAPERS_TOKENS else max(_FEWEST_TEXTS, tokens // _TOKENS_OF_A_TEXT)


class TokenCollector:
    """Listens at the entrance of every block and keeps the states of the sampled tokens."""

    def __init__(self, adapter_name: str, config: MonkeyJumpConfig, capacity: int) -> None:
        self.adapter_name, self.config, self.capacity = adapter_name, config, capacity
        self.tokens: dict[str, Tensor] = {}  # block path -> [capacity, D]
        self.kept: dict[int, int] = {}  # tokens of each list of blocks so far
        self.kinds: dict[int, Tensor] = {}  # their kinds, where there are several
        self.read = 0  # tokens of the model so far, kept or not
        self.fingerprint = 0  # of all batches so far
        self.next_batch(None)

    def next_batch(self, labels: Tensor | None) -> None:
        self.labels = labels
        self._picks: dict[int, Tensor] = {}  # the rows of each list of blocks
        self._placed: dict[tuple, tuple[Selection, Tensor]] = {}

    def observe(self, router: BlockRouter, h: Tensor, call: BlocksCall) -> None:
        if self.adapter_name not in router.layers:
            return
        selection, rows = self._pick(router.blocks, h, call)
        if router.path not in self.tokens:
            self._allocate(router.blocks, h, h.dtype if selection.pool is None else torch.float32)
        if selection.pool is not None:
            h = pool(h, selection)
        end = self.kept[id(router.blocks)]
        states = h.detach().reshape(-1, h.shape[-1]).index_select(0, rows)
        self.tokens[router.path][end - rows.shape[0] : end].copy_(states)

    def _pick(self, blocks: BlockList, h: Tensor, call: BlocksCall) -> tuple[Selection, Tensor]:
        """The selection of this batch, and the rows [n] of its flat states that are kept: the next real ones.

        Blocks after the first of a group on a device look both up.
        """
        shape = (h.shape[0], h.shape[1])
        key = (id(blocks), shape, h.device)
        if key not in self._placed:
            inputs = replace(call.inputs(shape, h.device), kinds=None)  # `_room` chooses among the kinds
            selection = select(inputs, self.config.granularity, self.config.sequence_token)
            if id(blocks) not in self._picks:
                total, queries = shape[0] if selection.pool is not None else shape[0] * shape[1], selection.queries
                real = torch.arange(total) if queries is None else queries.flatten().cpu().nonzero().squeeze(-1)
                kinds = call.kinds(shape) if self.config.granularity == "token" and self.config.balance_kinds else None
                rows = self._picks[id(blocks)] = self._room(blocks, real, None if kinds is None else kinds.cpu())
                self.kept[id(blocks)] = self.kept.get(id(blocks), 0) + rows.shape[0]
                self.read += real.shape[0]
            self._placed[key] = selection, _sent(self._picks[id(blocks)], h.device)
        return self._placed[key]

    def _room(self, blocks: BlockList, real: Tensor, kinds: Tensor | None) -> Tensor:
        """The first of these rows that there is room for: of several kinds, for as many of each."""
        if kinds is None:
            return real[: self.capacity - self.kept.get(id(blocks), 0)]
        before, found = self.kinds.get(id(blocks), kinds.new_zeros(0)), kinds.flatten()[real]
        seen = torch.cat([before, found]).unique()
        allowed = torch.zeros_like(found, dtype=torch.bool)
        for kind in seen:
            left = self.capacity // len(seen) - int((before == kind).sum())
            own = found == kind
            allowed |= own & (own.cumsum(0) <= left)
        self.kinds[id(blocks)] = torch.cat([before, found[allowed]])
        return real[allowed]

    def sample(self, router: BlockRouter) -> Tensor:
        """The kept states of a block, [N, D]: of several kinds as many of each, or a few more of those there are."""
        states, kinds = self.tokens[router.path][: self.kept[id(router.blocks)]], self.kinds.get(id(router.blocks))
        if kinds is None:
            return states
        own = kinds == kinds.unique()[:, None]
        most = max(int(own.sum(1).min()), _FEWEST_OF_A_KIND)
        return states[(own & (own.cumsum(1) <= most)).any(0).to(states.device)]

    def _allocate(self, blocks: BlockList, h: Tensor, dtype: torch.dtype) -> None:
        """One tensor for all blocks of a group, in the dtype of the states, so that k-means can take many at a time.

        It lies beside the model if it takes less than half of the free memory there, else in main memory.
        """
        paths = [router.path for router in blocks.routers.values() if self.adapter_name in router.layers]
        shape, device = (len(paths), self.capacity, h.shape[-1]), h.device
        if device.type == "cuda" and math.prod(shape) * dtype.itemsize >= torch.cuda.mem_get_info(device)[0] / 2:
            device = torch.device("cpu")
        self.tokens.update(zip(paths, torch.zeros(shape, dtype=dtype, device=device), strict=True))

    def full(self) -> bool:
        """Whether every list of blocks has its tokens, or so many were read that a rare kind must do with fewer."""
        if self.kinds and self.read >= _MOST_READ * self.capacity:
            return True
        return bool(self.kept) and all(self._is_full(key, kept) for key, kept in self.kept.items())

    def _is_full(self, key: int, kept: int) -> bool:
        seen = 1 if key not in self.kinds else len(self.kinds[key].unique())
        return kept >= self.capacity // seen * seen


@torch.no_grad()
def collect(
    model: nn.Module, context: RoutingContext, collector: TokenCollector, dataloader: Iterable[Any], progress: bool
) -> None:
    base: nn.Module = model.get_base_model() if isinstance(model, PeftModel) else model
    device = next(base.parameters()).device
    with (
        _frozen(model),
        torch.random.fork_rng(),
        tqdm(total=collector.capacity, desc="reading tokens", unit="tok", unit_scale=True, disable=not progress) as bar,
    ):
        context.collector = collector
        try:
            batches, done = iter(dataloader), False
            while not done:
                batch = next(batches, None)
                if batch is not None:
                    inputs = forward_inputs(base, batch, device)
                    labels = inputs.get("labels")
                    collector.fingerprint = _fingerprint(inputs, collector.fingerprint)
                    if not context.encoder_decoder:
                        inputs.pop("labels", None)
                    collector.next_batch(labels)
                    base(**inputs)
                    bar.update(max(collector.kept.values(), default=0) - bar.n)
                done = on_every_rank(batch is None or collector.full(), device)
        finally:
            context.collector = None


def forward_inputs(base: nn.Module, batch: Any, device: torch.device) -> dict[str, Any]:
    """The tensors of a batch, on the model's device, with as few logits asked for as the model allows."""
    if isinstance(batch, Tensor):
        batch = {"input_ids": batch}
    if not isinstance(batch, Mapping):
        raise ConfigError(
            f"initialize_centers got a batch of type {type(batch).__name__}: batches are dicts of tensors."
        )
    inputs: dict[str, Any] = {key: value.to(device) for key, value in batch.items() if isinstance(value, Tensor)}
    parameters = inspect.signature(base.forward).parameters
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        inputs = {k: v for k, v in inputs.items() if k in parameters or k in ("task_ids", "prompt_lengths")}
    if "logits_to_keep" in parameters:
        inputs["logits_to_keep"] = 1
    if "use_cache" in parameters:
        inputs["use_cache"] = False
    return inputs


def _fingerprint(inputs: dict[str, Any], before: int) -> int:
    """A number that tells one sequence of batches from another, whatever machine has read it."""
    for value in inputs.values() if several_ranks() else ():
        if isinstance(value, Tensor):
            before = zlib.crc32(value.detach().cpu().flatten().view(torch.uint8).numpy().tobytes(), before)
    return before


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


def _sent(indices: Tensor, device: torch.device) -> Tensor:
    """Copy indices to a device. They go to a GPU from pinned memory, as other copies wait for all work in the queue."""
    return indices.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else indices.to(device)
