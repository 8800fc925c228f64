"""Sequences to tensors. B sequences in a batch, T tokens in each; N tokens in a packed row, S sequences in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from monkeyjump.errors import ConfigError
from monkeyjump.tasks.encode import IGNORE, Encoded
from monkeyjump.tasks.pictures import Pictures

Batch = dict[str, Any]  # tensors; beside them `max_length_q` and `max_length_k`, which are numbers


@dataclass(frozen=True)
class PaddingCollator:
    """`input_ids`, `attention_mask`, `labels` [B, T]; `task_ids`, `prompt_lengths` [B]; what `pictures` makes.

    T is the longest sequence, rounded up to a multiple of `multiple_of`, or to the smallest of `buckets` that holds it:
    few distinct shapes is what compilation and CUDA graphs need. Pads are on the right; they are masked by length,
    because the pad token of many models is their eos, which must be learned. A batch of less than
    `rows` sequences, as the last of an epoch may be, is filled up with rows of padding alone, which are not counted.
    """

    pad_token_id: int
    multiple_of: int = 1
    buckets: tuple[int, ...] = ()
    rows: int = 0
    pictures: Pictures | None = None

    def __call__(self, items: Sequence[Encoded]) -> Batch:
        rows = max(self.rows, len(items))
        task_ids, prompts = _about(items, rows)
        task_ids[len(items) :] = items[-1].task_id  # methods that learn by task look every id up
        lengths = np.zeros((rows, 1), dtype=np.int64)
        lengths[: len(items), 0] = [len(item) for item in items]
        places = np.arange(self._width(int(lengths.max())))
        real = places < lengths
        input_ids = np.full(real.shape, self.pad_token_id, dtype=np.int64)
        input_ids[real] = np.concatenate([item.input_ids for item in items])
        labels = np.where(real & (places >= prompts[:, None]), input_ids, IGNORE)
        batch: Batch = {
            "input_ids": torch.from_numpy(input_ids),
            "attention_mask": torch.from_numpy(real.astype(np.int64)),
            "labels": torch.from_numpy(labels),
            "task_ids": torch.from_numpy(task_ids),
            "prompt_lengths": torch.from_numpy(prompts),
        }
        if self.pictures is not None:
            batch |= self.pictures.kinds(batch["input_ids"])
            batch |= self.pictures.tensors([item.media for item in items])
        return batch

    def _width(self, longest: int) -> int:
        if not self.buckets:
            return -(-longest // self.multiple_of) * self.multiple_of
        return min(size for size in self.buckets if size >= longest)


@dataclass(frozen=True)
class PackingCollator:
    """One row [1, N] of sequences end to end, without padding between them and without an attention mask.

    `input_ids`, `labels`, `position_ids` (from 0 in each sequence), `seq_idx` (0..S-1, int32) are [1, N]. `task_ids`
    and `prompt_lengths` are [S]: entry s belongs to the tokens with `seq_idx == s`. With `length` every row has that N;
    the tail is pads with `seq_idx` -1, `labels` -100 and positions that start at 0 again, so attention keeps it apart.
    With `max_sequences` the two per-sequence tensors have that fixed size, filled up with -1.

    With `boundaries` the row also says what variable-length attention reads, under the names of Transformers:
    `cu_seq_lens_q` and `cu_seq_lens_k` (int32) are the starts of all sequences and of the tail, then N, repeated up to
    the size `max_sequences + 2` where that is given; `max_length_q` and `max_length_k` are `boundaries` itself, which
    no sequence may exceed. A tail that is longer is cut into pieces of that length, since attention goes no further.
    """

    pad_token_id: int
    length: int | None = None
    max_sequences: int | None = None
    boundaries: int | None = None

    def __call__(self, items: Sequence[Encoded]) -> Batch:
        lengths = np.array([len(item) for item in items])
        total = int(lengths.sum())
        length = total if self.length is None else self.length
        task_ids, prompts = _about(items, self.max_sequences or len(items))
        starts = lengths.cumsum() - lengths
        tail_starts = np.arange(total, length, self.boundaries or length)
        segments = np.concatenate([starts, tail_starts])
        seq_idx = np.full(length, -1, dtype=np.int32)
        seq_idx[:total] = np.repeat(np.arange(len(items)), lengths)
        positions = np.arange(length) - np.repeat(segments, np.diff(segments, append=length))
        input_ids = np.full(length, self.pad_token_id, dtype=np.int64)
        input_ids[:total] = np.concatenate([item.input_ids for item in items])
        labels = np.full(length, IGNORE, dtype=np.int64)
        learned = positions[:total] >= np.repeat(prompts[: len(items)], lengths)
        labels[:total][learned] = input_ids[:total][learned]
        row = {"input_ids": input_ids, "labels": labels, "position_ids": positions, "seq_idx": seq_idx}
        batch: Batch = {name: torch.from_numpy(values)[None] for name, values in row.items()}
        batch |= {"task_ids": torch.from_numpy(task_ids), "prompt_lengths": torch.from_numpy(prompts)}
        if self.boundaries is not None:
            ends = self._ends(segments, length)
            batch |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), torch.from_numpy(ends))
            batch |= dict.fromkeys(("max_length_q", "max_length_k"), self.boundaries)
        return batch

    def _ends(self, segments: np.ndarray, length: int) -> np.ndarray:
        size = len(segments) + 1 if self.max_sequences is None else self.max_sequences + 2
        if len(segments) >= size:
            raise ConfigError(
                f"max_sequences={self.max_sequences} leaves no room for a tail in pieces of "
                f"boundaries={self.boundaries} tokens. Raise one of them."
            )
        ends = np.full(size, length, dtype=np.int32)
        ends[: len(segments)] = segments
        return ends


def _about(items: Sequence[Encoded], size: int) -> tuple[np.ndarray, np.ndarray]:
    """The task and the prompt length of each sequence [size], for task routing and for routing by the prompt."""
    about = np.full((2, size), -1, dtype=np.int64)
    about[:, : len(items)] = [[item.task_id for item in items], [item.prompt_length for item in items]]
    return about[0], about[1]
