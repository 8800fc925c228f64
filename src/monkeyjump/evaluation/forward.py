"""Prompts through a causal model once, then any continuations of them.

The prompt is run once per example and its KV cache is shared by all answers. That is also what makes the routing right:
a sequence-routed adapter decides at the end of the prompt, as in generation, and keeps the decision with the cache, so
no answer can influence how it is scored.

Prompts are padded on the right and run without a mask, for which attention has its fastest kernels: in a causal model
no token sees the padding behind it. Where that does not hold (`AnswerReader._hides_what_follows`), or the cache cannot
have padding between a prompt and its answer, they are padded on the left and masked.

Nothing here waits for the device.

Shapes: B prompts, P prompt tokens, R answers of all prompts, L answer tokens (padded on the right), V vocabulary.
Logits are made for answer positions only.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from monkeyjump.errors import ConfigError
from monkeyjump.evaluation.jobs import Batch, Job
from monkeyjump.tasks.pictures import Pictures
from monkeyjump.tuner.block_list import repeat_rows
from monkeyjump.tuner.call import Generation, belonging_to

_FLOATS_AT_ONCE = 2**25  # logits converted to float32 in one piece: 128 MiB


class _NothingKept(DynamicLayer):
    """A layer of a cache that stays empty: the forward is one without a cache, and the model sees no packed rows."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states


@dataclass
class Inputs:
    """The ids of a batch on the device."""

    left: bool  # whether the prompts are padded on the left
    prompts: Tensor  # [B, P]
    lengths: Tensor  # [B]
    task_ids: Tensor  # [B]
    answers: Tensor  # [R, L], those of the first prompt, then those of the second, ...
    answer_lengths: Tensor  # [R]
    owners: Tensor  # [R], the prompt of each answer
    shown: dict[str, Tensor] = field(default_factory=dict)  # what the model takes of pictures and clips


@dataclass
class Prefix:
    """A batch of prompts after the model has read them."""

    logits: Tensor  # [B, 1, V], what follows each prompt
    cache: Any
    mask: Tensor  # [B, P]
    lengths: Tensor  # [B]
    generation: Generation  # the answers belong to these prompts


class AnswerReader:
    """A model as evaluation uses it: the plain one, or one with adapters of any kind."""

    def __init__(self, model: Any, pad_id: int, pictures: Pictures | None = None) -> None:
        self.model = model
        self.pad_id = pad_id
        self.pictures = pictures
        self.device = model.get_input_embeddings().weight.device
        self.base = base = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._accepts = set(inspect.signature(base.forward).parameters)
        self._head = base.get_output_embeddings()
        self._right: bool | None = None  # whether prompts may be padded on the right; found out with the first batch
        # a part whose positions depend on pictures computes those of the prompt, and keeps a shift for what follows
        self.shifts = next((module for module in base.modules() if hasattr(module, "rope_deltas")), None)
        self._cache_takes_gaps = "position_ids" in self._accepts and _all_layers_grow(base.config)
        adapters = getattr(model, "peft_config", {}).values()
        virtual = any(getattr(config, "is_prompt_learning", False) for config in adapters)
        self.takes_any_cache = self._cache_takes_gaps and not virtual  # else PEFT puts one of its own there

    def batch_tokens(self) -> int:
        """The padded tokens of a batch that keeps this device busy."""
        return 8192 if self.device.type == "cpu" else 65536

    def prepare(self, batch: Batch) -> Inputs:
        """The batch on its way to the device; the same inputs serve every run."""
        if batch.inputs is None:
            if self._right is None:
                self._right = self._head is not None and self._hides_what_follows()
            right = self._right and (self._cache_takes_gaps or not batch.continues)
            batch.inputs = self._inputs(batch.jobs, left=not right)
        return batch.inputs

    def answer_logprobs(self, batch: Batch) -> Tensor:
        """The log-probability of every answer, float64 [R]."""
        inputs = self.prepare(batch)
        prefix, first = self.read(inputs, cached=batch.continues), inputs.answers[:, 0]
        logits = prefix.logits[:, 0]
        total = (logits[inputs.owners, first].float() - _logsumexp(logits)[inputs.owners]).double()
        if not batch.continues:
            return total
        logits, targets = self.extend(prefix, inputs), inputs.answers[:, 1:]
        picked = logits.gather(2, targets.unsqueeze(2)).squeeze(2).float()
        real = _real_tokens(inputs.answer_lengths - 1, targets.shape[1], left=False)
        rest = (picked - _logsumexp(logits.flatten(0, 1)).view_as(picked)).masked_fill(~real, 0.0)
        return total + rest.double().sum(1)

    def read(self, inputs: Inputs, cached: bool) -> Prefix:
        """Run the prompts. The cache is made only where something will follow."""
        mask, lengths = _real_tokens(inputs.lengths, inputs.prompts.shape[1], inputs.left), inputs.lengths
        if self.shifts is not None:
            self.shifts.rope_deltas = None  # of other prompts
        generation = Generation(mask.shape[1], inputs.task_ids, prompt_mask=mask)
        with belonging_to(generation):
            if inputs.left:
                positions = (mask.long().cumsum(1) - 1).clamp_min(0)
                output = self.call(inputs.prompts, mask.long(), positions, None, keep=1, **inputs.shown)
            else:
                # Without any cache Transformers would look, and so wait, whether sequences are packed in a row.
                empty = (
                    {}
                    if cached or not self.takes_any_cache
                    else {"past_key_values": Cache(layer_class_to_replicate=_NothingKept)}
                )
                given = {"input_ids": inputs.prompts, **inputs.shown, **empty}
                with self._head_reads(lengths - 1, mask.shape[1]):
                    output = self.model(**given, use_cache=cached, return_dict=True)
        cache = getattr(output, "past_key_values", None)
        if cache is None and (cached or inputs.left):
            raise ConfigError(
                f"{type(self.model).__name__} returns no KV cache, which evaluation shares between the answers: "
                "evaluate a decoder-only model.",
                title="model cannot be evaluated",
            )
        return Prefix(output.logits[:, -1:], cache, mask, lengths, generation)

    def extend(self, prefix: Prefix, inputs: Inputs) -> Tensor:
        """Logits [R, L - 1, V] after each token of the answers but the last. Uses the prefix up."""
        ids, owners = inputs.answers[:, :-1], inputs.owners
        repeat_rows(prefix.cache, owners)
        if self.shifts is not None and self.shifts.rope_deltas is not None:
            self.shifts.rope_deltas = self.shifts.rope_deltas[owners]
        prefix.generation.task_ids = inputs.task_ids[owners]
        places = torch.arange(ids.shape[1], device=self.device)
        # A one-token answer needs no more than the prompt; beside longer ones it runs as a row that adds nothing.
        mask = _real_tokens((inputs.answer_lengths - 1).clamp_min(1), ids.shape[1], left=False)
        whole = torch.cat([prefix.mask[owners], mask], 1).long()
        with belonging_to(prefix.generation):
            positions = prefix.lengths[owners].unsqueeze(1) + places
            return self.call(ids, whole, positions, prefix.cache, keep=ids.shape[1]).logits

    def call(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Any, keep: int, **shown: Tensor) -> Any:
        """The model's output; logits for the last `keep` tokens where it can be told so."""
        arguments: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "use_cache": True, **shown}
        if cache is not None:
            arguments["past_key_values"] = cache
            if self.shifts is not None and self.shifts.rope_deltas is not None:
                positions = positions + self.shifts.rope_deltas
        if "position_ids" in self._accepts and (cache is not None or self.shifts is None):
            arguments["position_ids"] = positions
        if "logits_to_keep" in self._accepts:
            arguments["logits_to_keep"] = keep
        return self.model(**arguments, return_dict=True)

    @contextmanager
    def _head_reads(self, last: Tensor, width: int) -> Iterator[None]:
        """Inside, logits are made for one position of each row only, as [B, 1, V]."""

        def pick(module: nn.Module, args: tuple) -> tuple:
            hidden = args[0]  # wider than the ids where an adapter puts virtual tokens before them
            places = (last.to(hidden.device) + hidden.shape[1] - width).view(-1, 1, 1)
            return hidden.gather(1, places.expand(-1, 1, hidden.shape[2])), *args[1:]

        handle = self._head.register_forward_pre_hook(pick)
        try:
            yield
        finally:
            handle.remove()

    def _hides_what_follows(self) -> bool:
        """Whether tokens behind a prompt change nothing: asked of the model itself, with one small forward."""
        prompts = torch.tensor([[1, 2, 3, 1, 1], [1, 2, 3, 2, 3]], device=self.device)
        lengths, task_ids = prompts.new_full((2,), 3), prompts.new_zeros(2)
        inputs = Inputs(False, prompts, lengths, task_ids, prompts[:, :0], lengths, task_ids)
        one, other = self.read(inputs, cached=False).logits.float()
        return bool((one - other).abs().max() <= 1e-3 * one.abs().max())

    def _inputs(self, jobs: Sequence[Job], left: bool) -> Inputs:
        prompts, lengths = padded([job.prompt for job in jobs], self.pad_id, left)
        answers, answer_lengths = padded([ids for job in jobs for ids in job.answers], 0, left=False)
        task_ids = np.array([job.task_id for job in jobs])
        owners = np.repeat(np.arange(len(jobs)), [len(job.answers) for job in jobs])
        parts = [prompts, lengths, task_ids, answers, answer_lengths, owners]
        together = torch.from_numpy(np.concatenate([part.reshape(-1) for part in parts]))
        if self.device.type == "cuda":  # one copy, and from pinned memory it does not wait for the kernels before it
            together = together.pin_memory()
        tensors = together.to(self.device, non_blocking=True).split([part.size for part in parts])
        inputs = Inputs(left, *(tensor.view(part.shape) for tensor, part in zip(tensors, parts, strict=True)))
        if self.pictures is not None:
            found = self.pictures.tensors([job.example.media for job in jobs])
            inputs.shown = {name: tensor.to(self.device, non_blocking=True) for name, tensor in found.items()}
            inputs.shown |= self.pictures.kinds(inputs.prompts)
        return inputs


def padded(rows: Sequence[Sequence[int]], pad_id: int, left: bool) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Rows of ids as one array, and their lengths."""
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    places = np.arange(lengths.max())
    real = places >= len(places) - lengths[:, None] if left else places < lengths[:, None]
    ids = np.full(real.shape, pad_id)
    ids[real] = np.fromiter(chain.from_iterable(rows), np.int64, lengths.sum())
    return ids, lengths


def _real_tokens(lengths: Tensor, width: int, left: bool) -> Tensor:
    """[rows, width] True on tokens that are no padding."""
    places = torch.arange(width, device=lengths.device)
    return places >= width - lengths.unsqueeze(1) if left else places < lengths.unsqueeze(1)


def _all_layers_grow(config: Any) -> bool:
    """Whether the cache keeps all tokens apart: a window or a recurrent state would be filled with padding."""
    return all(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers)


def _logsumexp(logits: Tensor) -> Tensor:
    """In float32 without a float32 copy of all logits: [R, V] -> [R]."""
    rows = max(1, _FLOATS_AT_ONCE // logits.shape[1])
    return torch.cat([part.float().logsumexp(1) for part in logits.split(rows)])


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; every module's own mode comes back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def short_collections() -> Iterator[None]:
    """Inside, Python's garbage collector looks at new objects only.

    A look at all objects that torch and Transformers have made stops the launches for a quarter of a second.
    """
    if gc.get_freeze_count():  # somebody else has done so, and will end it
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
