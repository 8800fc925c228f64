"""Variants take turns: they build and compile side by side, and are timed strictly one at a time.

All variants that are held at the same time take their turns in the same order, so that a machine that becomes slower
meanwhile is slower for all of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from monkeyjump.bench.worker_process import Row, ThisProcess, WorkerProcess

OUT_OF_MEMORY = "OutOfMemoryError"


@dataclass(frozen=True)
class Measurement:
    """One variant to measure: `run(variant, settings)` with `warm_up()` and `row(mode)`, at home in any process."""

    run: Callable[[str, Any], Any]
    variant: str
    settings: Any  # a dataclass with `modes`
    labels: Row = field(default_factory=dict)  # put into every row

    def prepared(self) -> Any:
        run = self.run(self.variant, self.settings)
        run.warm_up()
        return run


def pooled(before: Row, now: Row) -> Row:
    """The row of a mode after one more turn, made from the times of all turns; or of the turn that failed."""
    if now["status"] == "failed":
        return now
    from monkeyjump.bench.timing import summary

    times = [*before["times_ms"], *now["times_ms"]]
    found = summary(times)
    rate, turns = before["tokens_per_second"] * before["median_ms"] / found["median_ms"], before.get("turns", 1) + 1
    return {**before, **found, "times_ms": times, "tokens_per_second": rate, "turns": turns, "ended": now["ended"]}


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
