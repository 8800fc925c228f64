"""Methods against each other: a grid of runs that resumes where it stopped, and the table it ends in.

For every method the learning rate is searched on the validation split with the first seed; test data is only looked at
by the final runs. Differences are paired by seed.
"""

from __future__ import annotations

import copy
import gc
import time
import traceback
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from monkeyjump import methods as presets
from monkeyjump.analysis.rows import mean_gate
from monkeyjump.errors import ConfigError, InUseError
from monkeyjump.evaluation.run import EvaluationReport, load_adapter
from monkeyjump.experiments.comparison import Comparison, Wanted
from monkeyjump.record import RunRecord, numbered, read_record, recording, writable_folder, write_record
from monkeyjump.tasks import expand
from monkeyjump.tasks.preflight import look_at
from monkeyjump.training.folder import locked
from monkeyjump.training.recipe import Recipe, recipe_from
from monkeyjump.training.run import run, score_on_test
from monkeyjump.training.shared import Shared

CELL = "record.json"


def grid_of_methods(
    recipe: Recipe,
    methods: Sequence[str],
    seeds: Sequence[int],
    lrs: Sequence[float],
    *,
    controls: bool = True,
    widen: bool = False,
) -> Comparison:
    """The runs of a comparison, not made yet.

    `widen` adds rates to the search of a method whose best is the lowest or the highest of them.
    """
    chosen = with_controls(methods) if controls else list(dict.fromkeys(methods))
    own = presets.overrides_of_each(chosen, recipe.preset, recipe.adapter)
    recipes = {method: recipe.model_copy(update={"method": method, "adapter": own[method]}) for method in chosen}
    gates = {method: method.removesuffix("_uniform") for method in chosen if method.endswith("_uniform")}
    rates = {method: list(dict.fromkeys(lrs)) for method in chosen}
    return Comparison(recipe, recipes, list(dict.fromkeys(seeds)), rates, gates, widen=widen)


def run_grid(comparison: Comparison, output: Path, jobs: int | str = 1, on: str = "local") -> Comparison:
    """Run whatever of the grid is not there yet; every bad name or setting is found first, and missing data.

    `jobs` runs are made at a time, each in a process of its own; 1: in this process; "auto": as `jobs.auto_jobs` says.
    `on` names a cluster instead of this machine, as `clusters.engine_of` reads it.
    """
    for recipe in comparison.recipes.values():
        presets.build(recipe.method, recipe.preset, **recipe.adapter)
    if not comparison.seeds or not all(comparison.lrs.values()):
        raise ConfigError("a comparison needs at least one seed and one learning rate.")
    writable_folder(output, "output")
    from monkeyjump.experiments.jobs import Schedule, run_jobs

    if not Schedule(comparison, output).ready(set()):  # all is there, and needs no data
        return comparison
    # the search does not open test, and would find it broken late
    for tasks, bad_media, folder in {
        (tuple(r.tasks), r.data.bad_media, r.data.folder) for r in comparison.recipes.values()
    }:
        look_at(expand(list(tasks), bad_media), folder)
    if on != "local":
        from monkeyjump.experiments.clusters import engine_of, run_on

        run_on(engine_of(on, jobs, output), comparison, output)
    elif jobs != 1:
        run_jobs(comparison, output, jobs)
    _run_rest(comparison, output)
    return comparison


def _run_rest(comparison: Comparison, output: Path) -> None:
    """Make what is missing, one run after another in this process; one that fails is named when the others are made."""
    from monkeyjump.experiments.jobs import Schedule

    schedule = Schedule(comparison, output)
    while (ready := schedule.ready(set())) or schedule.elsewhere:
        if not ready:
            time.sleep(schedule.wait_for_others())
            continue
        wanted, began = ready[0], time.perf_counter()
        try:
            run_here(comparison, output, wanted)
        except InUseError:
            pass  # it came between
        except Exception as error:  # whatever it is, the next run may do without it
            if not isinstance(error, ConfigError):
                traceback.print_exc()
            comparison.shared = Shared()
            seconds = time.perf_counter() - began
            schedule.fail(wanted, in_a_line(error), cell_recipe(comparison, output, wanted), seconds)
    schedule.check()


def in_a_line(error: Exception) -> str:
    return str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"


CONTROLS = {
    "mjlora": ("mjlora_uniform", "mjlora_random", "mjlora_oracle"),
    "mjlora_prompt": ("mjlora_prompt_uniform", "mjlora_prompt_random", "mjlora_task"),
}


def with_controls(methods: Sequence[str]) -> list[str]:
    """The methods with what must stand beside a routed one: a constant gate, random centres, and the task oracle."""
    beside = (control for method in methods for control in CONTROLS.get(method, ()))
    return list(dict.fromkeys([*methods, *beside]))


def run_here(comparison: Comparison, output: Path, wanted: Wanted) -> None:
    """One run in this process, or its record if it was made before."""
    recipe = cell_recipe(comparison, output, wanted)
    done = finished(recipe, wanted.test)
    if done is None:
        only = "" if wanted.test else " (validation only)"
        place = f"run {comparison.done + 1} of {comparison.total}{comparison.time_left()}"
        print(f"\n{place}: {wanted}{only}", flush=True)
        started = time.perf_counter()
        done = make_cell(recipe, wanted.test, comparison.shared)
        comparison.seconds.append(time.perf_counter() - started)
    comparison.add(wanted, done)


def make_cell(recipe: Recipe, test: bool, shared: Shared) -> RunRecord:
    """Train and score, and write the record. What the search has trained, and what is still there, is only scored."""
    with locked(recipe.folder):  # else nothing is written beside what another process is at
        pass
    searched = finished(recipe, test=False) if test else None
    there = (recipe.folder / "adapter" / "adapter_model.safetensors").is_file()
    if searched is not None and there and searched.metrics.get("diverged_at") is None:  # what diverged cannot be loaded
        searched.metrics |= _test_metrics(_tested(recipe, shared))
        write_record(searched, recipe.folder / CELL)
        return searched
    with recorded(recipe) as done:
        done.metrics = _run_cell(recipe, test, shared)
    return done


def recorded(recipe: Recipe) -> AbstractContextManager[RunRecord]:
    """The record of a run, written at the end of the block whatever the end is."""
    return recording(recipe.folder / CELL, "compare-cell", recipe.name, config=recipe.to_dict(), seed=recipe.seed)


def cell_recipe(comparison: Comparison, output: Path, wanted: Wanted) -> Recipe:
    lr, seed, folder = wanted.lr, wanted.seed, comparison.folders.get(wanted.method, wanted.method)
    settings = copy.deepcopy(comparison.recipes[wanted.method].to_dict())
    settings.update(seed=seed, name=f"{folder}-{lr:g}-{seed}")
    settings["output"] = str(output / "cells" / folder / f"lr-{lr:g}" / f"seed-{seed}")
    settings["train"]["lr"] = lr
    if wanted.method in comparison.gates and "uniform_gate" not in settings["adapter"]:
        settings["adapter"] |= _matched_gate(comparison, comparison.gates[wanted.method])
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
    # rounded, so that it is the same whichever runs are there yet
    return {"uniform_gate": round(fmean(gates), 3)} if gates else {}


def _tested(recipe: Recipe, shared: Shared) -> EvaluationReport:
    """The scores on test of the run of the search that won: its adapter is there, it need not be trained again."""
    base = shared.take(recipe)
    model, tokenizer = load_adapter(recipe.folder / "adapter", base=recipe.model, loaded=base)
    tasks = expand(recipe.tasks, recipe.data.bad_media)
    report = score_on_test(model, tokenizer, tasks, recipe, shared.memory)
    shared.give_back(model, base[1])
    return report


def _test_metrics(report: EvaluationReport) -> dict[str, Any]:
    return {
        "mean": report.mean,
        "tasks": {row.task: row.adapter for row in report.rows},
        "base": {row.task: row.base for row in report.rows},
        "majority": {row.task: row.majority for row in report.rows},
        "families": {row.task: row.family for row in report.rows},
        "rows": {row.task: row.n for row in report.rows},
        "nll": {row.task: row.adapter_nll for row in report.rows},
        "mean_nll": report.overall.adapter_nll,
    }


def finished(recipe: Recipe, test: bool) -> RunRecord | None:
    """The record of a run that was made before."""
    path = recipe.folder / CELL
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
    metrics["mean_gate"] = mean_gate(result.model, result.tokenizer, result.tasks, recipe)
    if result.report is not None:
        metrics |= _test_metrics(result.report)
    shared.give_back(result.model, result.tokenizer)
    del result
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return metrics
