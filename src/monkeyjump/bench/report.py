"""From rows to ratios and the cells of tables."""

from __future__ import annotations

from collections.abc import Sequence

from monkeyjump.bench.jobs import Row
from monkeyjump.bench.variants import FLOOR, PEFT_LORA
from monkeyjump.tables import Table

REFERENCES = {FLOOR: "floor", PEFT_LORA: "peft", "base": "base"}


MEASURES = {"time": "median_ms", "memory": "peak_bytes", "extra_memory": "extra_bytes"}


def add_ratios(rows: Sequence[Row], same: Sequence[str] = ("mode",)) -> None:
    """Put `time_vs_floor`, `memory_vs_peft`, ... into every row whose reference, alike in `same`, was measured."""
    found = {(row["variant"], *(row.get(key) for key in same)): row for row in rows if row["status"] == "ok"}
    for row in rows:
        if row["status"] != "ok":
            continue
        for variant, short in REFERENCES.items():
            reference = found.get((variant, *(row.get(key) for key in same)))
            for measure_name, key in MEASURES.items():
                if reference is not None and reference.get(key) and row.get(key) is not None:
                    row[f"{measure_name}_vs_{short}"] = row[key] / reference[key]


def step_tables(rows: Sequence[Row], title: str) -> list[Table]:
    """One table per mode, at most 80 characters wide; `spread` is (p90 - p10) / median."""
    columns = ["variant", "ms", "spread", "/floor", "/peft", "memory", "/floor", "/peft"]
    return [
        Table(f"{title}, {mode}", columns, [_step_cells(row) for row in rows if row["mode"] == mode])
        for mode in dict.fromkeys(row["mode"] for row in rows)
    ]


def _step_cells(row: Row) -> list[str]:
    if row["status"] != "ok":
        return [row["variant"], "failed", *[""] * 6]
    return [
        row["variant"],
        number(row["median_ms"]),
        f"{100 * (row['p90_ms'] - row['p10_ms']) / row['median_ms']:.1f}%",
        ratio(row.get("time_vs_floor")),
        ratio(row.get("time_vs_peft")),
        size(row.get("peak_bytes")),
        ratio(row.get("memory_vs_floor")),
        ratio(row.get("memory_vs_peft")),
    ]


def failures(rows: Sequence[Row]) -> list[str]:
    """One line per variant that failed, modes with the same error together."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["status"] != "ok":
            found.setdefault((row["variant"], row["error"]), []).append(row["mode"])
    return [f"{variant} ({', '.join(modes)}): {error[:300]}" for (variant, error), modes in found.items()]


def number(value: float) -> str:
    """Three significant digits or more, never in powers of ten."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"


def ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def size(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 / 10 else f"{value / 2**20:.2f} MiB"
