"""Which sequences go into a batch: similar lengths together, or as many as fit a packed row. Pure index arithmetic."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate

OPEN_ROWS = 16  # packed rows that a sequence is tried in: all of them would take too long
WINDOW = 50  # batches sorted by length together: enough to save padding, few enough to keep the order random


def bucket(order: Sequence[int], lengths: Sequence[int], batch_size: int, key: str) -> list[list[int]]:
    """Batches of `batch_size` indices of similar length, in random order."""
    batches: list[list[int]] = []
    for start in range(0, len(order), batch_size * WINDOW):
        window = sorted(order[start : start + batch_size * WINDOW], key=lambda index: lengths[index])
        batches += (window[first : first + batch_size] for first in range(0, len(window), batch_size))
    random.Random(key).shuffle(batches)
    return batches


def by_tokens(order: Iterable[int], lengths: Sequence[int], budget: int, key: str) -> Iterator[list[int]]:
    """Batches of at most `budget` padded tokens, made of similar lengths, as they are asked for.

    Eight batches' worth is sorted at a time, and given in random order: whoever stops early has seen all lengths.
    """
    rng, window, tokens = random.Random(key), list[int](), 0
    for index in order:
        window.append(index)
        tokens += lengths[index]
        if tokens >= 8 * budget:
            yield from _filled(window, lengths, budget, rng)
            window, tokens = [], 0
    yield from _filled(window, lengths, budget, rng)


def _filled(window: list[int], lengths: Sequence[int], budget: int, rng: random.Random) -> list[list[int]]:
    batches: list[list[int]] = []
    for index in sorted(window, key=lambda index: lengths[index]):  # the last of a batch is its longest
        if batches and (len(batches[-1]) + 1) * lengths[index] <= budget:
            batches[-1].append(index)
        else:
            batches.append([index])
    rng.shuffle(batches)
    return batches


def bucket_sizes(lengths: Sequence[int], count: int) -> tuple[int, ...]:
    """The at most `count` widths, multiples of 8, that hold every sequence with the least padding."""
    number = Counter(-(-length // 8) * 8 for length in lengths)
    widths = sorted(number)
    below = [0, *accumulate(number[width] for width in widths)]  # below[i]: sequences that fit widths[i - 1]
    # best[i]: the fewest padded tokens of the first i widths, and the chosen ones; one more of them every round
    best: list[tuple[int, tuple[int, ...]]] = [(0, ()), *((below[i + 1] * w, (w,)) for i, w in enumerate(widths))]
    for _ in range(count - 1):
        best = [best[0]] + [
            min((best[j][0] + w * (below[i + 1] - below[j]), (*best[j][1], w)) for j in range(i + 1))
            for i, w in enumerate(widths)
        ]
    return best[-1][1]


def pack(order: Sequence[int], lengths: Sequence[int], capacity: int, most: int | None = None) -> list[list[int]]:
    """Rows of at most `capacity` tokens and `most` sequences, first fit into the last rows; nearly in the order."""
    rows: list[list[int]] = []
    free: list[int] = []
    for index in order:
        for row in range(max(len(rows) - OPEN_ROWS, 0), len(rows)):
            if lengths[index] <= free[row] and (most is None or len(rows[row]) < most):
                rows[row].append(index)
                free[row] -= lengths[index]
                break
        else:
            rows.append([index])
            free.append(capacity - lengths[index])
    return rows


class BatchSampler:
    """Batches of indices for a DataLoader's `batch_sampler`; call `set_epoch` before each epoch, as Accelerate does."""

    def __init__(self, batches: Callable[[int], list[list[int]]]) -> None:
        self._batches = batches
        self._made: tuple[int, list[list[int]]] | None = None
        self.epoch = 0

    @classmethod
    def bucketed(
        cls, order: Callable[[int], Sequence[int]], lengths: Sequence[int], batch_size: int, seed: int = 0
    ) -> BatchSampler:
        """Length bucketing over a mixture: `BatchSampler.bucketed(mixture.order, mixture.lengths, 8)`."""
        return cls(lambda epoch: bucket(order(epoch), lengths, batch_size, f"{seed}/batches/{epoch}"))

    @classmethod
    def packed(
        cls, order: Callable[[int], Sequence[int]], lengths: Sequence[int], capacity: int, most: int | None = None
    ) -> BatchSampler:
        """One packed row per batch: `BatchSampler.packed(mixture.order, mixture.lengths, 1024)`."""
        return cls(lambda epoch: pack(order(epoch), lengths, capacity, most=most))

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def _current(self) -> list[list[int]]:
        if self._made is None or self._made[0] != self.epoch:
            self._made = (self.epoch, self._batches(self.epoch))
        return self._made[1]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._current())

    def __len__(self) -> int:
        return len(self._current())
