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


def efficiency(rows: Sequence[dict[str, Any]], path: Path, title: str, modes: Sequence[str] = ()) -> Path | None:
    """One panel for time and, where it was counted, one for peak memory; variants down, modes as bars."""
    plt = pyplot()
    rows = [row for row in rows if row["status"] == "ok"]
    if plt is None or not rows:
        return None
    modes = list(modes) or list(dict.fromkeys(row["mode"] for row in rows))
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    panels = [("median_ms", "ms per step", 1.0)]
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
    axes[0][0].invert_yaxis()
    axes[0][0].legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path
