"""Sequences to tensors. B sequences in a batch, T tokens in each; N tokens in a packed row, S sequences in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from monkeyjump.errors import ConfigError
from monkeyjump.tasks.encode import IGNORE, Encoded

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class PaddingCollator:
    """`input_ids`, `attention_mask`, `labels` [B, T]; `task_ids`, `prompt_lengths` [B].

    T is the longest sequence, rounded up to a multiple of `multiple_of`, or to the smallest of `buckets` that holds it:
    few distinct shapes is what compilation and CUDA graphs need. Pads are on the right; they are masked by length,
    because the pad token of many models is their eos, which must be learned. A batch of less than
    `rows` sequences, as the last of an epoch may be, is filled up with rows of padding alone, which are not counted.
    """

    pad_token_id: int
    multiple_of: int = 1
    buckets: tuple[int, ...] = ()
    rows: int = 0

    def __call__(self, items: Sequence[Encoded]) -> Batch:
        about = _about(items, max(self.rows, len(items)))
        about["task_ids"][len(items) :] = items[-1].task_id  # methods that learn by task look every id up
        shape = (len(about["task_ids"]), self._width(max(len(item) for item in items)))
        input_ids = torch.full(shape, self.pad_token_id, dtype=torch.long)
        labels = torch.full(shape, IGNORE, dtype=torch.long)
        attention_mask = torch.zeros(shape, dtype=torch.long)
        for row, item in enumerate(items):
            input_ids[row, : len(item)] = torch.tensor(item.input_ids)
            labels[row, : len(item)] = torch.tensor(item.labels)
            attention_mask[row, : len(item)] = 1
        return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels, **about}

    def _width(self, longest: int) -> int:
        if not self.buckets:
            return -(-longest // self.multiple_of) * self.multiple_of
        fitting = [size for size in self.buckets if size >= longest]
        if not fitting:
            raise ConfigError(
                f"buckets={list(self.buckets)}: none holds a sequence of {longest} tokens. "
                "Add a bucket as large as max_length."
            )
        return min(fitting)


@dataclass(frozen=True)
class PackingCollator:
    """One row [1, N] of sequences end to end, without padding between them and without an attention mask.

    `input_ids`, `labels`, `position_ids` (from 0 in each sequence), `seq_idx` (0..S-1, int32) are [1, N]. `task_ids`
    and `prompt_lengths` are [S]: entry s belongs to the tokens with `seq_idx == s`. With `length` every row has that N;
    the tail is pads with `seq_idx` -1, `labels` -100 and positions that start at 0 again, so attention keeps it apart.
    With `max_sequences` the two per-sequence tensors have that fixed size, filled up with -1.
    """

    pad_token_id: int
    length: int | None = None
    max_sequences: int | None = None

    def __call__(self, items: Sequence[Encoded]) -> Batch:
        total = sum(len(item) for item in items)
        length = total if self.length is None else self.length
        if total > length:
            raise ConfigError(
                f"pack_length={length} is below the {total} tokens given for one row. Use BatchSampler.packed."
            )
        tail = length - total
        row = {
            "input_ids": [token for item in items for token in item.input_ids] + [self.pad_token_id] * tail,
            "labels": [label for item in items for label in item.labels] + [IGNORE] * tail,
            "position_ids": [place for item in items for place in range(len(item))] + list(range(tail)),
        }
        batch = {name: torch.tensor([values], dtype=torch.long) for name, values in row.items()}
        seq_idx = [index for index, item in enumerate(items) for _ in range(len(item))] + [-1] * tail
        batch["seq_idx"] = torch.tensor([seq_idx], dtype=torch.int32)
        return {**batch, **_about(items, self.max_sequences)}


def _about(items: Sequence[Encoded], size: int | None = None) -> Batch:
    """What is known about each sequence, for task routing and for routing by the prompt."""
    missing = (size or len(items)) - len(items)
    if missing < 0:
        raise ConfigError(f"max_sequences={size} is below the {len(items)} sequences of one row. Raise it.")
    return {
        "task_ids": torch.tensor([item.task_id for item in items] + [-1] * missing, dtype=torch.long),
        "prompt_lengths": torch.tensor([item.prompt_length for item in items] + [-1] * missing, dtype=torch.long),
    }
