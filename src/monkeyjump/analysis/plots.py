"""Figures of expert usage: by task, before and after training, task against task, and the health of the routing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from monkeyjump.analysis.style import COLORS, Drawing, color_bar, grid, heatmap, label, name_ticks
from monkeyjump.analysis.usage import ExpertUsage
from monkeyjump.errors import ConfigError

_MOST_TASKS = 18  # panels of deviations; of more tasks those are drawn that deviate most


def plot_usage(usage: ExpertUsage, path: Path, title: str = "Where tokens jump") -> Path:
    """The picture of usage that a training writes beside its adapter."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draw_usage(usage, title).figure.savefig(path, dpi=150)
    return path


def draw_usage(usage: ExpertUsage, title: str = "Where tokens jump") -> Drawing:
    """The mean share of each expert, how each task deviates from it, and what an expert says about the task.

    Of a model that reads pictures, the shares of each kind of token come after the mean.
    """
    if not usage.tasks:
        raise ConfigError(
            "usage has no task with a recorded token, so that there is nothing to draw.", title="no picture"
        )
    shares, deviations, several = usage.shares, usage.deviations, len(usage.tasks) > 1
    kinds = {} if usage.kinds is None else dict(zip(usage.kinds.tasks, usage.kinds.shares, strict=True))
    first = {"mean of the tasks" if several else usage.tasks[0]: shares.mean(0)}
    first |= {f"{kind} tokens": values for kind, values in kinds.items()}
    shown = _most_deviating(usage) if several else []
    findings, largest = [], float(np.nanmax(np.abs(deviations)))
    if several:
        findings.append(f"largest deviation of a task from the mean: {largest:.1f} points")
    title = "\n".join([title, *findings])
    height = max(2.6, 0.13 * len(usage.blocks) + 1.0)
    figure, axes = grid(len(first) + len(shown) + several, 1.75, height, title)
    brightest = max(0.5, *(float(np.nanmax(values)) for values in (shares, *kinds.values())))
    for axis, (name, values) in zip(axes, first.items(), strict=False):
        image = heatmap(axis, values, usage.blocks, usage.experts, (0, brightest))
        label(axis, name)
    color_bar(figure, axes, image, "share of jumps")
    if several:
        limit = max(largest, 10.0)  # the colours of a picture without differences do not magnify rounding errors
        for axis, task in zip(axes[len(first) :], shown, strict=False):
            deviation = deviations[usage.tasks.index(task)]
            image = heatmap(axis, deviation, usage.blocks, usage.experts, (-limit, limit))
            label(axis, task)
        color_bar(figure, axes, image, "deviation, percentage points")
        _bits(axes[-1], usage)
        findings.append(_bits_in_words(usage))
    for axis in axes:
        if axis.get_subplotspec().is_first_col():
            axis.set_ylabel("block", fontsize=8)
    rows = [
        [task, block, expert, shares[t, b, e], deviations[t, b, e], usage.bits[b] if several else None]
        for t, task in enumerate(usage.tasks)
        for b, block in enumerate(usage.blocks)
        for e, expert in enumerate(usage.experts)
        if not np.isnan(shares[t, b, e])
    ]
    return Drawing(
        "usage",
        "Where tokens jump",
        "The first panel shows how the jumps of each block are shared among its experts. Each further panel shows how "
        "one task differs from the mean over tasks, in percentage points. The last one shows how many bits the expert "
        "of a jump says about the task of its token, adjusted for chance by random tasks for whole rows.",
        figure,
        ["task", "block", "expert", "share", "deviation in points", "task bits of the block"],
        rows,
        usage.to_dict(),
        findings,
    )


def _most_deviating(usage: ExpertUsage) -> list[str]:
    size = np.nanmax(np.abs(usage.deviations), axis=(1, 2))
    kept = set(np.argsort(-size, kind="stable")[:_MOST_TASKS].tolist())
    return [task for place, task in enumerate(usage.tasks) if place in kept]


def _bits(axis: Any, usage: ExpertUsage) -> None:
    """Bars beside the heatmaps, block for block."""
    places = range(len(usage.blocks))
    axis.barh(places, usage.bits, color=COLORS[0], height=0.8)
    if usage.information:
        noise = [usage.information[block].noise for block in usage.blocks]
        axis.plot(noise, places, color=COLORS[1], linewidth=1, label="chance, 95 %")
        axis.legend(fontsize=6, frameon=False, loc="upper right")
    axis.set_ylim(len(usage.blocks) - 0.5, -0.5)
    axis.set_xlim(min(0.0, *usage.bits), max(0.01, 1.45 * max(usage.bits)))
    name_ticks(axis, "y", usage.blocks)
    label(axis, "task information", "bits")


def _bits_in_words(usage: ExpertUsage) -> str:
    if not usage.information:
        return ""
    best = int(np.argmax(usage.bits))
    above = sum(found.bits > found.noise for found in usage.information.values())
    return (
        f"The expert of a jump says most about the task in block {usage.blocks[best]}: {usage.bits[best]:.3f} of "
        f"{np.log2(len(usage.tasks)):.2f} bits; {above} of {len(usage.blocks)} routers say more than 95 % of the "
        "shuffles."
    )
