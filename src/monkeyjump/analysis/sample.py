"""What is gathered of the tokens that go through a model: a sample of fixed size, however many there are.

Shapes: D hidden width, E experts of a router, N tokens of the sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from monkeyjump.analysis.usage import ExpertUsage

Batch = dict[str, Tensor]


@dataclass
class Sample:
    """Tokens drawn uniformly from those of each task, with what is known about each."""

    tasks: Tensor  # [N], places in the list of tasks
    kinds: Tensor  # [N], places in KINDS
    positions: Tensor  # [N], tokens before it in its row
    token_ids: Tensor  # [N]
    states: dict[str, Tensor] = field(default_factory=dict)  # by block: [N, D] at its entrance
    gates: dict[str, Tensor] = field(default_factory=dict)  # by router: [N, E]


@dataclass
class Collection:
    """All that the figures are drawn from."""

    tasks: list[str]
    usage: ExpertUsage
    sample: Sample
    block_of: dict[str, str]  # the block of each router; a router may belong to one projection of it
    probes: dict[str, dict[str, Tensor]]  # by block and pooling: one state for each probed row
    probe_tasks: Tensor  # the task of each probed row
    tokens: int  # that were read

    def router_of(self, block: str) -> str:
        """The first router of a block."""
        return next(router for router, owner in self.block_of.items() if owner == block)

    def experts_of(self, router: str) -> list[str]:
        return self.usage.loads[self.tasks[0]][router].experts


class Reservoir:
    """Slots for a uniform sample of a stream, by Vitter's algorithm R: each item has the same chance to be in it."""

    def __init__(self, capacity: int, seed: int) -> None:
        self.capacity, self.seen = capacity, 0
        self.random = np.random.default_rng(seed)

    def offer(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The slots that the next `count` items take, and which of them take those; an item may push out an earlier."""
        places = np.arange(self.seen, self.seen + count)
        slots = np.where(places < self.capacity, places, self.random.integers(0, places + 1))
        self.seen += count
        taken = np.flatnonzero(slots < self.capacity)
        last = dict(zip(slots[taken].tolist(), taken.tolist(), strict=True))  # a later item replaces an earlier one
        return np.array(list(last.keys()), dtype=np.int64), np.array(list(last.values()), dtype=np.int64)


def spread(names: Sequence[str], count: int) -> list[str]:
    """So many of these names, at equal distances, with the last one among them."""
    if count >= len(names):
        return list(names)
    places = np.linspace(0, len(names) - 1, count + 1).round().astype(int)[1:]
    return [names[place] for place in places]
