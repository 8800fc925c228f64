"""Runs of a comparison on other machines: as tasks of Ray, or as jobs of Slurm through submitit.

Both engines queue, place and start the runs; here they are only submitted as soon as what they need is there. Records
are written by the runs into the output folder, which all machines must see, and are what a second call resumes from.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from monkeyjump.errors import ConfigError, require
from monkeyjump.experiments.compare import CELL, cell_recipe, finished, make_cell
from monkeyjump.experiments.comparison import Comparison, Wanted
from monkeyjump.experiments.jobs import Schedule
from monkeyjump.record import read_record
from monkeyjump.training.recipe import Recipe, recipe_from
from monkeyjump.training.shared import Shared

TRIES = 3  # more, where a worker or its machine is lost
POLL = 2.0  # seconds between two looks at the jobs of Slurm
_shared: list[Shared] = []  # what the runs of one worker have in common, one after another


def make(settings: dict[str, Any], test: bool, home: str) -> None:
    """One run, in a process of a cluster; nothing where an earlier try came to its end."""
    os.chdir(home)  # relative paths of data and tasks are those of the process that asked
    recipe = recipe_from(settings)
    if finished(recipe, test) is not None:
        return
    with kept_in_this_process() as shared:
        make_cell(recipe, test, shared)


@contextmanager
def kept_in_this_process() -> Iterator[Shared]:
    """What an earlier run of this process has loaded; only a run that comes to its end leaves it to the next."""
    shared = _shared.pop() if _shared else Shared()
    yield shared
    _shared.append(shared)


class Engine(Protocol):
    """What queues runs. A handle is whatever the engine calls a run."""

    slots: int  # runs that it can make at a time

    def submit(self, *arguments: Any) -> Any: ...

    def first(self, handles: Sequence[Any]) -> Any:
        """Wait for one that has ended."""

    def result(self, handle: Any) -> Any:
        """What the run returned; what it raised is raised."""

    def close(self, handles: Sequence[Any]) -> None:
        """Give up what still runs."""


class OnRay:
    """Tasks of Ray: each takes its share of a GPU, or a core, and runs again where its worker or machine is lost."""

    def __init__(self, address: str | None, per_gpu: int, function: Callable[..., Any] = make) -> None:
        self.ray = ray = require("ray", "runs on a cluster need ray", "ray")
        try:
            ray.init(address=address, log_to_driver=False, include_dashboard=False if address is None else None)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigError(f"--on ray:{address}: no cluster answers there ({error}).", title="no cluster") from error
        there = ray.cluster_resources()
        gpus = there.get("GPU", 0)
        self.slots = int(gpus * per_gpu or there["CPU"])
        share = {"num_gpus": 1 / per_gpu} if gpus else {"num_cpus": 1}
        self.task = ray.remote(max_retries=TRIES, **share)(function)

    def submit(self, *arguments: Any) -> Any:
        return self.task.remote(*arguments)

    def first(self, handles: Sequence[Any]) -> Any:
        return self.ray.wait(list(handles), num_returns=1)[0][0]

    def result(self, handle: Any) -> Any:
        try:
            return self.ray.get(handle)
        except self.ray.exceptions.RayTaskError as error:
            raise error.cause from error

    def close(self, handles: Sequence[Any]) -> None:
        for handle in handles:
            self.ray.cancel(handle)
        self.ray.shutdown()


class OnSlurm:
    """Jobs of Slurm, one for each run; `--on submitit:local` makes processes of them, to try it."""

    slots = 8  # where the number of runs is not known beforehand

    def __init__(self, cluster: str | None, folder: Path, function: Callable[..., Any] = make) -> None:
        submitit = require("submitit", "jobs of Slurm need submitit", "slurm")
        self.function, self.executor = function, submitit.AutoExecutor(folder / "jobs", cluster=cluster)
        self.executor.update_parameters(name="monkeyjump", gpus_per_node=0 if cluster == "local" else 1)

    def submit(self, *arguments: Any) -> Any:
        return self.executor.submit(self.function, *arguments)

    def first(self, handles: Sequence[Any]) -> Any:
        while True:
            for handle in handles:
                if handle.done():
                    return handle
            time.sleep(POLL)

    def result(self, handle: Any) -> Any:
        return handle.result()

    def close(self, handles: Sequence[Any]) -> None:
        for handle in handles:
            handle.cancel()


def engine_of(on: str, jobs: int | str, output: Path, function: Callable[..., Any] = make) -> Engine:
    """`ray`, `ray:ADDRESS`, `submitit` or `submitit:CLUSTER`; `jobs` is how many runs share a GPU of Ray's."""
    name, _, where = on.partition(":")
    if name == "ray":
        return OnRay(where or None, 1 if jobs == "auto" else int(jobs), function)
    if name == "submitit":
        return OnSlurm(where or None, output, function)
    raise ConfigError(f"--on {on} is not known: use local, ray, ray:ADDRESS or submitit.")


def run_on(engine: Engine, comparison: Comparison, output: Path) -> None:
    """Submit what is ready until nothing is missing, or nothing else can be made."""
    schedule, running = Schedule(comparison, output), dict[Any, tuple[Wanted, Recipe, float]]()
    try:
        while True:
            for wanted in schedule.ready({run for run, *_ in running.values()}):
                recipe = cell_recipe(comparison, output, wanted)
                handle = engine.submit(recipe.to_dict(), wanted.test, str(Path.cwd()))
                running[handle] = (wanted, recipe, time.perf_counter())
                schedule.say("submitted", wanted)
            if not running:
                break
            handle = engine.first(list(running))
            wanted, recipe, began = running.pop(handle)
            try:
                engine.result(handle)
                if not (recipe.folder / CELL).is_file():
                    raise ConfigError(f"no record in {recipe.folder}. All machines must see this folder: set --output.")
            except Exception as error:  # whatever it is, the other runs go on
                name = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
                schedule.fail(wanted, f"{name}{error}", recipe, time.perf_counter() - began)
            else:
                schedule.finish(
                    wanted, read_record(recipe.folder / CELL), time.perf_counter() - began, len(running) + 1
                )
    finally:
        engine.close(list(running))
    schedule.check()
