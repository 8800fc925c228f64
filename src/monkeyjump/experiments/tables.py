"""The paper's kind of table from a comparison, and its files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from monkeyjump.evaluation.metrics import PairedDifference, holm
from monkeyjump.experiments.comparison import Comparison, failed
from monkeyjump.record import RunRecord, jsonable, numbered, read_record, write_atomic, write_record
from monkeyjump.tables import Bold, Table, csv_text

SIDE_BY_SIDE = 4  # columns that fit beside the task names on 80 columns


def spread(values: list[float]) -> float:
    return stdev(values) if len(values) > 1 else 0.0


def percent(values: list[float]) -> str:
    """The mean of shares in per cent; with the spread over seeds, where there are several."""
    return f"{100 * fmean(values):.1f}" + (f" ±{100 * spread(values):.1f}" if len(values) > 1 else "")


def in_seeds(count: int, several: str = "") -> str:
    """How many seeds there are; where there are several, with what that allows to say."""
    return f"{count} seeds{several}" if count > 1 else "1 seed"


def digest(rows: list[dict[str, Any]]) -> str:
    """What a picture carries of the numbers that it was made from."""
    return hashlib.sha256(json.dumps(jsonable(rows), sort_keys=True).encode()).hexdigest()


def comparison_rows(comparison: Comparison) -> list[tuple[str, dict[str, list[float]]]]:
    """(label, values by method over seeds): every task under its family, family means, and the mean of all tasks."""
    rows: list[tuple[str, dict[str, list[float]]]] = []
    for family, tasks in comparison.families().items():
        rows += [(task, {m: comparison.values(m, task) for m in comparison.methods}) for task in tasks]
        rows.append((f"{family} mean", {m: comparison.family_values(m, family) for m in comparison.methods}))
    rows.append(("mean", {m: comparison.values(m, "mean") for m in comparison.methods}))
    return rows


UNTRAINED = {"majority": "majority", "base": "zero-shot"}  # of the cells' metrics: what needs no training


def comparison_tables(comparison: Comparison) -> list[Table]:
    """The metrics with the best method of each task in bold, the costs, and the differences paired by seed."""
    columns = [*UNTRAINED.values(), *comparison.methods]
    groups = [columns[start : start + SIDE_BY_SIDE] for start in range(0, len(columns), SIDE_BY_SIDE)]
    metrics = [_metrics_table(comparison, group) for group in groups]
    return [*metrics, _costs_table(comparison), _differences_table(comparison)]


def _metrics_table(comparison: Comparison, columns: list[str]) -> Table:
    rows = []
    untrained = {name: _untrained(comparison, kind) for kind, name in UNTRAINED.items()}
    for label, values in comparison_rows(comparison):
        best, cells = max(fmean(values[m]) for m in comparison.methods), []
        for column in columns:
            if column in untrained:
                cells.append(untrained[column].get(label, ""))
                continue
            text = percent(values[column])
            cells.append(Bold(text) if fmean(values[column]) == best else text)
        rows.append([label, *cells])
    title = f"Test metric x 100, {in_seeds(len(comparison.seeds), ' (mean ± sd)')}; best in bold"
    return Table(title, ["task", *columns], rows)


def _untrained(comparison: Comparison, kind: str) -> dict[str, str]:
    """What each task, family and the mean reach without training; a mean where all of its tasks have one."""
    found = comparison.final[0].metrics.get(kind) or {}
    means = {f"{family} mean": tasks for family, tasks in comparison.families().items()} | {"mean": comparison.tasks()}
    values = found | {
        name: fmean(found[task] for task in tasks)
        for name, tasks in means.items()
        if all(found.get(task) is not None for task in tasks)
    }
    return {name: f"{100 * value:.1f}" for name, value in values.items() if value is not None}


def _costs_table(comparison: Comparison) -> Table:
    rows = []
    for method in comparison.methods:
        cost = costs(comparison, method)
        memory, gate = cost["peak_memory_bytes"], cost["mean_gate"]
        rows.append(
            [
                method,
                f"{cost['lr']:g}",
                f"{cost['trainable']:,}",
                f"{cost['router']:,}",
                "" if gate is None else f"{gate:.3f}",
                "" if memory is None else f"{memory / 2**30:.2f} GiB",
                f"{cost['steps_per_second']:.2f}",
                str(cost["failed"] or ""),
            ]
        )
    return Table("Cost", ["method", "lr", "trainable", "router", "gate", "memory", "steps/s", "failed"], rows)


def _differences_table(comparison: Comparison) -> Table:
    reference = comparison.methods[0]
    rows = {method: [method] for method in comparison.methods[1:]}
    for measure, scale in (("mean", 100), ("mean_nll", 1000)):
        found = comparison.differences(reference, measure)
        corrected = holm([difference.p_value for difference in found.values()])
        cells = {m: _difference(d, p, scale) for (m, d), p in zip(found.items(), corrected, strict=True)}
        rows = {method: [*row, *cells.get(method, [""] * 3)] for method, row in rows.items()}
    title = f"Difference to {reference} in the mean of all tasks, paired by seed; p corrected for {len(rows)} methods"
    return Table(title, ["method", "points", "s.e.", "p", "NLL x 1000", "s.e.", "p"], list(rows.values()))


def _difference(found: PairedDifference, p: float, scale: float) -> list[str]:
    more = [f"{scale * found.standard_error:.2f}", f"{p:.3f}"] if found.n > 1 else ["", ""]
    return [f"{scale * found.mean:+.2f}", *more]


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
        "failed": sum(failed(cell.metrics) for cell in cells),
    }


def save_comparison(comparison: Comparison, output: Path) -> list[Path]:
    """The record (JSON) and the table (CSV)."""
    rows = comparison_rows(comparison)
    reference = comparison.methods[0]
    metrics = {
        "methods": comparison.methods,
        "seeds": comparison.seeds,
        "rates": comparison.lrs,
        "searched": [
            {"method": c.method, "lr": c.lr, "seed": c.seed}
            | {name: c.metrics.get(name) for name in ("validation", "validation_nll")}
            for c in comparison.searched
        ],
        "results": dict(rows),
        "nll": {method: comparison.measured(method, "mean_nll") for method in comparison.methods},
        **{kind: comparison.final[0].metrics.get(kind) for kind in UNTRAINED},
        "test_rows": comparison.final[0].metrics.get("rows"),
        "costs": {method: costs(comparison, method) for method in comparison.methods},
        "differences": {
            method: {"against": reference, **asdict(difference)}
            for method, difference in comparison.differences(reference).items()
        },
    }
    record = comparison.record("compare", comparison.recipe.name, metrics)
    lines = [["task", *(f"{m} {what}" for m in comparison.methods for what in ("mean", "sd"))]]
    for label, values in rows:
        numbers = [f"{100 * x:.2f}" for m in comparison.methods for x in (fmean(values[m]), spread(values[m]))]
        lines.append([label, *numbers])
    stem = stem_of(output / "compare", record, ("methods", "seeds", "rates"))
    return [write_record(record, Path(f"{stem}.json")), write_atomic(f"{stem}.csv", csv_text(lines))]


def stem_of(path: Path, record: RunRecord, same: Sequence[str]) -> Path:
    """The path, or the next of its numbers, where no result of other settings lies; `same` are metrics that tell."""

    def may_be_written(path: Path) -> bool:
        if not path.is_file():
            return True
        earlier = read_record(path)
        return earlier.config == record.config and all(earlier.metrics.get(n) == record.metrics[n] for n in same)

    return next(stem for stem in numbered(path) if may_be_written(Path(f"{stem}.json")))
