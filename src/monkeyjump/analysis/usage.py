"""Which experts the tokens of each task go to, block by block, and how much an expert says about the task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from monkeyjump.tuner.trace import ExpertLoad

Array = npt.NDArray[np.float64]


@dataclass
class Information:
    """How many bits the expert of a jump says about the task of its token."""

    bits: float  # adjusted for chance, see `task_information`; slightly below zero where there is nothing
    raw_bits: float  # from the counts alone, which is never below zero and too large
    chance_bits: float  # what the counts give when rows have random tasks; the mean of the shuffles
    noise: float  # adjusted bits that 95 % of the shuffles stay below


@dataclass
class ExpertUsage:
    """Loads by task and block, `loads[task][block]`; of a model that reads pictures also by kind of token."""

    loads: dict[str, dict[str, ExpertLoad]]
    kinds: ExpertUsage | None = None  # the same with kinds of tokens in the place of tasks
    gate_entropy: dict[str, dict[str, float]] = field(default_factory=dict)  # of a token's gates, in bits, like `loads`
    information: dict[str, Information] = field(default_factory=dict)  # by block; empty for a single task

    @property
    def tasks(self) -> list[str]:
        return list(self.loads)

    @property
    def blocks(self) -> list[str]:
        return list(next(iter(self.loads.values()), {}))

    @property
    def experts(self) -> list[str]:
        """The routed projections of all blocks, in the order in which they first occur."""
        return list(
            dict.fromkeys(name for loads in self.loads.values() for load in loads.values() for name in load.experts)
        )

    @property
    def shares(self) -> Array:
        """The part of a block's jumps that went to each expert, [tasks, blocks, experts]; NaN if a block lacks it."""
        experts, missing = self.experts, float("nan")
        tables = [
            [dict(zip(load.experts, load.share, strict=True)) for load in loads.values()]
            for loads in self.loads.values()
        ]
        return np.array([[[share.get(name, missing) for name in experts] for share in table] for table in tables])

    @property
    def deviations(self) -> Array:
        """The shares of each task minus their mean over tasks, in percentage points: [tasks, blocks, experts]."""
        shares = self.shares
        return 100 * (shares - shares.mean(0))

    @property
    def bits(self) -> Array:
        """Adjusted bits of every block; zero where there is a single task."""
        return np.array([self.information[block].bits if self.information else 0.0 for block in self.blocks])

    def mean(self) -> dict[str, ExpertLoad]:
        """Loads by block, in which every task counts the same."""

        def over_tasks(block: str, part: str) -> list[float]:
            return np.mean([getattr(loads[block], part) for loads in self.loads.values()], 0).tolist()

        experts = {block: load.experts for block, load in self.loads[self.tasks[0]].items()}
        return {
            b: ExpertLoad(names, over_tasks(b, "share"), over_tasks(b, "mean_gate")) for b, names in experts.items()
        }

    @property
    def mean_gate(self) -> float:
        """Over all tasks, blocks and experts, zeros included: the constant gate of the same strength."""
        values = [gate for loads in self.loads.values() for load in loads.values() for gate in load.mean_gate]
        return float(np.mean(values)) if values else 1.0

    @property
    def dead(self) -> int:
        """Experts that no token of any task went to."""
        return sum(map(len, self.dead_experts.values()))

    @property
    def dead_experts(self) -> dict[str, list[str]]:
        """By block, the experts that no token of any task went to."""
        return {block: load.dead for block, load in self.mean().items()}

    def to_dict(self) -> dict[str, Any]:
        return {
            "mean_gate": self.mean_gate,
            "dead_experts": self.dead,
            "loads": asdict(self)["loads"],
            **({} if self.kinds is None else {"kinds": asdict(self.kinds)["loads"]}),
            **({"information": asdict(self)["information"]} if self.information else {}),
        }


def task_information(counts: Array, shuffled: Sequence[Array]) -> Information:
    """The mutual information of task and expert from counts [tasks, experts], adjusted for chance.

    Counts of finite samples always show some information. `shuffled` holds the counts of the same rows under random
    tasks: whole rows are shuffled, because tokens of one row are alike, and a correction by the number of tokens would
    be far too small. The scale is that of adjusted mutual information (Vinh et al., 2010): chance is 0, and what one of
    the two entropies allows at most stays as it is.
    """
    raw, most = _mutual_bits(counts)
    chance = np.array([_mutual_bits(table)[0] for table in shuffled])
    room = most - chance.mean()
    if room < 1e-9:  # one expert, or one task
        return Information(0.0, raw, float(chance.mean()), 0.0)
    adjusted = most * (np.array([raw, np.quantile(chance, 0.95)]) - chance.mean()) / room
    return Information(float(adjusted[0]), raw, float(chance.mean()), float(adjusted[1]))


def _mutual_bits(counts: Array) -> tuple[float, float]:
    """Plug-in mutual information of a table in bits, and the most that its margins allow."""
    p = counts / max(counts.sum(), 1)
    rows, columns = _entropy(p.sum(1)), _entropy(p.sum(0))
    return rows + columns - _entropy(p.ravel()), min(rows, columns)


def _entropy(p: Array) -> float:
    p = p[p > 0]
    return float(-(p * np.log2(p)).sum())
