"""Comparison tables for the terminal: tasks down, methods across, never wider than the screen allows."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from monkeyjump.experiments.compare import Comparison
from monkeyjump.experiments.tables import comparison_rows, costs, spread


def _table(title: str, columns: list[str]) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)
    for position, column in enumerate(columns):
        table.add_column(column, justify="left" if position == 0 else "right", overflow="fold")
    return table


SIDE_BY_SIDE = 4  # methods that fit beside the task names on 80 columns


def metrics_tables(comparison: Comparison) -> list[Table]:
    """As many tables as the methods need; the best of all methods is bold, in whichever table it stands."""
    methods = comparison.methods
    return [
        _metrics_table(comparison, methods[start : start + SIDE_BY_SIDE])
        for start in range(0, len(methods), SIDE_BY_SIDE)
    ]


def _metrics_table(comparison: Comparison, methods: list[str]) -> Table:
    seeds = len(comparison.seeds)
    table = _table(f"Test metric x 100, mean ± sd over {seeds} seeds; best in bold", ["task", *methods])
    for label, values in comparison_rows(comparison):
        best = max(fmean(values[m]) for m in comparison.methods)
        cells = []
        for method in methods:
            mean = fmean(values[method])
            text = f"{100 * mean:.1f} ±{100 * spread(values[method]):.1f}"
            cells.append(Text(text, style="bold" if mean == best else ""))
        table.add_row(Text(label, style="italic" if label.endswith("mean") else ""), *cells)
    return table


def costs_table(comparison: Comparison) -> Table:
    table = _table("Cost", ["method", "lr", "trainable", "router", "mean gate", "peak memory", "steps/s"])
    for method in comparison.methods:
        cost: dict[str, Any] = costs(comparison, method)
        memory = cost["peak_memory_bytes"]
        gate = cost["mean_gate"]
        table.add_row(
            method,
            f"{cost['lr']:g}",
            f"{cost['trainable']:,}",
            f"{cost['router']:,}",
            "" if gate is None else f"{gate:.3f}",
            "" if memory is None else f"{memory / 2**30:.2f} GiB",
            f"{cost['steps_per_second']:.2f}",
        )
    return table


def differences_table(comparison: Comparison) -> Table:
    reference = comparison.methods[0]
    table = _table(
        f"Difference to {reference} in the mean of all tasks, paired by seed", ["method", "points", "s.e.", "p"]
    )
    for method, found in comparison.differences(reference).items():
        numbers = (f"{100 * found.standard_error:.2f}", f"{found.p_value:.2f}") if found.n > 1 else ("", "")
        table.add_row(method, f"{100 * found.mean:+.2f}", *numbers)
    return table
