"""The objects of one forward.

| object | made | holds |
|---|---|---|
| `ModelCall` | when the model is entered | labels, task ids, prompt ends, seeds, outputs made ahead of their turn |
| `BlocksCall` | when the stack of blocks is entered | the mask, the decisions, the gates of the block that runs |
| `Generation` | by `generate` | where the prompt ends; every forward inside belongs to it |

The calls in progress are known to their thread, never to the model: threads do not see each other's gates, and a
forward that raises, or is interrupted, leaves nothing behind. A recomputation under gradient checkpointing runs inside
the call of its forward, wherever and whenever it happens (`recomputation.py`). The holder is `threading.local` and not
a context variable because torch.compile can trace the first and not the second.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from monkeyjump.errors import ConfigError
from monkeyjump.routing.granularity import CallInputs, Selection, segments_of, select

if TYPE_CHECKING:
    from monkeyjump.config import MonkeyJumpConfig
    from monkeyjump.tuner.block_list import BlockList
    from monkeyjump.tuner.context import RoutingContext
    from monkeyjump.tuner.fast.shared_inputs import Seeds, SharedInput
    from monkeyjump.tuner.mixed_batch import RowAdapters

Decisions = dict[tuple[str, str], Tensor]  # (router, adapter name) -> what was decided for each row
KnockedOut = Mapping[str, frozenset[str]]  # router -> the experts that are switched off


@dataclass(eq=False)
class Generation:
    """One call of `generate`."""

    prompt_width: int | None  # with its padding; None where the prompt goes into an encoder
    task_ids: Tensor | None = None
    prompt_lengths: Tensor | None = None
    prompt_mask: Tensor | None = None  # [B, T] True on real tokens, where the model itself is given no mask


@dataclass(eq=False)
class MadeAhead:
    """Outputs of projections that read the same tensor, made by the first of them for the others."""

    group: SharedInput
    x: Tensor
    version: int
    outputs: dict[int, Tensor]


@dataclass(eq=False)
class ModelCall:
    """One forward of the whole model: the arguments that only its top receives, and the seeds it drew."""

    context: RoutingContext
    labels: Tensor | None = None
    task_ids: Tensor | None = None
    prompt_lengths: Tensor | None = None
    generation: Generation | None = None
    outer: ModelCall | None = None  # the call this one was made in
    wrapped: bool = False  # whether it was opened by PEFT's wrapper, which then closes it
    entered: bool = False  # whether the base model has been entered; if not, PEFT's wrapper or the blocks opened it
    seeds: Seeds | None = None  # they make the dropout masks, one for each group of shared inputs
    ahead: MadeAhead | None = None
    token_ids: Tensor | None = None  # of a model that reads pictures or clips
    knocked_out: KnockedOut | None = None
    recorded: bool = False  # whether a graph is made of its blocks: what ranks tell each other then comes after them
    row_adapters: RowAdapters | None = None  # where rows have adapters of their own (`adapter_names`)


@dataclass(eq=False)
class BlocksCall:
    """What the blocks of one list share in one forward."""

    call: ModelCall
    blocks: BlockList
    arguments: dict[str, Any] = field(default_factory=dict)
    staging: bool = False  # whether this is a training forward, and not its recomputation
    statistics: bool = False  # whether the sums that move the centres are taken
    recomputing: bool = False
    outer: BlocksCall | None = None
    alone: bool = False  # whether a block was called by itself, outside its stack
    traced: bool = False  # whether a compiler sees the whole stack
    commits: int = 0  # how often the centres had been moved when it was opened
    kept: Decisions | None = None  # made by an earlier forward of the same generation
    fresh: Decisions = field(default_factory=dict)  # made by this forward
    gates_of: Decisions = field(default_factory=dict)  # kept from a training forward for its recomputation
    counted: list[tuple[Any, Tensor]] = field(default_factory=list)  # adapters and the tokens they were sent
    # which tokens decide for each adapter, and which are real, each with the shape that it was made for
    selections: dict[str, tuple[tuple[int, int], Selection]] = field(default_factory=dict)
    real: tuple[tuple[int, int], Tensor | None] | None = None
    # the fields below belong to the block that runs
    shape: tuple[int, int] = (0, 0)
    gates: dict[str, Tensor] = field(default_factory=dict)  # by adapter name
    mask: Tensor | None = None  # real tokens, for learned routers
    slots: Any = None  # MixLoRA: the copies of the rows
    tasks: dict[str, Any] = field(default_factory=dict)  # MoRE: the tasks of the rows, by adapter name
    queries: Tensor | None = None  # MoA: what its prompt reads

    def again(self) -> BlocksCall:
        """A copy of this call for a recomputation: nothing is staged in it, and what its blocks write stays apart."""
        again = replace(self, staging=False, statistics=False, recomputing=True, outer=None)
        again.fresh, again.gates, again.tasks = {}, {}, {}
        again.mask = again.slots = again.queries = None
        return again

    def real_tokens(self, shape: tuple[int, int], device: torch.device) -> Tensor | None:
        """[B, T] True on the real tokens of this forward; None = all."""
        if self.real is None or not _made_for(self.real[0], shape):
            mask = self.inputs(shape, device).mask
            self.real = shape, None if mask is None else mask.to(device)
        return self.real[1]

    def selection(self, adapter_name: str, config: MonkeyJumpConfig, shape: Any, device: torch.device) -> Selection:
        """Which tokens decide for this adapter, and for whom."""
        made = self.selections.get(adapter_name)
        if made is None or not _made_for(made[0], shape):
            inputs = self.inputs((shape[0], shape[1]), device)
            if not config.balance_kinds:
                inputs.kinds = None
            made = (shape[0], shape[1]), select(inputs, config.granularity, config.sequence_token)
            self.selections[adapter_name] = made
        return made[1]

    def kinds(self, shape: tuple[int, int]) -> Tensor | None:
        """[B, T] the kind of each token, as a place in KINDS; None where all are of one kind."""
        ids = self.call.token_ids
        if ids is None or self.blocks.tower or tuple(ids.shape) != tuple(shape):
            return None
        found = torch.zeros_like(ids)
        for place, token in self.call.context.kind_ids:
            found = torch.where(ids == token, place, found)
        return found

    def inputs(self, shape: tuple[int, int], device: torch.device) -> CallInputs:
        """The arguments of this forward in the form that selection understands."""
        context, arguments = self.call.context, self.arguments
        generation = None if self.blocks.tower else self.call.generation
        width = None if generation is None else generation.prompt_width
        mask = real_tokens(arguments.get("attention_mask"), shape)
        if mask is None and generation is not None and generation.prompt_mask is not None:
            mask = generation.prompt_mask if generation.prompt_mask.shape == shape else None
        seq_idx, positions = arguments.get("seq_idx"), arguments.get("position_ids")
        if mask is not None or arguments.get("past_key_values") is not None or width:
            positions = None  # Transformers reads packing from them only where there is no mask and no cache
        segments = segments_of(positions, seq_idx)
        if segments is not None and segments.shape != shape:
            segments = segments.expand(shape) if segments.shape[0] == 1 and segments.shape[1] == shape[1] else None
        if segments is not None and seq_idx is not None:
            mask = seq_idx >= 0 if mask is None else mask & (seq_idx >= 0)
        labels, lengths = arguments.get("labels"), self.call.prompt_lengths
        has_answers = context.causal and not self.blocks.tower and (labels is None or labels.shape == shape)
        per_row = has_answers and (segments is None or lengths is None or lengths.shape[0] == shape[0])
        # in a decoder that reads an encoder's states, every token but the first belongs to the answer
        decodes = context.encoder_decoder and arguments.get("encoder_hidden_states") is not None
        return CallInputs(
            shape=shape,
            device=device,
            mask=mask,
            labels=labels if has_answers else None,
            prompt_lengths=expanded_rows(lengths, shape[0]) if lengths is not None and per_row else None,
            segments=segments,
            generated_from=1 if decodes else width,
            training=self.staging and has_answers,
            kinds=self.kinds(shape),
        )


@dataclass(eq=False)
class Running:
    """The calls in progress in one thread."""

    call: ModelCall | None = None
    blocks: BlocksCall | None = None
    generation: Generation | None = None
    # for calls to come
    knocked_out: dict[RoutingContext, KnockedOut] = field(default_factory=dict)  # by `knock_out`
    row_adapters: dict[RoutingContext, RowAdapters] = field(default_factory=dict)  # by `adapter_names`


class _Threads(threading.local):
    def __init__(self) -> None:  # runs once in every thread
        self.running = Running()


_threads = _Threads()


def running() -> Running:
    """The calls in progress in this thread, in a plain object because torch.compile loses writes to a `local`."""
    return _threads.running


@contextmanager
def inside(call: ModelCall, blocks: BlocksCall | None) -> Iterator[None]:
    """Run inside an earlier call again, in whatever thread this is."""
    here = running()
    before = here.call, here.blocks
    here.call, here.blocks = call, blocks
    try:
        yield
    finally:
        here.call, here.blocks = before


@contextmanager
def belonging_to(generation: Generation) -> Iterator[None]:
    """Every forward that this thread runs inside the `with` belongs to this generation."""
    here = running()
    around, here.generation = here.generation, generation
    try:
        yield
    finally:
        here.generation = around


def calls_of(context: RoutingContext) -> ModelCall | None:
    """The forward of this model that runs in this thread, if one does."""
    call = running().call
    return call if call is not None and call.context is context else None


def row_adapters_of(context: RoutingContext) -> RowAdapters | None:
    """The adapters of the rows of the forward that runs in this thread; None where all rows use the active ones."""
    call = calls_of(context)
    return None if call is None else call.row_adapters


def _made_for(shape: tuple[int, int], now: Any) -> bool:
    """Whether what was made for `shape` still fits. A compiler must not compare: its graph serves all lengths."""
    return torch.compiler.is_compiling() or shape == tuple(now)


def in_backward() -> bool:
    """Whether this code runs inside a backward pass: gradient checkpointing is recomputing a block."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def hidden_states(args: tuple, kwargs: dict[str, Any], path: str) -> Tensor:
    """The hidden state a block was called with."""
    h = args[0] if args else kwargs.get("hidden_states", kwargs.get("x"))
    if not isinstance(h, Tensor) or h.dim() != 3:
        raise ConfigError(
            f"block {path!r} was not called with a [batch, tokens, width] hidden state: this architecture cannot be "
            "routed; set layers_to_route=[] for adapters that are always on."
        )
    return h


def real_tokens(mask: Any, shape: Any) -> Tensor | None:
    """[B, T] True on real tokens, from any mask a Transformers model is called with; None = all real."""
    if isinstance(mask, dict):  # one mask per attention type
        mask = mask.get("full_attention", next(iter(mask.values()), None))
    if mask is None:
        return None
    T = shape[1]
    if mask.dim() == 4:  # [B, 1, T, S]: a token is real if it may attend to itself; a lone decoded token always is
        if T == 1:
            return None
        own = mask[:, 0, :, :T].diagonal(dim1=-2, dim2=-1)
        return (own if own.dtype == torch.bool else own == 0).expand(shape[0], T)
    if mask.dim() != 2 or mask.shape[1] < T:
        raise ConfigError(
            f"attention_mask of shape {tuple(mask.shape)} does not cover {T} tokens: pass the [batch, tokens] mask of "
            "the tokens that enter the blocks."
        )
    return mask[:, -T:].bool()


def expanded_rows(tensor: Tensor, rows: int) -> Tensor:
    """Repeat per-row values for a batch that `generate` widened (beams, several returned sequences)."""
    if tensor.shape[0] == rows or rows % tensor.shape[0] != 0:
        return tensor
    return tensor.repeat_interleave(rows // tensor.shape[0], dim=0)
