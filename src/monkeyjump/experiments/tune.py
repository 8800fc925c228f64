"""A search over settings of a recipe by validation: Optuna proposes and prunes, the runs are made here or on a cluster.

The journal in the output folder is the study: every run reports its validations to it, and the same command goes on
where it was stopped. The test split is never looked at.
"""

from __future__ import annotations

import os
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import yaml

from monkeyjump.errors import ConfigError, require
from monkeyjump.experiments.clusters import Engine, engine_of, kept_in_this_process
from monkeyjump.experiments.worker import stop_with_parent
from monkeyjump.record import RunRecord, write_atomic, write_record
from monkeyjump.tables import Table
from monkeyjump.training.recipe import Recipe, overridden, parse_value, recipe_from

JOURNAL, STUDY, BEST = "tune.journal", "tune", "best.yaml"
LEAST = 5  # finished runs before one may be pruned


@dataclass(frozen=True)
class Range:
    """What Optuna may choose for a key: a number between two, or one of some values."""

    key: str
    values: tuple[Any, ...]
    between: bool

    @classmethod
    def read(cls, words: str) -> Range:
        """`train.lr=1e-4..1e-2` or `adapter.r=1,2,4`."""
        key, _, text = words.partition("=")
        between = ".." in text
        values = tuple(map(parse_value, text.split(".." if between else ",")))
        numbers = all(isinstance(value, int | float) for value in values)
        if not key or not text or (between and not (numbers and len(values) == 2 and values[0] < values[1])):
            raise ConfigError(f"--space {words!r} must be KEY=LOW..HIGH with two numbers, or KEY=A,B,C.")
        return cls(key, values, between)

    def suggested(self, trial: Any) -> Any:
        """A range over a factor of ten and more is searched by its logarithm."""
        if not self.between:
            return trial.suggest_categorical(self.key, self.values)
        low, high = self.values
        wide = 0 < 10 * low <= high
        choose = trial.suggest_int if all(isinstance(v, int) for v in self.values) else trial.suggest_float
        return choose(self.key, low, high, log=wide)


def make_trial(settings: dict[str, Any], number: int, journal: str, home: str) -> float | None:
    """One run, which reports every validation and ends early where the study says so. Returns the best validation."""
    os.chdir(home)
    from optuna.trial import Trial
    from transformers import TrainerCallback

    from monkeyjump.training.run import run

    study = open_study(Path(journal))
    trial = Trial(study, study.trials[number]._trial_id)

    class Prune(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
            trial.report(metrics["eval_mean"], state.global_step)
            if trial.should_prune():
                trial.set_user_attr("pruned_at", state.global_step)
                control.should_training_stop = True

    with kept_in_this_process() as shared:
        shared.callbacks = [Prune()]
        result = run(recipe_from(settings), overwrite=True, test=False, shared=shared)
        if result.interrupted:
            raise KeyboardInterrupt
        shared.give_back(result.model, result.tokenizer)
    return result.best_validation


def open_study(journal: Path) -> Any:
    optuna = require("optuna", "searches over settings need optuna", "tune")
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = optuna.storages.JournalStorage(JournalFileBackend(str(journal)))
    sampler, pruner = optuna.samplers.TPESampler(seed=0), optuna.pruners.MedianPruner(n_startup_trials=LEAST)
    return optuna.create_study(
        study_name=STUDY, storage=storage, direction="maximize", load_if_exists=True, sampler=sampler, pruner=pruner
    )


class OnThisMachine:
    """Processes of this machine, or this one where there is one run at a time."""

    def __init__(self, jobs: int) -> None:
        self.slots = jobs
        self.pool = ProcessPoolExecutor(jobs, get_context("spawn"), stop_with_parent) if jobs > 1 else None

    def submit(self, *arguments: Any) -> Any:
        return self.pool.submit(make_trial, *arguments) if self.pool else partial(make_trial, *arguments)

    def first(self, handles: Any) -> Any:
        return wait(handles, return_when=FIRST_COMPLETED).done.pop() if self.pool else handles[0]

    def result(self, handle: Any) -> Any:
        return handle.result() if self.pool else handle()

    def close(self, handles: Any) -> None:
        if self.pool:
            self.pool.shutdown(cancel_futures=True)


def tune(recipe: Recipe, ranges: list[Range], trials: int, output: Path, jobs: int | str, on: str) -> Any:
    """Make runs until so many have ended, and write the best recipe. Returns the study."""
    study = open_study(output / JOURNAL)
    _go_on(study, recipe, ranges, output)
    engine: Engine = (
        OnThisMachine(1 if jobs == "auto" else int(jobs)) if on == "local" else engine_of(on, jobs, output, make_trial)
    )
    running: dict[Any, Any] = {}
    try:
        while True:
            states = [trial.state.name for trial in study.trials]
            ended = states.count("COMPLETE") + states.count("PRUNED")
            if states.count("FAIL") > max(trials, ended):
                raise ConfigError(f"{states.count('FAIL')} runs have failed: see {output / 'runs'}.", title="tune")
            while len(running) < min(engine.slots, trials - ended):
                trial = study.ask()
                settings = _settings(recipe, ranges, trial, output)
                running[engine.submit(settings, trial.number, str(output / JOURNAL), str(Path.cwd()))] = trial
            if not running:
                return study
            handle = engine.first(list(running))
            _tell(study, running.pop(handle), engine, handle)
    finally:
        engine.close(list(running))


def _go_on(study: Any, recipe: Recipe, ranges: list[Range], output: Path) -> None:
    """Take up what was begun: only of the same search, and runs that were lost are made again."""
    from optuna.trial import TrialState

    asked = {"recipe": recipe.to_dict() | {"output": None}, "space": [[r.key, *map(str, r.values)] for r in ranges]}
    if study.user_attrs.get("asked", asked) != asked:
        raise ConfigError(f"--output {output} holds a search of another recipe or space. Name another folder.")
    study.set_user_attr("asked", asked)
    for trial in study.get_trials(states=[TrialState.RUNNING]):
        study.enqueue_trial(trial.params)
        study.tell(trial.number, state=TrialState.FAIL)


def _settings(recipe: Recipe, ranges: list[Range], trial: Any, output: Path) -> dict[str, Any]:
    chosen = [f"{each.key}={each.suggested(trial)}" for each in ranges]
    found = overridden(recipe, [*chosen, f"output={output / 'runs' / str(trial.number)}"])
    return found.to_dict()


def _tell(study: Any, trial: Any, engine: Engine, handle: Any) -> None:
    """Enter how a run has ended; one that fails takes nothing with it."""
    from optuna.trial import TrialState

    shown = ", ".join(f"{key}={_short(value)}" for key, value in trial.params.items())
    try:
        value = engine.result(handle)
    except Exception as error:
        study.tell(trial.number, state=TrialState.FAIL)
        print(f"failed      {trial.number:3} {shown}: {error}", flush=True)
        return
    pruned = study.trials[trial.number].user_attrs.get("pruned_at")
    if value is None:
        study.tell(trial.number, state=TrialState.FAIL)
    else:
        study.tell(trial.number, value, state=TrialState.COMPLETE if pruned is None else TrialState.PRUNED)
    score = "no validation" if value is None else f"{100 * value:.1f}"
    print(f"run {trial.number:3}     {score:>6}{f' (pruned at {pruned})' if pruned else ''}  {shown}", flush=True)


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def best_table(study: Any, ranges: list[Range], most: int = 10) -> Table:
    ended = sorted((t for t in study.trials if t.value is not None), key=lambda t: -t.value)
    keys = [each.key for each in ranges]
    rows = [
        [str(t.number), f"{100 * t.value:.1f}", t.state.name.lower(), *(_short(t.params[key]) for key in keys)]
        for t in ended[:most]
    ]
    return Table(f"Best of {len(ended)} runs, by validation x 100", ["run", "mean", "", *keys], rows)


def save_tune(study: Any, recipe: Recipe, ranges: list[Range], output: Path) -> list[Path]:
    """The record of all runs, and the recipe with the best settings."""
    trials = [
        {"run": t.number, "state": t.state.name, "validation": t.value, "settings": t.params, **t.user_attrs}
        for t in study.trials
    ]
    record = RunRecord(kind="tune", name=recipe.name, config=recipe.to_dict(), metrics={"runs": trials})
    best = overridden(recipe, [f"{key}={value}" for key, value in study.best_trial.params.items()]).to_dict()
    text = yaml.safe_dump(best | {"output": None, "name": f"{recipe.name}-tuned"}, sort_keys=False)
    return [write_record(record, output / "tune.json"), write_atomic(output / BEST, text)]
