"""Variants in processes of their own: they build and compile side by side, and are timed strictly one at a time.

The protocol is in `child.py`: a child prepares, says `ready` and waits; it measures whenever it is told to `go`. Where
variants take turns, a machine that becomes slower meanwhile is slower for all of them.
"""

from __future__ import annotations

import gc
import importlib
import os
import queue
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from monkeyjump.bench.child import Child

Row = dict[str, Any]
OnRow = Callable[[Row], None]
OUT_OF_MEMORY = "OutOfMemoryError"


@dataclass(frozen=True)
class Job:
    """`prepare(variant, settings)` of a module, which gives a function that yields one row for each of `modes`."""

    module: str
    variant: str
    settings: dict[str, Any]
    modes: tuple[str, ...]
    labels: dict[str, Any] = field(default_factory=dict)  # put into every row

    def load(self) -> Callable[[], Iterator[Row]]:
        return importlib.import_module(self.module).prepare(self.variant, self.settings)

    def failed(self, modes: list[str], error: Row) -> Iterator[Row]:
        for mode in modes:
            yield {"variant": self.variant, "mode": mode, **self.labels, **error}

    def only(self, modes: list[str]) -> Job:
        return replace(self, modes=tuple(modes), settings={**self.settings, "modes": list(modes)})


def failure(error: BaseException) -> Row:
    """What a row says of a variant that did not work."""
    text = " ".join(str(error).split())
    return {"status": "failed", "error_type": type(error).__name__, "error": f"{type(error).__name__}: {text}"[:2000]}


def pooled(before: Row | None, now: Row) -> Row:
    """The row of a mode after one more turn: of all times together. A turn that failed is what the row says."""
    if before is None or before["status"] != "ok":
        return before or now
    if now["status"] != "ok":
        return now
    from monkeyjump.bench.timing import spread

    times = [*before["times_ms"], *now["times_ms"]]
    found = asdict(spread(times))
    rate = before["tokens_per_second"] * before["median_ms"] / found["median_ms"]
    return {**before, **found, "times_ms": times, "tokens_per_second": rate, "ended": now["ended"]}


def run_here(jobs: list[Job], on_row: OnRow) -> None:
    """All in this process, one after another."""
    for job in jobs:
        due = list(job.modes)
        try:
            for row in job.load()():
                due.remove(row["mode"])
                on_row({**row, **job.labels})
        except Exception as error:
            for row in job.failed(due, failure(error)):
                on_row(row)
        _forget()


def _forget() -> None:
    import torch
    import torch._dynamo

    torch._dynamo.reset()
    if torch.cuda.is_available():
        gc.collect()  # models with hooks are cycles, and must not be in the next one's peak
        torch.cuda.empty_cache()


@dataclass
class Crew:
    """How many processes there may be, and for how long."""

    jobs: int  # that build and compile at the same time
    hold: int  # that may be ready and wait for their turn, holding their memory
    timeout: float  # seconds to become ready, and seconds between two rows
    logs: Path
    rounds: int = 1  # turns of every variant, of what is held at the same time

    def run(self, jobs: list[Job], on_row: OnRow) -> None:
        """Waves of `hold` variants: all become ready, then one after another is timed, in its last turn let go."""
        waiting, again = deque(jobs), []
        while waiting:
            wave = [waiting.popleft() for _ in range(min(self.hold, len(waiting)))]
            again += Wave(self, on_row, retry=len(wave) > 1).run(wave)
        for job in again:  # memory ran out beside others: once more without them
            Wave(self, on_row, retry=False).run([job])


class Wave:
    """The variants that are held at the same time."""

    def __init__(self, crew: Crew, on_row: OnRow, retry: bool) -> None:
        self.crew, self.on_row, self.retry = crew, on_row, retry
        self.events: queue.Queue[tuple[Child, Row]] = queue.Queue()
        self.again: list[Job] = []

    def run(self, wave: list[Job]) -> list[Job]:
        """Prepare all, time all; what comes back ran out of memory beside the others and is to be tried alone."""
        children: list[Child] = []
        try:
            ready = self._ready(wave, children)
            for turn in range(self.crew.rounds):
                for child in ready:
                    last = turn == self.crew.rounds - 1
                    self._time(child, last)
                    if last:
                        child.end()
        finally:
            for child in children:
                child.end()
        return self.again

    def _ready(self, wave: list[Job], children: list[Child]) -> list[Child]:
        from monkeyjump.bench.child import Child

        waiting, ready = deque(wave), []
        running: list[Child] = []
        threads = max(1, (os.cpu_count() or 1) // min(self.crew.jobs, len(wave)))
        while waiting or running:
            while waiting and len(running) < self.crew.jobs:
                running.append(Child(waiting.popleft(), self.crew.logs, threads, self.events))
                children.append(running[-1])
            for child, event in self._next(running):
                running.remove(child)
                if event["event"] == "ready":
                    ready.append(child)
                else:
                    self._lost(child, event["error"])
        return ready

    def _next(self, running: list[Child]) -> list[tuple[Child, Row]]:
        """The next event of a child that prepares, or the end of those that take too long."""
        now = time.monotonic()
        late = [child for child in running if child.started + self.crew.timeout <= now]
        if late:
            for child in late:
                child.end()
            return [(child, self._too_long("not ready")) for child in late]
        try:
            child, event = self.events.get(timeout=min(child.started for child in running) + self.crew.timeout - now)
        except queue.Empty:
            return []
        if child in running:
            return [(child, event)]
        child.lost = event.get("error")  # it died while it waited
        return []

    def _time(self, child: Child, last: bool) -> None:
        """Let one child measure while all others wait. Its rows are complete after its last turn."""
        repeat: list[str] = []
        paused = False
        if child.lost is None:
            child.send({"event": "go"})
        while child.lost is None and not paused:
            try:
                other, event = self.events.get(timeout=self.crew.timeout)
            except queue.Empty:
                other, event = child, self._too_long("no result")
            if event["event"] == "paused":
                paused = True
                continue
            if event["event"] != "row":
                other.lost = event["error"]
                continue
            row = other.found[event["row"]["mode"]] = pooled(other.found.get(event["row"]["mode"]), event["row"])
            if not last:
                continue
            other.due.remove(row["mode"])
            if self.retry and row.get("error_type") == OUT_OF_MEMORY:
                repeat.append(row["mode"])
            else:
                self.on_row({**row, **other.job.labels})
        if repeat:
            self.again.append(child.job.only(repeat))
        if child.lost is not None or last:
            self._lost(child, child.lost or failure(RuntimeError("ended without this row")))

    def _lost(self, child: Child, error: Row) -> None:
        """The rows that a child still owes; none, if it has finished."""
        if self.retry and error.get("error_type") == OUT_OF_MEMORY:
            self.again.append(child.job.only(child.due))
        else:
            for row in child.job.failed(child.due, error):
                self.on_row(row)
        child.due = []

    def _too_long(self, what: str) -> Row:
        return {"event": "ended", "error": failure(TimeoutError(f"{what} within {self.crew.timeout:g} s"))}
