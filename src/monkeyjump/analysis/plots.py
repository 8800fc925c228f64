"""Plots of expert usage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from monkeyjump.analysis.usage import ExpertUsage
from monkeyjump.errors import ConfigError


def _pyplot():
    try:
        import matplotlib
    except ImportError:
        raise ConfigError('pictures need matplotlib: pip install "monkeyjump[cli]".', title="missing package") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def plot_usage(usage: ExpertUsage, path: Path, title: str = "Where tokens jump") -> Path:
    """The mean share of each expert over tasks, block by block, and how each task deviates from it.

    Of a model that reads pictures, the shares of each kind of token stand between the two.
    Blocks go down, routed projections across. Tasks share most of their routing, so only deviations tell them apart.
    """
    pyplot = _pyplot()
    if not usage.tasks:
        raise ConfigError(
            "usage has no task with a recorded token, so that there is nothing to draw.", title="no picture"
        )
    shares, deviations = usage.shares, usage.deviations
    several = len(usage.tasks) > 1
    kinds = {} if usage.kinds is None else dict(zip(usage.kinds.tasks, usage.kinds.shares, strict=True))
    first = {"mean of the tasks" if several else usage.tasks[0]: shares.mean(0)}
    first |= {f"{kind} tokens": values for kind, values in kinds.items()}
    panels = [*first, *(usage.tasks if several else [])]
    columns = len(panels) if len(panels) <= 6 else min((6, 5, 4), key=lambda count: -len(panels) % count)
    rows = -(-len(panels) // columns)
    size = (1.6 * columns + 2.2, rows * max(2.6, 0.16 * len(usage.blocks) + 1.0))
    figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, sharey=True, layout="constrained")
    brightest = max(0.5, *(np.nanmax(values) for values in (shares, *kinds.values())))
    for axis, (name, values) in zip(axes.flat, first.items(), strict=False):
        image = _panel(axis, name, usage, values, vmin=0, vmax=brightest, cmap="viridis")
    _color_bar(figure, axes, image, "share of jumps")
    if several:
        largest = np.nanmax(np.abs(deviations))
        limit = max(largest, 0.1)  # the colours of a picture without differences do not magnify rounding errors
        for axis, task, deviation in zip(axes.flat[len(first) :], usage.tasks, deviations, strict=False):
            image = _panel(axis, task, usage, deviation, vmin=-limit, vmax=limit, cmap="RdBu_r")
        _color_bar(figure, axes, image, "deviation, percentage points")
        title += f"\nlargest deviation of a task from the mean: {largest:.1f} points"
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    for axis in axes[:, 0]:
        axis.set_ylabel("block", fontsize=8)
    figure.suptitle(title, fontsize=11, parse_math=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path


def _panel(axis: Any, name: str, usage: ExpertUsage, values: Any, **colors: Any) -> Any:
    image = axis.imshow(values, aspect="auto", **colors)
    axis.set_title(name, fontsize=9, parse_math=False)  # a name may hold dollar signs
    experts = [expert.removesuffix("_proj") for expert in usage.experts]
    axis.set_xticks(range(len(experts)), experts, fontsize=8, rotation=90 if len(experts) > 4 else 0)
    ticks = range(0, len(usage.blocks), max(1, len(usage.blocks) // 10))
    axis.set_yticks(list(ticks), [usage.blocks[i] for i in ticks], fontsize=7)
    return image


def _color_bar(figure: Any, axes: Any, image: Any, label: str) -> None:
    length = min(0.8, 3.5 / figure.get_figheight())  # a bar beside many rows of panels is not longer than 3.5 inches
    bar = figure.colorbar(image, ax=axes, shrink=length, aspect=25, pad=0.01)
    bar.set_label(label, fontsize=8)
    bar.ax.tick_params(labelsize=7)
