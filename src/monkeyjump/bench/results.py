"""The rows of a benchmark: the record that holds them, their ratios to the baselines, and their tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from monkeyjump.bench.variants import FLOOR, PEFT_LORA
from monkeyjump.bench.worker_process import Row
from monkeyjump.record import RunRecord, device_in_words, write_record
from monkeyjump.tables import Table

REFERENCES = {FLOOR: "floor", PEFT_LORA: "peft"}
MEASURES = {"time": "median_ms", "memory": "peak_bytes", "extra_memory": "extra_bytes"}
Columns = Sequence[tuple[str, str, Callable[[Any], str]]]  # a heading, the key of its values, how they are written


class BenchRecord:
    """Rows are written as they come: a run that is killed keeps what it measured, and says `cancelled`."""

    def __init__(self, folder: Path, name: str, config: dict[str, Any], same: Sequence[str] = ("mode",)) -> None:
        self.path = folder / "record.json"
        self.same = tuple(same)  # the keys in which a row and its reference agree
        self.rows: list[Row] = []
        self.content = RunRecord(
            kind="bench",
            name=name,
            config=config,
            seed=config.get("seed"),
            status="cancelled",
            device=device_in_words(config["device"]),
        )
        self.content.metrics["rows"] = self.rows
        self.save()

    def add(self, row: Row) -> None:
        """Put a row in, in place of the row that the turn before gave."""
        keys = ("variant", *self.same)
        alike = (i for i, known in enumerate(self.rows) if all(known.get(key) == row.get(key) for key in keys))
        place = next(alike, len(self.rows))
        self.rows[place : place + 1] = [row]
        add_ratios(self.rows, self.same)
        self.save()

    def save(self) -> None:
        self.content.finished = None  # so that it is the time of this writing
        write_record(self.content, self.path)

    def finish(self) -> None:
        """Everything that could be measured is; the run failed where that is nothing."""
        self.content.status = "finished" if any(row["status"] == "ok" for row in self.rows) else "failed"
        self.save()


def add_ratios(rows: Sequence[Row], same: Sequence[str] = ("mode",)) -> None:
    """Put `time_vs_floor`, `memory_vs_peft`, ... into every row whose reference, alike in `same`, was measured."""
    measured = [row for row in rows if row["status"] == "ok"]
    found = {(row["variant"], *(row.get(key) for key in same)): row for row in measured}
    for row in measured:
        for variant, short in REFERENCES.items():
            reference = found.get((variant, *(row.get(key) for key in same)), {})
            for name, key in MEASURES.items():
                if reference.get(key) and row.get(key) is not None:
                    row[f"{name}_vs_{short}"] = row[key] / reference[key]


def result_tables(rows: Sequence[Row], title: str, columns: Columns, group: Sequence[str] = ("mode",)) -> list[Table]:
    """One table for every value of `group`; a row that failed says so in its first cell without a value."""
    tables: dict[str, list[list[str]]] = {}
    for row in rows:
        values = [(row.get(key), written) for _, key, written in columns]
        cells = ["" if value is None else written(value) for value, written in values]
        if row["status"] != "ok":
            cells[cells.index("")] = "failed"
        tables.setdefault(", ".join([title, *(str(row[key]) for key in group)]), []).append(cells)
    left = sum(written is str for _, _, written in columns)
    return [Table(name, [heading for heading, _, _ in columns], cells, left) for name, cells in tables.items()]


def failures(rows: Sequence[Row]) -> list[str]:
    """One line for each variant that failed; modes with the same error share it."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["status"] != "ok":
            found.setdefault((row["variant"], row["error"]), []).append(row["mode"])
    return [f"{variant} ({', '.join(modes)}): {error[:300]}" for (variant, error), modes in found.items()]


def milliseconds(value: float) -> str:
    """Three significant digits or more, never in powers of ten."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"


def bytes_in_words(value: float) -> str:
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 / 10 else f"{value / 2**20:.2f} MiB"


ratio = "{:.3f}".format
