"""Methods against each other: a grid of runs that resumes where it stopped, and the table it ends in.

For every method the learning rate is searched on the validation split with the first seed; test data is only looked at
by the final runs. Differences are paired by seed.
"""

from __future__ import annotations

import copy
import gc
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from monkeyjump import methods as presets
from monkeyjump.errors import ConfigError
from monkeyjump.evaluation.metrics import PairedDifference, paired_difference
from monkeyjump.evaluation.run import EvaluationReport, load_adapter
from monkeyjump.experiments.measure import measure_usage
from monkeyjump.record import RunRecord, numbered, read_record, recording, writable_folder, write_record
from monkeyjump.tasks import expand
from monkeyjump.tasks.preflight import look_at
from monkeyjump.training.estimate import in_words
from monkeyjump.training.recipe import Recipe, recipe_from
from monkeyjump.training.run import run, score_on_test
from monkeyjump.training.shared import Shared

CELL = "record.json"


@dataclass
class Cell:
    """One run of the grid."""

    method: str
    lr: float
    seed: int
    metrics: dict[str, Any] = field(default_factory=dict)


@dataclass
class Comparison:
    recipe: Recipe
    methods: list[str]
    seeds: list[int]
    lrs: dict[str, list[float]]
    searched: list[Cell] = field(default_factory=list)
    final: list[Cell] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # of the runs that this process made
    shared: Shared = field(default_factory=Shared)

    def progress(self) -> str:
        """Which run of how many comes next, and how long the rest may take."""
        rates = {method: len(lrs) if len(lrs) > 1 else 0 for method, lrs in self.lrs.items()}
        total = sum(rates.values()) + len(self.methods) * len(self.seeds)
        done = len(self.searched) + len(self.final)
        left = f", about {in_words((total - done) * fmean(self.seconds))} left" if self.seconds else ""
        return f"run {done + 1} of {total}{left}"

    def best_lr(self, method: str) -> float:
        tried = [cell for cell in self.searched if cell.method == method]
        stable = [cell for cell in tried if cell.metrics.get("diverged_at") is None] or tried
        if not tried:
            return self.lrs[method][0]
        scores = [-math.inf if (score := cell.metrics["validation"]) is None else score for cell in stable]
        return stable[scores.index(max(scores))].lr

    def values(self, method: str, task: str) -> list[float]:
        """Test metric by seed, in the order of the seeds."""
        cells = {cell.seed: cell for cell in self.final if cell.method == method}
        return [
            cells[seed].metrics["mean"] if task == "mean" else cells[seed].metrics["tasks"][task]
            for seed in self.seeds
            if seed in cells
        ]

    def tasks(self) -> list[str]:
        return list(self.final[0].metrics["tasks"]) if self.final else []

    def families(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for task, family in (self.final[0].metrics["families"] if self.final else {}).items():
            found.setdefault(family, []).append(task)
        return found

    def family_values(self, method: str, family: str) -> list[float]:
        columns = [self.values(method, task) for task in self.families()[family]]
        return [fmean(by_task) for by_task in zip(*columns, strict=True)]

    def differences(self, reference: str) -> dict[str, PairedDifference]:
        """Method less reference in the mean of all tasks, paired by seed."""
        base = self.values(reference, "mean")
        return {
            method: paired_difference(self.values(method, "mean"), base)
            for method in self.methods
            if method != reference
        }


def compare(
    recipe: Recipe,
    methods: Sequence[str],
    seeds: Sequence[int],
    lrs: Sequence[float],
    output: Path,
    *,
    controls: bool = True,
) -> Comparison:
    """Run whatever of the grid is not there yet, then put it together."""
    chosen = with_controls(methods) if controls else list(dict.fromkeys(methods))
    for method, settings in presets.overrides_of_each(chosen, recipe.preset, recipe.adapter).items():
        presets.build(method, recipe.preset, **settings)  # every bad name or setting before the first run
    if not seeds or not lrs:
        raise ConfigError("compare needs at least one seed and one learning rate.")
    writable_folder(output, "output")
    look_at(expand(recipe.tasks), recipe.data.folder)  # the search does not open test, and would find it broken late
    comparison = Comparison(recipe, chosen, list(seeds), {method: list(lrs) for method in chosen})
    for method in chosen:
        for lr in lrs if len(lrs) > 1 else ():
            comparison.searched.append(_cell(comparison, output, method, lr, seeds[0], test=False))
        lr = comparison.best_lr(method)
        for seed in seeds:
            comparison.final.append(_cell(comparison, output, method, lr, seed, test=True))
    return comparison


def with_controls(methods: Sequence[str]) -> list[str]:
    """The methods with what must stand beside a routed one: the same gate held constant, and random centres."""
    chosen = list(dict.fromkeys(methods))
    if "mjlora" in chosen:
        chosen += [control for control in ("mjlora_uniform", "mjlora_random") if control not in chosen]
    return chosen


def _cell(comparison: Comparison, output: Path, method: str, lr: float, seed: int, test: bool) -> Cell:
    """One run, or its record if it was made before."""
    recipe = _cell_recipe(comparison, output, method, lr, seed)
    path = recipe.folder / CELL
    done = _finished(path, recipe, test)
    searched = _finished(path, recipe, test=False) if done is None and test else None
    if searched is not None and searched.metrics.get("diverged_at") is None:  # one that diverged cannot be loaded
        done = _tested(recipe, searched)
        write_record(done, path)
    elif done is None:
        only = "" if test else " (validation only)"
        print(f"\n{comparison.progress()}: {method}, learning rate {lr:g}, seed {seed}{only}", flush=True)
        started = time.perf_counter()
        with recording(path, "compare-cell", recipe.name, config=recipe.to_dict(), seed=recipe.seed) as done:
            done.metrics = _run_cell(recipe, test, comparison.shared)
        comparison.seconds.append(time.perf_counter() - started)
    return Cell(method, lr, seed, done.metrics)


def _cell_recipe(comparison: Comparison, output: Path, method: str, lr: float, seed: int) -> Recipe:
    settings = copy.deepcopy(comparison.recipe.to_dict())
    settings.update(method=method, seed=seed, name=f"{method}-{lr:g}-{seed}")
    settings["output"] = str(output / "cells" / method / f"lr-{lr:g}" / f"seed-{seed}")
    settings["train"]["lr"] = lr
    own = presets.overrides_of_each(comparison.methods, comparison.recipe.preset, settings["adapter"])
    settings["adapter"] = own[method]
    if method.endswith("_uniform") and "uniform_gate" not in settings["adapter"]:
        settings["adapter"] |= _matched_gate(comparison, method.removesuffix("_uniform"))
    recipe = recipe_from(settings)
    # what was finished with other settings stays, and this run lies beside it
    recipe.output = str(next(folder for folder in numbered(recipe.folder) if _may_be_run(folder / CELL, recipe)))
    return recipe


def _may_be_run(path: Path, recipe: Recipe) -> bool:
    """Whether no finished run of another recipe is there."""
    if not path.is_file():
        return True
    record = read_record(path)
    return record.status != "finished" or _same(record, recipe)


def _matched_gate(comparison: Comparison, routed: str) -> dict[str, float]:
    """The mean gate of the routed method's own runs, for the control that differs from it in nothing but routing."""
    gates = [
        cell.metrics["mean_gate"]
        for cell in [*comparison.final, *comparison.searched]
        if cell.method == routed and cell.metrics.get("mean_gate") is not None
    ]
    return {"uniform_gate": round(fmean(gates), 4)} if gates else {}


def _tested(recipe: Recipe, searched: RunRecord) -> RunRecord:
    """The run of the search that won, now scored on test: its adapter is there, it need not be trained again."""
    device = "cuda" if torch.cuda.is_available() else None
    dtype = torch.bfloat16 if device else torch.float32
    model, tokenizer = load_adapter(recipe.folder / "adapter", base=recipe.model, dtype=dtype, device=device)
    report = score_on_test(model, tokenizer, expand(recipe.tasks), recipe)
    searched.metrics |= _test_metrics(report)
    return searched


def _test_metrics(report: EvaluationReport) -> dict[str, Any]:
    return {
        "mean": report.mean,
        "tasks": {row.task: row.adapter for row in report.rows},
        "base": {row.task: row.base for row in report.rows},
        "families": {row.task: row.family for row in report.rows},
        "rows": {row.task: row.n for row in report.rows},
    }


def _finished(path: Path, recipe: Recipe, test: bool) -> RunRecord | None:
    if not path.is_file():
        return None
    record = read_record(path)
    whole = record.status == "finished" and ("mean" in record.metrics or not test)
    return record if whole and _same(record, recipe) else None


def _same(record: RunRecord, recipe: Recipe) -> bool:
    """Whether a record is of this recipe, wherever it lies. A setting that came later has its default there."""
    try:
        return recipe_from({**record.config, "output": None}) == recipe.model_copy(update={"output": None})
    except ConfigError:
        return False


def _run_cell(recipe: Recipe, test: bool, shared: Shared) -> dict[str, Any]:
    result = run(recipe, overwrite=True, test=test, shared=shared)
    if result.interrupted:
        raise KeyboardInterrupt
    metrics: dict[str, Any] = {
        "validation": result.best_validation,
        "trainable": result.parameters.trainable,
        "router": result.parameters.router,
        **result.measurements,
    }
    usage = measure_usage(result.model, result.tokenizer, result.tasks, recipe, rows=32)
    metrics["mean_gate"] = None if usage is None else usage.mean_gate
    if result.report is not None:
        metrics |= _test_metrics(result.report)
    shared.give_back(result.model, result.tokenizer)
    del result
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return metrics
