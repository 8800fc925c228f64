"""The tokens that enter every block of the frozen model, as many as the centres start from, in one pass."""

from __future__ import annotations

import inspect
import math
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
from monkeyjump.routing.granularity import Selection, pool_rows, select
from monkeyjump.tuner.layer import MonkeyJumpLayer

if TYPE_CHECKING:
    from monkeyjump.tuner.block_list import BlockList
    from monkeyjump.tuner.call import BlocksCall
    from monkeyjump.tuner.context import RoutingContext
    from monkeyjump.tuner.routers.base import BlockRouter

# What a CPU is taken to do in a minute, in floating-point operations of a forward; a number of its own, not measured,
# so that the centres are the same on every machine.
_MINUTE_OF_A_CPU = 60 * 30e9
PAPERS_TOKENS = 50_000
_FEWEST_TOKENS = 2_000


def affordable_tokens(model: nn.Module) -> int:
    """How many tokens the centres start from where nobody says: the paper's 50,000, on a CPU about a minute's worth."""
    weights = [p for p in model.parameters() if p.ndim > 1 and p.device.type == "cpu"]
    operations = 2 * sum(weight.numel() for weight in weights)
    if not operations:
        return PAPERS_TOKENS
    return max(_FEWEST_TOKENS, min(PAPERS_TOKENS, int(_MINUTE_OF_A_CPU / operations) // 100 * 100))


@dataclass(frozen=True)
class _Placed:
    """What a batch gives to the sample of every block of a group, on one device."""

    selection: Selection
    rows: torch.Tensor  # of the flat states, [n]
    slots: torch.Tensor  # of the sample, [n]


class TokenCollector:
    """Listens at the entrance of every block and keeps the states of the sampled tokens."""

    def __init__(self, adapter_name: str, config: MonkeyJumpConfig, capacity: int) -> None:
        self.adapter_name = adapter_name
        self.config = config
        self.capacity = capacity
        self.labels: torch.Tensor | None = None
        self.tokens: dict[str, torch.Tensor] = {}  # block path -> [capacity, D]
        self.kept: dict[int, int] = {}  # tokens of each list of blocks so far
        self._picks: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._placed: dict[tuple, _Placed] = {}

    def next_batch(self, labels: torch.Tensor | None) -> None:
        self.labels = labels
        self._picks = {}
        self._placed = {}

    def observe(self, router: BlockRouter, h: torch.Tensor, call: BlocksCall) -> None:
        if self.adapter_name not in router.layers:
            return
        placed = self._place(router.blocks, h, call)
        if router.path not in self.tokens:
            self._allocate(router.blocks, h, h.dtype if placed.selection.pool is None else torch.float32)
        if placed.rows.shape[0] == 0:
            return
        if placed.selection.pool is not None:
            h = pool_rows(h, placed.selection.mask, placed.selection.pool)
        store = self.tokens[router.path]
        states = h.detach().reshape(-1, h.shape[-1]).index_select(0, placed.rows)
        # without a copy where the sample lies beside the model: the slots are there already
        store.index_copy_(0, placed.slots.to(store.device), states.to(store.device))

    def _place(self, blocks: BlockList, h: torch.Tensor, call: BlocksCall) -> _Placed:
        """Selection and picks are those of the batch: blocks after the first of a group on a device look them up."""
        shape = (h.shape[0], h.shape[1])
        key = (id(blocks), shape, h.device)
        if key not in self._placed:
            selection = select(call.inputs(shape, h.device), self.config.granularity, self.config.sequence_token)
            if id(blocks) not in self._picks:
                total = shape[0] if selection.pool is not None else shape[0] * shape[1]
                self._picks[id(blocks)] = self._pick(blocks, selection.queries, total)
            rows, slots = self._picks[id(blocks)]
            self._placed[key] = _Placed(selection, _sent(rows, h.device), _sent(slots, h.device))
        return self._placed[key]

    def sample(self, router: BlockRouter) -> torch.Tensor:
        """The kept states of a block, [N, D]."""
        return self.tokens[router.path][: self.kept[id(router.blocks)]]

    def _allocate(self, blocks: BlockList, h: torch.Tensor, dtype: torch.dtype) -> None:
        """One tensor for all blocks of a group, in the dtype of the states, so that k-means can take many at a time."""
        paths = [router.path for router in blocks.routers.values() if self.adapter_name in router.layers]
        shape = (len(paths), self.capacity, h.shape[-1])
        store = torch.zeros(shape, dtype=dtype, device=_storage_device(shape, h.device, dtype))
        self.tokens.update(zip(paths, store, strict=True))

    def full(self) -> bool:
        return bool(self.kept) and all(kept == self.capacity for kept in self.kept.values())

    def _pick(self, blocks: BlockList, queries: torch.Tensor | None, total: int) -> tuple[torch.Tensor, torch.Tensor]:
        first = self.kept.get(id(blocks), 0)
        real = torch.arange(total) if queries is None else queries.flatten().cpu().nonzero().squeeze(-1)
        rows = real[: self.capacity - first]
        self.kept[id(blocks)] = first + rows.shape[0]
        return rows, torch.arange(first, first + rows.shape[0])


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
            for batch in dataloader:
                inputs = _forward_inputs(base, batch, device)
                labels = inputs.get("labels")
                if not context.encoder_decoder:
                    inputs.pop("labels", None)
                collector.next_batch(labels)
                base(**inputs)
                bar.update(max(collector.kept.values(), default=0) - bar.n)
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


def _storage_device(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> torch.device:
    """Beside the model if the sample takes less than half of the free memory there, else in main memory."""
    if device.type != "cuda":
        return device
    free, _ = torch.cuda.mem_get_info(device)
    return device if math.prod(shape) * dtype.itemsize < free / 2 else torch.device("cpu")


def _sent(indices: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The indices there. To a GPU from pinned memory: a copy from other memory waits for all work in the queue."""
    return indices.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else indices.to(device)
