"""The efficiency figure: time and memory of every method, beside those of the frozen model and of PEFT's LoRA."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from monkeyjump.bench.variants import BASELINES


def pyplot() -> Any:
    """matplotlib without a screen, or None where it is not installed: a picture is never worth a measurement."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def _saved(plt: Any, figure: Any, path: Path, title: str) -> Path:
    figure.suptitle(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


def efficiency(rows: Sequence[dict[str, Any]], path: Path, title: str, modes: Sequence[str] = ()) -> Path | None:
    """One panel for time and, where it was counted, one for peak memory; variants down, modes as bars."""
    plt = pyplot()
    rows = [row for row in rows if row["status"] == "ok"]
    if plt is None or not rows:
        return None
    modes = list(modes) or list(dict.fromkeys(row["mode"] for row in rows))
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    panels = [("median_ms", "ms", 1.0)]
    if any(row.get("peak_bytes") for row in rows):
        panels.append(("peak_bytes", "peak memory, GiB", 2.0**30))
    height = 1.2 + 0.17 * len(variants) * (len(modes) + 0.6)
    figure, axes = plt.subplots(
        1, len(panels), figsize=(5.2 * len(panels), height), squeeze=False, sharey=True, layout="constrained"
    )
    for axis, (key, label, unit) in zip(axes[0], panels, strict=True):
        for position, mode in enumerate(modes):
            found = {row["variant"]: row[key] / unit for row in rows if row["mode"] == mode and row.get(key)}
            places = [index + (position - (len(modes) - 1) / 2) * 0.8 / len(modes) for index in range(len(variants))]
            axis.barh(places, [found.get(name, 0) for name in variants], 0.8 / len(modes), label=mode)
            for baseline in BASELINES:
                if baseline in found:
                    axis.axvline(found[baseline], color=f"C{position}", linewidth=0.7, linestyle=":")
        axis.set_yticks(range(len(variants)), variants, fontsize=8)
        axis.set_xlabel(label, fontsize=9)
        axis.tick_params(axis="x", labelsize=8)
        axis.margins(y=0.01)
    axes[0][0].invert_yaxis()
    axes[0][0].legend(fontsize=8)
    return _saved(plt, figure, path, title)


def memory(rows: Sequence[dict[str, Any]], path: Path, title: str) -> Path | None:
    """Peak memory of every variant, with each loss: the model and what a step adds to it."""
    plt = pyplot()
    rows = [row for row in rows if row["status"] == "ok" and row.get("peak_bytes")]
    if plt is None or not rows:
        return None
    labels = [f"{row['variant']}, {row['mode']}, {row['loss']}" for row in rows]
    figure, axis = plt.subplots(figsize=(7, 1.2 + 0.22 * len(rows)), layout="constrained")
    resident = [row["resident_bytes"] / 2**30 for row in rows]
    axis.barh(range(len(rows)), resident, label="model, adapters, batch", color="0.7")
    axis.barh(range(len(rows)), [row["extra_bytes"] / 2**30 for row in rows], left=resident, label="step")
    axis.set_yticks(range(len(rows)), labels, fontsize=7)
    axis.set_xlabel("GiB", fontsize=9)
    axis.invert_yaxis()
    axis.legend(fontsize=8)
    return _saved(plt, figure, path, title)


def scaling(rows: Sequence[dict[str, Any]], path: Path, title: str) -> Path | None:
    """Time above and, where it was counted, memory of the step below; one column per axis, scales logarithmic.

    A row of panels has one scale: what hardly grows looks so.
    """
    plt = pyplot()
    rows = [row for row in rows if row["status"] == "ok" and row["value"]]
    axes_names = list(dict.fromkeys(row["axis"] for row in rows))
    if plt is None or not rows:
        return None
    measures = [("median_ms", "ms", 1)]
    if any(row.get("extra_bytes") for row in rows):
        measures.append(("extra_bytes", "MiB above the model", 2**20))
    size, shape = (3.2 * len(axes_names), 0.8 + 2.4 * len(measures)), (len(measures), len(axes_names))
    figure, axes = plt.subplots(*shape, figsize=size, squeeze=False, sharex="col", sharey="row", layout="constrained")
    lines = list(dict.fromkeys((row["variant"], row["mode"]) for row in rows))
    for column, name in enumerate(axes_names):
        on_axis = [row for row in rows if row["axis"] == name]
        for panel, (key, label, unit) in zip(axes[:, column], measures, strict=True):
            for line, (variant, mode) in enumerate(lines):
                found = [row for row in on_axis if (row["variant"], row["mode"]) == (variant, mode) and row.get(key)]
                found.sort(key=lambda row: row["value"])  # jobs side by side end in any order
                panel.plot(
                    [row["value"] for row in found],
                    [row[key] / unit for row in found],
                    marker="o",
                    markersize=3,
                    color=f"C{line}",
                    label=f"{variant}, {mode}",
                )
            _logarithmic(panel, sorted({row["value"] for row in on_axis}))
            if column == 0:
                panel.set_ylabel(label, fontsize=9)
        axes[-1][column].set_xlabel(name, fontsize=9)
    figure.legend(*axes[0][0].get_legend_handles_labels(), fontsize=8, loc="outside lower center", ncols=4)
    return _saved(plt, figure, path, title)


def _logarithmic(panel: Any, values: list[int]) -> None:
    """Both scales logarithmic, in plain numbers, with a tick at every value that was measured."""
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xticks(values, [str(value) for value in values], fontsize=8)
    panel.set_xticks([], minor=True)
    panel.yaxis.set_major_formatter("{x:g}")
    panel.yaxis.set_minor_formatter("{x:g}")
    panel.tick_params(axis="y", which="both", labelsize=7)
