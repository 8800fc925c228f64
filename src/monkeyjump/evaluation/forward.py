"""Prompts through a causal model once, then any continuations of them.

The prompt is run once per example and its KV cache is shared by all answers. That is also what makes the routing right:
a sequence-routed adapter decides at the end of the prompt, as in generation, and keeps the decision with the cache, so
no answer can influence how it is scored.

Shapes: B prompts, P prompt tokens (padded on the left), N answers per prompt, L answer tokens (padded on the right), V
vocabulary. Logits are made for answer positions only.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from monkeyjump.errors import ConfigError
from monkeyjump.tuner.call import Generation, belonging_to
from monkeyjump.tuner.model import find_context

_FLOATS_AT_ONCE = 2**25  # logits converted to float32 in one piece: 128 MiB


@dataclass
class Prefix:
    """A batch of prompts after the model has read them."""

    next_logits: torch.Tensor  # [B, V], what follows each prompt, float32
    cache: Any
    mask: torch.Tensor  # [B, P]
    lengths: torch.Tensor  # [B]
    extras: dict[str, torch.Tensor]
    generation: Generation  # the answers belong to these prompts


class AnswerReader:
    """A model as evaluation uses it: the plain one, or one with adapters of any kind."""

    def __init__(self, model: Any, pad_id: int) -> None:
        self.model = model
        self.pad_id = pad_id
        self.device = model.get_input_embeddings().weight.device
        self.routed = find_context(model) is not None
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._accepts = set(inspect.signature(base.forward).parameters)

    def read(self, prompts: Sequence[Sequence[int]], task_ids: Sequence[int]) -> Prefix:
        """Run the prompts."""
        ids, mask = padded(prompts, self.pad_id, "left")
        ids, mask = ids.to(self.device), mask.to(self.device)
        extras: dict[str, torch.Tensor] = {}
        lengths = mask.sum(1)
        if self.routed:  # a Monkey Jump model takes these out before the model sees them
            extras["task_ids"] = torch.tensor(list(task_ids), device=self.device)
        generation = Generation(ids.shape[1])
        with belonging_to(generation):
            output = self._call(ids, mask, (mask.cumsum(1) - 1).clamp_min(0), keep=1, cache=None, extras=extras)
        if getattr(output, "past_key_values", None) is None:
            raise ConfigError(
                f"{type(self.model).__name__} returns no KV cache, which evaluation shares between the answers: "
                "evaluate a decoder-only model.",
                title="model cannot be evaluated",
            )
        return Prefix(output.logits[:, -1].float(), output.past_key_values, mask, lengths, extras, generation)

    def extend(self, prefix: Prefix, answers: Sequence[Sequence[int]]) -> torch.Tensor:
        """Logits [B * N, L, V] after each token of N answers per prompt, prompt by prompt. Uses the prefix up."""
        repeats = len(answers) // prefix.mask.shape[0]
        ids, mask = padded(answers, self.pad_id, "right")
        ids, mask = ids.to(self.device), mask.to(self.device)
        if repeats > 1:
            prefix.cache.batch_repeat_interleave(repeats)
        whole = torch.cat([prefix.mask.repeat_interleave(repeats, 0), mask], 1)
        lengths = prefix.lengths.repeat_interleave(repeats)
        positions = lengths.unsqueeze(1) + torch.arange(ids.shape[1], device=self.device)
        extras = {name: value.repeat_interleave(repeats) for name, value in prefix.extras.items()}
        with belonging_to(prefix.generation):
            return self._call(ids, whole, positions, keep=ids.shape[1], cache=prefix.cache, extras=extras).logits

    def greedy(self, prefix: Prefix, max_new_tokens: int, end_ids: set[int]) -> list[list[int]]:
        """The most likely next token, again and again, up to an end token (not returned). Uses the prefix up."""
        rows = prefix.mask.shape[0]
        found: list[list[int]] = [[] for _ in range(rows)]
        running = [True] * rows
        logits, mask = prefix.next_logits, prefix.mask
        for step in range(max_new_tokens):
            chosen = logits.argmax(-1)
            for row, token in enumerate(chosen.tolist()):
                running[row] = running[row] and token not in end_ids
                if running[row]:
                    found[row].append(token)
            if not any(running) or step == max_new_tokens - 1:
                break
            mask = torch.cat([mask, mask.new_ones(rows, 1)], 1)
            positions = (prefix.lengths + step).unsqueeze(1)
            with belonging_to(prefix.generation):
                output = self._call(chosen.unsqueeze(1), mask, positions, 1, prefix.cache, prefix.extras)
            logits = output.logits[:, -1].float()
        return found

    def _call(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor,
        positions: torch.Tensor,
        keep: int,
        cache: Any,
        extras: dict[str, torch.Tensor],
    ) -> Any:
        arguments: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "use_cache": True, **extras}
        if cache is not None:
            arguments["past_key_values"] = cache
        if "position_ids" in self._accepts:
            arguments["position_ids"] = positions
        if "logits_to_keep" in self._accepts:
            arguments["logits_to_keep"] = keep
        return self.model(**arguments, return_dict=True)


def padded(rows: Sequence[Sequence[int]], pad_id: int, side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of ids as one tensor and its mask."""
    width = max(len(row) for row in rows)
    ids = torch.full((len(rows), width), pad_id, dtype=torch.long)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for number, row in enumerate(rows):
        place = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        ids[number, place] = torch.tensor(row, dtype=torch.long)
        mask[number, place] = 1
    return ids, mask


def answer_logprobs(
    reader: AnswerReader,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[Sequence[int]]],
    task_ids: Sequence[int],
) -> list[list[float]]:
    """The log-probability of every answer of every prompt; every prompt of a call has the same number of answers."""
    prefix = reader.read(prompts, task_ids)
    device = prefix.next_logits.device
    first = prefix.next_logits.log_softmax(-1)
    firsts = torch.tensor([[ids[0] for ids in row] for row in answers], device=device)
    total = first.gather(1, firsts).double()  # [B, N]
    flat = [ids for row in answers for ids in row]
    if max(map(len, flat)) > 1:
        # A one-token answer needs no more than the prompt; beside longer ones it runs as a row that adds nothing.
        logits = reader.extend(prefix, [ids[:-1] or ids for ids in flat])
        targets, mask = padded([ids[1:] or [0] for ids in flat], 0, "right")
        mask *= torch.tensor([[len(ids) > 1] for ids in flat])
        rest = _gathered(logits, targets.to(device)) * mask.to(device)
        total = total + rest.double().sum(1).view(total.shape)
    return total.tolist()


def _gathered(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [R, L] of the targets, in float32, without a float32 copy of all logits."""
    rows = max(1, _FLOATS_AT_ONCE // (logits.shape[1] * logits.shape[2]))
    parts = []
    for start in range(0, len(logits), rows):
        part = logits[start : start + rows, : targets.shape[1]].float()
        picked = part.gather(2, targets[start : start + rows].unsqueeze(2)).squeeze(2)
        parts.append(picked - part.logsumexp(2))
    return torch.cat(parts)


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
