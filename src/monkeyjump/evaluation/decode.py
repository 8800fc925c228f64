"""Greedy answers: the prompts at once, then all rows token by token, where possible with every step one CUDA graph.

A small model waits for the host, which launches hundreds of kernels for every token. A recorded step is one launch. It
reads and writes tensors that stay where they are: the token, its position, the cache, which slots of it are seen, what
was decided for each sequence by its prompt, and the tokens found so far. Prompts are not recorded: they are read as for
scoring, and their keys and values are then copied.

A recording serves all batches of its number of rows and cache slots, of which there are few: rows are filled up to
a power of two and slots to a multiple of 64. Only the last recording is kept, because batches are sorted by length.

Transformers' `generate` with a static cache is no shorter way: it pads on the left, prepares every step on the host,
and compiles the model.

Shapes: B prompts, P prompt tokens, R rows and S slots of a recording, V vocabulary.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from monkeyjump.errors import MonkeyJumpWarning
from monkeyjump.evaluation.caches import Slots
from monkeyjump.evaluation.forward import AnswerReader, Prefix
from monkeyjump.evaluation.jobs import Batch
from monkeyjump.training.cuda_graphs import CudaGraph, Memory
from monkeyjump.tuner.block_list import KEPT
from monkeyjump.tuner.call import Generation, belonging_to
from monkeyjump.tuner.fast.packed_weights import managed
from monkeyjump.tuner.model import find_context

_STEPS_BETWEEN_LOOKS = 8  # steps after which it is asked, once, whether every row has ended
_SLOTS = 64


class Decoder:
    """Generates the answers of batches. It holds a recording, so it must not outlive what the model is switched to."""

    def __init__(self, reader: AnswerReader, end_ids: set[int]) -> None:
        self.reader = reader
        self.ends = torch.tensor(sorted(end_ids), dtype=torch.long, device=reader.device)
        self._new_graph = new_graph(reader)
        self._recorded: _Recorded | None = None

    def answers(self, batch: Batch) -> Tensor:
        """The most likely next token, again and again, [B, at most the longest limit]. Rows that ended are padded."""
        prefix = self.reader.read(self.reader.prepare(batch), cached=True)
        steps = max(job.limit for job in batch.jobs)
        rows = self._recorded_rows(prefix, steps) or _Rows(self.reader, self.ends, prefix, steps)
        for step in range(1, steps):
            if step % _STEPS_BETWEEN_LOOKS == 0 and bool(rows.ended.all()):
                break
            rows.advance()
        return rows.found()

    def _recorded_rows(self, prefix: Prefix, steps: int) -> _Recorded | None:
        if self._new_graph is None:
            return None
        (B, P), recorded = prefix.mask.shape, self._recorded
        R, S = 1 << (B - 1).bit_length(), -(-(P + steps) // _SLOTS) * _SLOTS
        if recorded is None or recorded.mask.shape != (R, 1, 1, S):
            recorded = self._recorded = None  # its memory is needed
            try:
                recorded = self._recorded = _Recorded(self.reader, self.ends, prefix, R, S, self._new_graph())
            except RuntimeError as error:
                self._new_graph = None
                _say_why(str(error).splitlines()[0])
                return None
        recorded.start(prefix)
        return recorded


class _Choice:
    """How the next token is chosen."""

    def __init__(self, reader: AnswerReader, ends: Tensor) -> None:
        self.reader, self.ends = reader, ends

    def chosen(self, logits: Tensor, ended: Tensor) -> tuple[Tensor, Tensor]:
        """The next token of each row, and which rows have ended with it: [R, V], [R] -> [R], [R]."""
        tokens = logits.argmax(-1).masked_fill(ended, self.reader.pad_id)
        return tokens, ended | (tokens.unsqueeze(1) == self.ends).any(1)


class _Rows(_Choice):
    """Decoding as it comes, on a cache that grows."""

    def __init__(self, reader: AnswerReader, ends: Tensor, prefix: Prefix, steps: int) -> None:
        super().__init__(reader, ends)
        self.prefix = prefix
        self.mask = nn.functional.pad(prefix.mask.long(), (0, steps), value=1)
        nobody = torch.zeros_like(prefix.lengths, dtype=torch.bool)
        tokens, self.ended = self.chosen(prefix.logits[:, -1], nobody)
        self.tokens = [tokens]

    def advance(self) -> None:
        prefix, count = self.prefix, len(self.tokens)
        positions, seen = prefix.lengths + count - 1, self.mask[:, : prefix.mask.shape[1] + count]
        with belonging_to(prefix.generation):
            ids = self.tokens[-1].unsqueeze(1)
            output = self.reader.call(ids, seen, positions.unsqueeze(1), prefix.cache, keep=1)
        tokens, self.ended = self.chosen(output.logits[:, -1], self.ended)
        self.tokens.append(tokens)

    def found(self) -> Tensor:
        return torch.stack(self.tokens, 1)


class _Recorded(_Choice):
    """Decoding by one recorded step, for R rows and S slots. Rows without a prompt have ended before they begin."""

    def __init__(self, reader: AnswerReader, ends: Tensor, like: Prefix, R: int, S: int, graph: CudaGraph) -> None:
        super().__init__(reader, ends)
        zeros, self.graph = like.lengths.new_zeros, graph
        self.token, self.positions, self.place, self.tokens = zeros(R, 1), zeros(R, 1), zeros(1), zeros(R, S)
        self.ended, self.mask = zeros(R, dtype=torch.bool), zeros(R, 1, 1, S, dtype=torch.bool)
        self.layers = [Slots(layer, R, S, self.place) for layer in like.cache.layers]
        self.cache, self.task_ids = Cache(layers=list(self.layers)), zeros(R)
        self.generation = Generation(S, self.task_ids)
        self.decisions = {key: made.new_zeros(R, *made.shape[1:]) for key, made in _decisions(like).items()}
        if self.decisions:
            setattr(self.cache, KEPT, (self.generation, self.decisions))
        graph.rehearse(self._step)  # a recording can load no kernel
        graph.record(self._recorded_step)

    def start(self, prefix: Prefix) -> None:
        """Put a batch of prompts in place."""
        self.rows, self.width, self.count = *prefix.mask.shape, 1
        rows = slice(self.rows)
        for layer, given in zip(self.layers, prefix.cache.layers, strict=True):
            layer.fill(given)
        for key, made in _decisions(prefix).items():
            self.decisions[key][rows].copy_(made)
        if prefix.generation.task_ids is not None:
            self.task_ids[rows].copy_(prefix.generation.task_ids)
        self.positions.zero_()
        self.positions[rows, 0].copy_(prefix.lengths)
        self.mask.zero_()
        self.mask[rows, 0, 0, : self.width].copy_(prefix.mask)
        self.place.fill_(self.width)
        self.ended.fill_(True)
        tokens, ended = self.chosen(prefix.logits[:, -1], torch.zeros_like(self.ended[rows]))
        self.ended[rows].copy_(ended)
        self.token[rows, 0].copy_(tokens)
        self.tokens[rows, self.width].copy_(tokens)

    def advance(self) -> None:
        self.count += 1
        self.graph.replay()

    def found(self) -> Tensor:
        return self.tokens[: self.rows, self.width : self.width + self.count].clone()

    def _recorded_step(self) -> list[Tensor]:
        self._step()
        return []

    def _step(self) -> None:
        """Run the last token and choose the next, all in place."""
        self.mask.index_fill_(3, self.place, True)
        with belonging_to(self.generation):
            output = self.reader.call(self.token, self.mask, self.positions, self.cache, keep=1)
        tokens, ended = self.chosen(output.logits[:, -1], self.ended)
        self.ended.copy_(ended)
        self.token.copy_(tokens.unsqueeze(1))
        self.positions.add_(1)
        self.place.add_(1)
        self.tokens.index_copy_(1, self.place, self.token)


def _decisions(prefix: Prefix) -> dict[Any, Tensor]:
    """What sequence routing decided by the prompts."""
    kept = getattr(prefix.cache, KEPT, None)
    return {} if kept is None else kept[1]


def new_graph(reader: AnswerReader) -> Callable[[], CudaGraph] | None:
    """What makes a graph for this model; None where its steps run as they are."""
    if reader.device.type != "cuda":
        return None
    base, context, place = reader.base, find_context(reader.model), reader.device.index
    attention, parts = base.config._attn_implementation, set(getattr(base, "hf_device_map", {}).values())
    routers = {getattr(config, "router", None) for config in getattr(reader.model, "peft_config", {}).values()}
    reasons = {
        "its cache is not one of all tokens": not reader.takes_any_cache,
        "its positions depend on pictures": reader.shifts is not None,
        "it is not known to work with a static cache": not getattr(base, "_can_compile_fullgraph", False),
        f"its attention is {attention!r}, not 'sdpa'": attention != "sdpa",
        "its weights are gathered for every call": managed(reader.model),
        "it lies on several devices": len(parts) > 1,
        "its device is not the current one": place is not None and place != torch.cuda.current_device(),
        "its gates are shuffled over the rows of a batch, which may not be filled up": "shuffled" in routers,
        "somebody looks at the routing": context is not None and context.trace is not None,
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    if reason is None:
        return lambda: CudaGraph(Memory())
    _say_why(reason)
    return None


def _say_why(reason: str) -> None:
    warnings.warn(f"answers are generated without CUDA graphs: {reason}.", MonkeyJumpWarning, stacklevel=2)
