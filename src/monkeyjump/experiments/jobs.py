"""Several runs of a comparison at a time, each in a process of its own.

A process makes one run after another, of one method as long as there are any, and keeps what they share: the base
model, its scores, encoded texts, centres. What it prints goes to `output.log` in the folder of each run.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from contextlib import suppress
from itertools import product
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from monkeyjump.errors import ConfigError
from monkeyjump.experiments.compare import CELL, cell_recipe, finished, recorded
from monkeyjump.experiments.comparison import Comparison, Wanted
from monkeyjump.experiments.worker import IN_USE, NO_MEMORY, work
from monkeyjump.models import load_tokenizer, resolve
from monkeyjump.record import RunRecord, read_record
from monkeyjump.training.data import encode_ahead
from monkeyjump.training.estimate import in_words
from monkeyjump.training.folder import in_use
from monkeyjump.training.recipe import Recipe

GRACE = 60  # seconds in which a stopped process may write its checkpoint


def run_jobs(comparison: Comparison, output: Path, jobs: int | str) -> None:
    """Make all missing runs, or as many as can be made: those that failed are named in the error at the end."""
    count = auto_jobs(comparison) if jobs == "auto" else int(jobs)
    schedule = Processes(comparison, output, count)
    schedule.ready(set())
    if count > 1 and comparison.total - comparison.done > 1:  # a process for one run alone would only take time
        schedule.run()


FEW_RUNS = 6  # on each GPU: a second process loads and compiles again, which so many runs do not win back
SMALL = 64  # models for which the GPU has so many times the memory: their steps leave it waiting for the host


def auto_jobs(comparison: Comparison) -> int:
    """How many runs at a time: one on a CPU and on each GPU, and two on a GPU that a small model does not fill."""
    gpus = torch.cuda.device_count()
    if gpus == 0:
        return 1
    found = resolve(comparison.recipe.model)
    files = [] if found.kind == "hub" else Path(found.source).glob("*.safetensors")
    size, memory = sum(file.stat().st_size for file in files), torch.cuda.get_device_properties(0).total_memory
    runs, cores = comparison.total - comparison.done, os.cpu_count() or 1
    double = 0 < SMALL * size < memory and runs > FEW_RUNS * gpus and cores >= 4 * gpus  # a run keeps two cores busy
    return 2 * gpus if double else gpus


class Worker:
    """A process that makes one run after another."""

    def __init__(self, number: int, jobs: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, jobs, _gpu(number)))
        self.process.start()
        theirs.close()

    def make(self, recipe: Recipe, test: bool) -> None:
        with suppress(OSError):  # where it has ended, waiting for its answer will tell
            self.connection.send((recipe, test))

    def interrupt(self) -> None:
        """As Ctrl-C does: it writes a checkpoint and a record, then ends."""
        if self.process.pid is not None and self.process.is_alive():
            os.kill(self.process.pid, signal.SIGINT)

    def end(self) -> int | None:
        """Let it end, or kill it when its time is over; its exit code."""
        self.connection.close()
        self.process.join(GRACE)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        return self.process.exitcode


class Schedule:
    """Which runs can be made now, and what became of the others; whoever makes them asks and tells."""

    LOOK = 2.0  # seconds between two looks at what other processes make

    def __init__(self, comparison: Comparison, output: Path) -> None:
        self.comparison, self.output = comparison, output
        self.failed: dict[Wanted, str] = {}
        self.elsewhere: set[Wanted] = set()  # what another process makes in the same folder
        self.said_waiting = False

    def ready(self, running: set[Wanted]) -> list[Wanted]:
        """What can be made now. Runs that were made before are taken over on the way, and may make others ready."""
        taken = {*self.failed, *running}
        while True:
            ready = [wanted for wanted in self.comparison.wanted() if wanted not in taken]
            recipes = {wanted: cell_recipe(self.comparison, self.output, wanted) for wanted in ready}
            records = {wanted: finished(recipe, wanted.test) for wanted, recipe in recipes.items()}
            there = {wanted: record for wanted, record in records.items() if record is not None}
            if not there:
                self.elsewhere = {wanted for wanted, recipe in recipes.items() if in_use(recipe.folder)}
                return [wanted for wanted in ready if wanted not in self.elsewhere]
            for wanted, record in there.items():
                self.comparison.add(wanted, record)

    def finish(self, wanted: Wanted, record: RunRecord, seconds: float, jobs: int) -> None:
        self.comparison.add(wanted, record)
        self.comparison.seconds.append(seconds)
        self.say("finished", wanted, f": {in_words(seconds)}{self.comparison.time_left(jobs)}")

    def fail(self, wanted: Wanted, error: str, recipe: Recipe, seconds: float) -> None:
        self.failed[wanted] = f"{wanted}: {error} (see {recipe.folder})"
        self.say("failed", wanted, f": {in_words(seconds)}")

    def check(self) -> None:
        """Name what has failed, when all else is done."""
        if self.failed:
            raise ConfigError(
                [*self.failed.values(), "All other runs are kept: the same command makes what is missing."],
                title="runs have failed",
            )

    def wait_for_others(self) -> float:
        """Said once, when there is nothing else to do; the seconds until the next look."""
        if not self.said_waiting:
            self.say("waiting", min(self.elsewhere, key=str), ": another process makes it")
        self.said_waiting = True
        return self.LOOK

    def say(self, what: str, wanted: Wanted, end: str = "") -> None:
        only = " (validation only)" if what in ("started", "submitted") and not wanted.test else ""
        print(f"{what:9} {self.comparison.done:3}/{self.comparison.total} {wanted}{only}{end}", flush=True)


class Processes(Schedule):
    """Gives runs to processes of this machine as soon as what they need is there."""

    def __init__(self, comparison: Comparison, output: Path, jobs: int, start: Any = Worker) -> None:
        super().__init__(comparison, output)
        self.jobs, self.start = jobs, start
        self.workers: dict[int, Any] = {}
        self.running: dict[int, tuple[Wanted, Recipe, float]] = {}  # worker -> its run and when it began
        self.methods: dict[int, str] = {}  # worker -> the method of its last run
        self.alone: set[Wanted] = set()  # runs that did not fit in memory beside others

    def run(self) -> None:
        ended = threading.Event()
        encoding = threading.Thread(target=self._encode_ahead, args=(ended,))
        encoding.start()
        try:
            self._hand_out()
            while self.running or self.elsewhere:
                numbers = {self.workers[number].connection: number for number in self.running}
                look = self.wait_for_others() if not self.running else self.LOOK if self.elsewhere else None
                for connection in wait(list(numbers), look):
                    self._take_back(numbers[connection])
                self._hand_out()
        finally:
            for number in self.running:  # something went wrong here, or it was Ctrl-C
                self.workers[number].interrupt()
            for worker in self.workers.values():
                worker.end()
            ended.set()
            encoding.join()
        self.check()

    def _encode_ahead(self, ended: threading.Event) -> None:
        """Encode the texts of all seeds while the processes are busy: each draws other rows, and takes seconds."""
        all_of = self.comparison.recipes.values()
        recipes = {repr((recipe.model, recipe.tasks, recipe.data)): recipe for recipe in all_of}.values()
        with suppress(Exception):  # whatever it is, the run will meet it and tell
            tokenizers = {name: load_tokenizer(name) for name in {recipe.model for recipe in recipes}}
            for seed, recipe in product(self.comparison.seeds, recipes):
                if ended.is_set():
                    return
                encode_ahead(recipe.model_copy(update={"seed": seed}), tokenizers[recipe.model])

    def _hand_out(self) -> None:
        ready = self.ready({wanted for wanted, *_ in self.running.values()})
        while ready and len(self.running) < self.jobs and not self.alone & {run for run, *_ in self.running.values()}:
            number = min(set(range(self.jobs)) - set(self.running))
            wanted = self._choose(ready, number)
            if wanted in self.alone:
                if self.running:
                    return
                for other in set(self.workers) - {number}:  # their base models leave the memory
                    self.workers.pop(other).end()
            self._begin(number, wanted)
            ready.remove(wanted)

    def _choose(self, ready: list[Wanted], number: int) -> Wanted:
        """A run of the worker's last method, else of one that no other is at: a method is compiled in one process."""
        others, last = {wanted.method for wanted, *_ in self.running.values()}, self.methods.get(number)
        return min(ready, key=lambda w: (w not in self.alone, w.method != last, w.method in others))

    def _begin(self, number: int, wanted: Wanted) -> None:
        if number not in self.workers:
            self.workers[number] = self.start(number, self.jobs)
        recipe = cell_recipe(self.comparison, self.output, wanted)
        recipe.folder.mkdir(parents=True, exist_ok=True)
        self.running[number], self.methods[number] = (wanted, recipe, time.perf_counter()), wanted.method
        self.say("started", wanted)
        self.workers[number].make(recipe, wanted.test)

    def _take_back(self, number: int) -> None:
        wanted, recipe, began = self.running.pop(number)
        seconds = time.perf_counter() - began
        try:
            error, why = self.workers[number].connection.recv()
        except (EOFError, OSError):
            error, why = self._died(number, recipe), ""
        no_memory = why == NO_MEMORY
        if why == IN_USE:
            self.say("elsewhere", wanted, ": another process makes it")
        elif error is None:
            self.finish(wanted, read_record(recipe.folder / CELL), seconds, self.jobs)
        elif no_memory and self.jobs > 1 and wanted not in self.alone:
            self.alone.add(wanted)
            self.jobs -= 1
            self.say("no memory", wanted, f": again alone; {self.jobs} at a time")
        else:
            self.fail(wanted, error, recipe, seconds)
        if number in self.workers and (no_memory or number >= self.jobs):
            self.workers.pop(number).end()

    def _died(self, number: int, recipe: Recipe) -> str:
        """Write the record that a process could not write any more."""
        error = f"its process ended with exit code {self.workers.pop(number).end()}"
        with suppress(ChildProcessError), recorded(recipe):
            raise ChildProcessError(error)
        return error


def _gpu(number: int) -> str | None:
    """The GPU of a worker, where there are several."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    names = visible.split(",")
    return names[number % len(names)] if len(names) > 1 else None
