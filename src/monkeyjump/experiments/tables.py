"""The paper's kind of table from a comparison, and its files."""

from __future__ import annotations

import csv
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from monkeyjump.experiments.compare import Comparison
from monkeyjump.record import RunRecord, csv_text, write_record


def spread(values: list[float]) -> float:
    return stdev(values) if len(values) > 1 else 0.0


def comparison_rows(comparison: Comparison) -> list[tuple[str, dict[str, list[float]]]]:
    """(label, values by method over seeds): every task under its family, family means, and the mean of all tasks."""
    rows: list[tuple[str, dict[str, list[float]]]] = []
    for family, tasks in comparison.families().items():
        rows += [(task, {m: comparison.values(m, task) for m in comparison.methods}) for task in tasks]
        rows.append((f"{family} mean", {m: comparison.family_values(m, family) for m in comparison.methods}))
    rows.append(("mean", {m: comparison.values(m, "mean") for m in comparison.methods}))
    return rows


def comparison_tables(comparison: Comparison) -> list[Any]:
    """Metrics with the best in bold, costs, and differences paired by seed."""
    from monkeyjump.experiments.rich_tables import costs_table, differences_table, metrics_tables

    return [*metrics_tables(comparison), costs_table(comparison), differences_table(comparison)]


def costs(comparison: Comparison, method: str) -> dict[str, Any]:
    cells = [cell for cell in comparison.final if cell.method == method]
    memory = [cell.metrics["peak_memory_bytes"] for cell in cells if cell.metrics.get("peak_memory_bytes")]
    return {
        "lr": comparison.best_lr(method),
        "trainable": cells[0].metrics["trainable"],
        "router": cells[0].metrics["router"],
        "peak_memory_bytes": max(memory) if memory else None,
        "steps_per_second": fmean(cell.metrics["steps_per_second"] for cell in cells),
        "mean_gate": cells[0].metrics.get("mean_gate"),
    }


def save_comparison(comparison: Comparison, output: Path) -> list[Path]:
    """The record (JSON) and the table (CSV)."""
    rows = comparison_rows(comparison)
    reference = comparison.methods[0]
    record = RunRecord(
        kind="compare",
        name=comparison.recipe.name,
        config=comparison.recipe.to_dict(),
        metrics={
            "methods": comparison.methods,
            "seeds": comparison.seeds,
            "searched": [
                {"method": c.method, "lr": c.lr, "seed": c.seed, "validation": c.metrics["validation"]}
                for c in comparison.searched
            ],
            "results": dict(rows),
            "base": comparison.final[0].metrics.get("base"),
            "test_rows": comparison.final[0].metrics.get("rows"),
            "costs": {method: costs(comparison, method) for method in comparison.methods},
            "differences": {
                method: {"against": reference, **asdict(difference)}
                for method, difference in comparison.differences(reference).items()
            },
        },
    )
    path = output / "compare.json"
    write_record(record, path)
    table = output / "compare.csv"
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["task", *(f"{m} {what}" for m in comparison.methods for what in ("mean", "sd"))])
        for label, values in rows:
            cells = [f"{100 * x:.2f}" for m in comparison.methods for x in (fmean(values[m]), spread(values[m]))]
            writer.writerow([csv_text(label), *cells])
    return [path, table]
