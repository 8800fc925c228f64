"""A step of decoding, as one CUDA graph or as it comes.

A small model waits for the host, which launches hundreds of kernels for every token. A recorded step is one launch. It
reads and writes tensors that stay where they are: the token, its position, the cache, which slots of it are seen, and
what was decided for each sequence by its prompt.

Transformers' `generate` with a static cache is no shorter way: it pads on the left, prepares every step on the host,
and compiles the model.

Shapes: B prompts, R rows and S slots of a recording, V vocabulary.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer

from monkeyjump.errors import MonkeyJumpWarning
from monkeyjump.evaluation.forward import AnswerReader, Prefix
from monkeyjump.training.cuda_graphs import CudaGraph, Memory
from monkeyjump.tuner.block_list import KEPT
from monkeyjump.tuner.call import Generation, belonging_to
from monkeyjump.tuner.fast.packed_weights import managed
from monkeyjump.tuner.model import find_context


class _Slots(DynamicLayer):
    """Keys and values [rows, heads, slots, width] that stay where they are; a token is written into slot `place`.

    Transformers' own static layer counts its tokens on the device, and whoever asked for the number would wait.
    """

    keys: Any
    values: Any

    def __init__(self, like: Any, rows: int, slots: int, place: Tensor) -> None:
        super().__init__()
        # Zeros: a slot that no token has been written to is masked, but a NaN would show through the mask.
        self.keys, self.values = (
            given.new_zeros(rows, given.shape[1], slots, given.shape[3]) for given in (like.keys, like.values)
        )
        self.is_initialized, self.place = True, place

    def fill(self, given: Any) -> None:
        """Begin with the tokens of a growing layer."""
        rows, _, width, _ = given.keys.shape
        self.keys[:rows, :, :width].copy_(given.keys)
        self.values[:rows, :, :width].copy_(given.values)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.keys.index_copy_(2, self.place, key_states)
        self.values.index_copy_(2, self.place, value_states)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.keys.shape[2]


class GrowingStep:
    """The forward of one token for each prompt, on the cache that the prompts have left."""

    def __init__(self, reader: AnswerReader, prefix: Prefix) -> None:
        self.reader, self.prefix, self.mask, self.positions = reader, prefix, prefix.mask.long(), prefix.lengths

    def after(self, tokens: Tensor) -> Tensor:
        """The logits [B, V] that follow these tokens [B]."""
        self.mask = nn.functional.pad(self.mask, (0, 1), value=1)
        with belonging_to(self.prefix.generation):
            ids, positions = tokens.unsqueeze(1), self.positions.unsqueeze(1)
            output = self.reader.call(ids, self.mask, positions, self.prefix.cache, keep=1)
        self.positions = self.positions + 1
        return output.logits[:, -1]


class RecordedStep:
    """The forward of one token for each of R rows, on a cache of S slots."""

    def __init__(self, reader: AnswerReader, like: Prefix, R: int, S: int, graph: CudaGraph) -> None:
        zeros, self.graph, self.reader = like.lengths.new_zeros, graph, reader
        self.token, self.positions, self.place = zeros(R, 1), zeros(R, 1), zeros(1)
        self.mask = zeros(R, 1, 1, S, dtype=torch.bool)
        self.layers = [_Slots(layer, R, S, self.place) for layer in like.cache.layers]
        self.cache, self.task_ids = Cache(layers=list(self.layers)), zeros(R)
        self.generation = Generation(S, self.task_ids)
        self.decisions = {key: made.new_zeros(R, *made.shape[1:]) for key, made in _decisions(like).items()}
        if self.decisions:
            setattr(self.cache, KEPT, (self.generation, self.decisions))
        graph.rehearse(self._rehearsal)  # a recording can load no kernel
        self.made = graph.record(self._step)

    def start(self, prefix: Prefix) -> None:
        """Put a batch of prompts in place."""
        B, P = prefix.mask.shape
        for layer, given in zip(self.layers, prefix.cache.layers, strict=True):
            layer.fill(given)
        for key, made in _decisions(prefix).items():
            self.decisions[key][:B].copy_(made)
        if prefix.generation.task_ids is not None:
            self.task_ids[:B].copy_(prefix.generation.task_ids)
        self.positions.zero_()
        self.positions[:B, 0].copy_(prefix.lengths)
        self.mask.zero_()
        self.mask[:B, 0, 0, :P].copy_(prefix.mask)
        self.place.fill_(P)

    def after(self, tokens: Tensor) -> Tensor:
        """The logits [B, V] that follow these tokens [B]; the next call writes over them."""
        B = tokens.shape[0]
        self.token[:B, 0].copy_(tokens)
        self.graph.replay()
        return self.made[0][:B]

    def _step(self) -> list[Tensor]:
        """Run the last token and go on to the next place; the logits [R, V] are those of the next token."""
        self.mask.index_fill_(3, self.place, True)
        with belonging_to(self.generation):
            output = self.reader.call(self.token, self.mask, self.positions, self.cache, keep=1)
        self.positions.add_(1)
        self.place.add_(1)
        return [output.logits[:, -1]]

    def _rehearsal(self) -> None:
        self._step()


def _decisions(prefix: Prefix) -> dict[Any, Tensor]:
    """What sequence routing decided by the prompts."""
    kept = getattr(prefix.cache, KEPT, None)
    return {} if kept is None else kept[1]


def why_not(reader: AnswerReader) -> str | None:
    """Why the steps of a model on a GPU cannot be recorded; None where they can."""
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
    return next((reason for reason, holds in reasons.items() if holds), None)


def new_graph(reader: AnswerReader) -> Callable[[], CudaGraph] | None:
    """What makes a graph for this model; None where its steps run as they are."""
    if reader.device.type != "cuda":
        return None
    if (reason := why_not(reader)) is None:
        return lambda: CudaGraph(Memory())
    say_why(reason)
    return None


def say_why(reason: str) -> None:
    """Tell once why steps run as they are."""
    warnings.warn(f"answers are generated without CUDA graphs: {reason}.", MonkeyJumpWarning, stacklevel=2)
