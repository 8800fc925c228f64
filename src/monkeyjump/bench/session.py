"""A measurement under way: the record that always holds what has been measured so far, and who runs the jobs."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from monkeyjump.bench.jobs import Crew, Job, Row, run_here
from monkeyjump.bench.report import add_ratios
from monkeyjump.record import RunRecord, device_in_words, write_record

PACKAGES = ("triton", "liger-kernel")  # what else decides how fast a step is


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


class Session:
    """Rows are written as they come: a run that is killed keeps what it measured, and says `cancelled`."""

    def __init__(self, output: Path, name: str, config: dict[str, Any], device: str) -> None:
        self.output = output
        self.same: tuple[str, ...] = ("mode",)  # in what a row and its reference agree
        self.path = output / "record.json"
        self.rows: list[Row] = []
        self.record = RunRecord(
            kind="bench",
            name=name,
            config=config,
            seed=(config.get("workload") or config).get("seed"),
            status="cancelled",
            device=device_in_words(device),
        )
        self.record.metrics["rows"] = self.rows
        self.record.versions |= {name: _version(name) for name in PACKAGES}
        self.save()

    def add(self, row: Row) -> None:
        self.rows.append(row)
        add_ratios(self.rows, self.same)
        self.save()

    def save(self) -> None:
        self.record.finished = None  # so that it is the time of this writing
        write_record(self.record, self.path)

    def finish(self) -> None:
        """All that could be measured is; failed if that is nothing."""
        self.record.status = "finished" if any(row["status"] == "ok" for row in self.rows) else "failed"
        self.save()

    def measure(self, jobs: list[Job], crew: Crew | None, tell: Callable[[Row], None]) -> None:
        """Run the jobs in processes, or without a crew in this one."""

        def on_row(row: Row) -> None:
            self.add(row)
            tell(row)

        if crew is None:
            run_here(jobs, on_row)
        else:
            crew.run(jobs, on_row)
