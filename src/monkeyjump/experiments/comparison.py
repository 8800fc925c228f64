"""The grid of a comparison: which runs it needs, which are there, and what they say together."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from monkeyjump.evaluation.metrics import PairedDifference, paired_difference
from monkeyjump.record import RunRecord
from monkeyjump.training.estimate import in_words
from monkeyjump.training.recipe import Recipe
from monkeyjump.training.shared import Shared

MOST_RATES = 8  # that a search widens to


def _each(names: Iterable[str | None]) -> str | None:
    """All different names in one text."""
    return " and ".join(sorted({name for name in names if name})) or None


@dataclass(frozen=True)
class Wanted:
    """A run that the grid needs."""

    method: str
    lr: float
    seed: int
    test: bool  # a final run; the search looks at validation alone

    def __str__(self) -> str:
        return f"{self.method}, rate {self.lr:g}, seed {self.seed}"


@dataclass
class Cell:
    """One run of the grid."""

    method: str
    lr: float
    seed: int
    metrics: dict[str, Any] = field(default_factory=dict)


def failed(metrics: dict[str, Any]) -> bool:
    """Whether training diverged, or ended no better than the most frequent answers of the same tasks."""
    majority = {task: share for task, share in (metrics.get("majority") or {}).items() if share is not None}
    scores = [metrics["tasks"][task] for task in majority] if majority else []
    idle = bool(scores) and None not in scores and sum(scores) <= sum(majority.values())
    return idle or metrics.get("diverged_at") is not None


@dataclass
class Comparison:
    """`recipes` are what is compared, by name: methods, or variants of one. `recipe` is what they have in common."""

    recipe: Recipe
    recipes: dict[str, Recipe]
    seeds: list[int]
    lrs: dict[str, list[float]]
    gates: dict[str, str] = field(default_factory=dict)  # a constant gate -> the name of what it has the mean gate of
    folders: dict[str, str] = field(default_factory=dict)  # of the runs, where a name does not say what they are
    widen: bool = False  # rates are added until neither the lowest nor the highest is the best
    searched: list[Cell] = field(default_factory=list)
    final: list[Cell] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # of the runs that this process made
    records: list[RunRecord] = field(default_factory=list)  # of all runs, by whomever they were made
    shared: Shared = field(default_factory=Shared)

    @property
    def methods(self) -> list[str]:
        return list(self.recipes)

    @property
    def done(self) -> int:
        return len(self.searched) + len(self.final)

    @property
    def total(self) -> int:
        return len(self.methods) * len(self.seeds) + sum(len(lrs) for lrs in self.lrs.values() if len(lrs) > 1)

    def time_left(self, jobs: int = 1) -> str:
        """How long the rest may take, for the end of a line; nothing before the first run of this process."""
        return f", about {in_words((self.total - self.done) * fmean(self.seconds) / jobs)} left" if self.seconds else ""

    def wanted(self) -> list[Wanted]:
        """The runs that are missing and whose needs are there, method by method.

        Final runs need the rate that the search of their method finds. A constant gate needs the mean gate of what it
        is the control of.
        """
        found, complete = [], set[str]()
        for place, method in enumerate(self.methods):
            search = [Wanted(method, lr, self.seeds[0], False) for lr in self.lrs[method]]
            missing = [] if len(search) == 1 else self._missing(search, self.searched)
            if not missing:
                rate = self.best_lr(method)
                missing = self._missing([Wanted(method, rate, seed, True) for seed in self.seeds], self.final)
            if not missing:
                complete.add(method)
            if self.gates.get(method) not in self.methods[:place] or self.gates[method] in complete:
                found += missing
        return found

    def _missing(self, wanted: list[Wanted], cells: list[Cell]) -> list[Wanted]:
        there = {(cell.method, cell.lr, cell.seed) for cell in cells}
        return [run for run in wanted if (run.method, run.lr, run.seed) not in there]

    def add(self, wanted: Wanted, record: RunRecord) -> None:
        """Take the result of a run, in the order of methods, rates and seeds, whichever came first."""
        cells = self.final if wanted.test else self.searched
        self.records.append(record)
        cells.append(Cell(wanted.method, wanted.lr, wanted.seed, record.metrics))
        cells.sort(
            key=lambda c: (self.methods.index(c.method), self.lrs[c.method].index(c.lr), self.seeds.index(c.seed))
        )
        if self.widen and not wanted.test:
            self._widen(wanted.method)

    def _widen(self, method: str) -> None:
        """Once all rates of a method are tried: the next one beyond the end, if the best lies there."""
        rates, tried = sorted(self.lrs[method]), [cell for cell in self.searched if cell.method == method]
        if len(tried) < len(rates) or len(rates) >= MOST_RATES:
            return
        best = self.best_lr(method)
        if best == rates[-1]:
            self.lrs[method].append(float(f"{best * best / rates[-2]:.3g}"))
        elif best == rates[0]:
            self.lrs[method].append(float(f"{best * best / rates[1]:.3g}"))

    def best_lr(self, method: str) -> float:
        """By the NLL on validation, which tells more than so few right answers; by the score where there is none."""
        tried = [cell for cell in self.searched if cell.method == method]
        stable = [cell for cell in tried if cell.metrics.get("diverged_at") is None] or tried
        if not tried:
            return self.lrs[method][0]
        scores = [-math.inf if (score := cell.metrics["validation"]) is None else score for cell in stable]
        nlls = [nll for cell in stable if (nll := cell.metrics.get("validation_nll")) is not None]
        if len(nlls) == len(stable):
            scores = [-nll for nll in nlls]
        return stable[scores.index(max(scores))].lr

    def record(self, kind: str, name: str, metrics: dict[str, Any]) -> RunRecord:
        """What the runs say together. It may be written elsewhere than they were made: where and when is theirs."""
        found = RunRecord(kind=kind, name=name, config=self.recipe.to_dict(), metrics=metrics)
        if self.records:
            found.device = _each(record.device for record in self.records) or found.device
            found.commit = _each(record.commit for record in self.records)
            found.versions = {name: _each(r.versions.get(name) for r in self.records) for name in found.versions}
            found.started = min(record.started for record in self.records)
            found.finished = max(record.finished or record.started for record in self.records)
        return found

    def values(self, method: str, task: str) -> list[float]:
        """Test metric by seed, in the order of the seeds."""
        cells = {cell.seed: cell for cell in self.final if cell.method == method}
        return [
            cells[seed].metrics["mean"] if task == "mean" else cells[seed].metrics["tasks"][task]
            for seed in self.seeds
            if seed in cells
        ]

    def tasks(self) -> list[str]:
        """Those that all final runs have a score of: a task whose rows are all too long for a model has none."""
        scores = [cell.metrics["tasks"] for cell in self.final]
        return [task for task in (scores[0] if scores else ()) if all(found[task] is not None for found in scores)]

    def families(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for task in self.tasks():
            found.setdefault(self.final[0].metrics["families"][task], []).append(task)
        return found

    def family_values(self, method: str, family: str) -> list[float]:
        columns = [self.values(method, task) for task in self.families()[family]]
        return [fmean(by_task) for by_task in zip(*columns, strict=True)]

    def differences(self, reference: str, measure: str = "mean") -> dict[str, PairedDifference]:
        """Method less reference in the mean of all tasks (or in `mean_nll`), paired by seed; nothing where it lacks."""
        values = {method: self.measured(method, measure) for method in self.methods}
        base = values.pop(reference)
        whole = None not in base
        return {
            method: paired_difference(found, base)  # type: ignore[arg-type]
            for method, found in values.items()
            if whole and None not in found
        }

    def measured(self, method: str, measure: str) -> list[float | None]:
        """A measure of the final runs, in the order of the seeds."""
        return [cell.metrics.get(measure) for cell in self.final if cell.method == method]
