"""Variants take turns: they build and compile side by side, each in a process of its own, and are timed one at a time.

A process of its own keeps a variant's peak of memory and its crash to itself; what it prints goes to its log. All
variants that are held at the same time take their turns in the same order, so that a machine that becomes slower
meanwhile is slower for all of them. Nothing heavy is imported here.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

Row = dict[str, Any]
OUT_OF_MEMORY = "OutOfMemoryError"
# Under the command line's name, importing the package imports nothing heavy: the measurement decides what it needs.
START = "import sys; sys.argv[0] = 'monkeyjump'; from monkeyjump.bench.turns import work; work()"
LOG_TAIL = 1500  # characters of a log that tell why a process died


@dataclass(frozen=True)
class Measurement:
    """One variant to measure: `run(variant, settings)` has `warm_up()` and `row(mode)`, and works in any process."""

    run: Callable[[str, Any], Any]
    variant: str
    settings: Any  # a dataclass with `modes`
    labels: Row = field(default_factory=dict)  # put into every row


def failure(error: BaseException) -> Row:
    """What a row says of a variant that did not work."""
    text = " ".join(str(error).split())
    return {"status": "failed", "error_type": type(error).__name__, "error": f"{type(error).__name__}: {text}"[:2000]}


class ThisProcess:
    """A variant that is measured here. It is asked to "prepare" first, and then for the row of a mode."""

    def __init__(self, measurement: Measurement, tracebacks: bool = False) -> None:
        self.measurement, self.tracebacks = measurement, tracebacks
        self.run: Any = None

    def ask(self, question: str) -> Row:
        """A row whose status is "ready", "ok" or "failed"."""
        try:
            if self.run is not None:
                return self.run.row(question)
            run = self.measurement.run(self.measurement.variant, self.measurement.settings)
            run.warm_up()
            self.run = run
            return {"status": "ready"}
        except Exception as error:
            if self.tracebacks:
                traceback.print_exc()
            return failure(error)

    def end(self) -> None:
        import torch
        import torch._dynamo

        self.run = None
        torch._dynamo.reset()
        if torch.cuda.is_available():
            gc.collect()  # models with hooks are cycles, and must not be in the next variant's peak
            torch.cuda.empty_cache()


class WorkerProcess:
    """The same in a process of its own, which imports nothing heavy before it is asked."""

    def __init__(self, measurement: Measurement, logs: Path, threads: int, timeout: float) -> None:
        self.measurement, self.timeout = measurement, timeout
        logs.mkdir(parents=True, exist_ok=True)
        self.log = logs / f"{len(list(logs.iterdir())):02d}-{measurement.variant}.log"
        self.lost: Row | None = None  # once it has died or taken too long
        self.connection, theirs = Pipe()
        with theirs, self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", START, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdout=log,
                stderr=log,
                env={**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": str(threads)},
                start_new_session=True,  # its compile workers end with it
            )

    def ask(self, question: str) -> Row:
        if self.lost is not None:
            return self.lost
        try:
            self.connection.send(self.measurement if question == "prepare" else question)
            if self.connection.poll(self.timeout):
                return self.connection.recv()
            self.lost = failure(TimeoutError(f"no answer to {question!r} within {self.timeout:g} s"))
        except (EOFError, OSError):
            last_words = self.log.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL:]
            self.lost = failure(ChildProcessError(f"exit code {self.process.wait()}: {last_words}"))
        self.end()
        return self.lost

    def end(self) -> None:
        """Stop the process and the workers it started, if they still run."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def work() -> None:
    """What a worker process runs: it answers until its parent is gone."""
    connection: Connection = Connection(int(sys.argv[1]))
    with suppress(EOFError, BrokenPipeError):
        variant = ThisProcess(connection.recv(), tracebacks=True)
        connection.send(variant.ask("prepare"))
        while True:
            connection.send(variant.ask(connection.recv()))


def pooled(before: Row, now: Row) -> Row:
    """The row of a mode after one more turn, made from the times of all turns; or of the turn that failed."""
    if now["status"] == "failed":
        return now
    from monkeyjump.bench.runs import summary

    found: Row = summary([*before["times_ms"], *now["times_ms"]])
    found["turns"] = before.get("turns", 1) + 1
    if "tokens_per_second" in before:
        found["tokens_per_second"] = before["tokens_per_second"] * before["median_ms"] / found["median_ms"]
    lists: Row = {name: [*before[name], *now[name]] for name in ("times_ms", "each") if name in now}
    return {**before, **found, **lists}


@dataclass
class Turns:
    """How many processes there may be, and for how long."""

    jobs: int  # processes that build and compile at the same time; 0: everything in this process, one by one
    hold: int  # variants that may be ready and wait for their turn, each with its model in memory
    timeout: float  # seconds to become ready, and seconds to time one mode
    logs: Path
    rounds: int = 1  # turns of every variant

    def rows(self, measurements: Sequence[Measurement]) -> Generator[Row]:
        """The rows of all variants as they come; with several rounds, a row comes again after every turn."""
        again: list[Measurement] = []
        for start in range(0, len(measurements), self.hold):
            yield from self._together(measurements[start : start + self.hold], again)
        for measurement in again:
            yield from self._together([measurement], [])

    def _together(self, wave: Sequence[Measurement], again: list[Measurement]) -> Iterator[Row]:
        """Measure these variants; what ran out of memory beside others is put into `again`, to be tried alone."""
        threads = max(1, (os.cpu_count() or 1) // max(1, min(self.jobs, len(wave))))
        workers = [
            WorkerProcess(measurement, self.logs, threads, self.timeout) if self.jobs else ThisProcess(measurement)
            for measurement in wave
        ]
        found: dict[tuple[int, str], Row] = {}
        with ThreadPoolExecutor(max(1, self.jobs)) as pool:
            try:
                ready = list((pool.map if self.jobs else map)(lambda worker: worker.ask("prepare"), workers))
                for turn in range(self.rounds):
                    for i, (measurement, worker) in enumerate(zip(wave, workers, strict=True)):
                        for mode in measurement.settings.modes:
                            if turn and found[i, mode]["status"] == "failed":
                                continue
                            row = ready[i] if ready[i]["status"] == "failed" else worker.ask(mode)
                            row = {"variant": measurement.variant, "mode": mode, **row, **measurement.labels}
                            row = found[i, mode] = pooled(found[i, mode], row) if turn else row
                            if len(wave) == 1 or row.get("error_type") != OUT_OF_MEMORY:
                                yield row
                        if turn == self.rounds - 1:
                            worker.end()
            finally:
                for worker in workers:
                    worker.end()
        for i, measurement in enumerate(wave):
            modes = tuple(m for m in measurement.settings.modes if found[i, m].get("error_type") == OUT_OF_MEMORY)
            if modes and len(wave) > 1:
                again.append(replace(measurement, settings=replace(measurement.settings, modes=modes)))
