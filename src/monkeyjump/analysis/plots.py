"""Figures of expert usage: by task, before and after training, task against task, and the health of the routing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from monkeyjump.analysis.style import (
    COLORS,
    GREY,
    Drawing,
    color_bar,
    few_ticks,
    grid,
    heatmap,
    label,
    name_ticks,
    new_figure,
)
from monkeyjump.analysis.usage import ExpertUsage
from monkeyjump.errors import ConfigError

Centers = Mapping[str, Any]  # centres by the path of their projection
_SHIFT = 10  # percentage points of a share that count as a shift
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
    height = min(9.0, max(2.6, 0.13 * len(usage.blocks) + 1.0))
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
        axis.plot(noise, places, color=COLORS[1], linewidth=1)
    axis.set_ylim(len(usage.blocks) - 0.5, -0.5)
    axis.set_xlim(min(0.0, *usage.bits), max(0.01, 1.1 * max(usage.bits)))
    name_ticks(axis, "y", usage.blocks)
    few_ticks(axis, "x")
    label(axis, "task information", "bits (line: chance)")


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


def draw_before_after(before: ExpertUsage, after: ExpertUsage, words: str) -> Drawing:
    """Shares of every expert by block before and after training, with their correlation; shifted blocks are marked."""
    experts, blocks = after.experts, after.blocks
    old, new = before.shares.mean(0), after.shares.mean(0)
    figure, axes = grid(len(experts), 3.3, 2.7, "Usage before and after training", most=4)
    rows: list[list[Any]] = []
    correlations = {}
    for axis, (place, expert) in zip(axes, enumerate(experts), strict=True):
        x, y = 100 * old[:, place], 100 * new[:, place]
        known = ~np.isnan(x) & ~np.isnan(y)
        varies = known.sum() > 2 and x[known].std() > 0 and y[known].std() > 0
        correlations[expert] = float(np.corrcoef(x[known], y[known])[0, 1]) if varies else float("nan")
        shifted = [b for b in range(len(blocks)) if abs(y[b] - x[b]) > _SHIFT]
        for number, block in enumerate(shifted):
            words_ = f"moved by more than {_SHIFT} points" if number == 0 else None
            axis.axvspan(block - 0.5, block + 0.5, color=GREY, alpha=0.25, linewidth=0, label=words_)
        axis.plot(x, "o-", ms=3, lw=1, color=COLORS[0], label="before")
        axis.plot(y, "s-", ms=3, lw=1, color=COLORS[1], label="after")
        axis.set_ylim(0, 1.45 * max(np.nanmax(x), np.nanmax(y), 1))
        label(axis, f"{expert}, r = {correlations[expert]:.2f}", "block", "share of jumps, %", legend=True)
        name_ticks(axis, "x", blocks, most=10)
        rows += [[block, expert, x[b], y[b], b in shifted] for b, block in enumerate(blocks) if known[b]]
    moved = {row[0] for row in rows if row[4]}
    return Drawing(
        "before-after",
        "Usage before and after training",
        f"Shares of the jumps, mean over tasks. Before: adapters that add nothing and centres by {words}. r is the "
        "correlation over blocks; it is high where training kept the structure of the routing.",
        figure,
        ["block", "expert", "before, %", "after, %", "shifted"],
        rows,
        {"correlations": correlations, "before": words},
        [f"{len(moved)} of {len(blocks)} blocks moved by more than {_SHIFT} points for some expert."],
    )


def draw_similarity(usage: ExpertUsage) -> Drawing:
    """Tasks against tasks by what distinguishes their routing, in the order of a clustering."""
    from scipy.cluster.hierarchy import dendrogram, linkage

    profiles = usage.deviations.reshape(len(usage.tasks), -1)
    profiles = profiles[:, ~np.isnan(profiles).any(0)]
    unit = profiles / np.maximum(np.linalg.norm(profiles, axis=1, keepdims=True), 1e-12)
    similarity = np.clip(unit @ unit.T, -1, 1)
    distances = (1 - similarity)[np.triu_indices(len(usage.tasks), 1)]
    tree = linkage(distances, "average")
    size = max(3.4, 0.32 * len(usage.tasks) + 1.8)
    figure = new_figure(size + 2.0, size, "Which tasks are routed alike")
    left, right = figure.subplots(1, 2, width_ratios=[1, 3])
    order = dendrogram(tree, ax=left, orientation="left", no_labels=True, color_threshold=0, above_threshold_color=GREY)
    leaves = order["leaves"][::-1]
    tasks = [usage.tasks[leaf] for leaf in leaves]
    left.axis("off")
    image = heatmap(right, similarity[np.ix_(leaves, leaves)], tasks, tasks, (-1, 1))
    name_ticks(right, "x", tasks, most=60)
    name_ticks(right, "y", tasks, most=60)
    color_bar(figure, [left, right], image, "cosine of deviations")
    return Drawing(
        "similarity",
        "Projection preference of similar tasks",
        "The deviations of two tasks from the mean routing, over all blocks and experts, are compared by their cosine: "
        "1 where both prefer the same experts in the same blocks, -1 where they prefer opposite ones. With few tasks "
        "the deviations sum to zero, so that some pairs must be opposite; and where deviations are noise, so is this.",
        figure,
        ["task", *tasks],
        [[task, *similarity[leaf, leaves].tolist()] for task, leaf in zip(tasks, leaves, strict=True)],
    )


def draw_health(usage: ExpertUsage) -> Drawing:
    """Gate entropy, evenness of the load, and dead experts of every block."""
    blocks, experts = usage.blocks, len(usage.experts)
    entropy = np.array([[usage.gate_entropy[task][block] for block in blocks] for task in usage.tasks]).mean(0)
    balance = np.array([[usage.loads[task][block].entropy for block in blocks] for task in usage.tasks]).mean(0)
    dead = [len(usage.dead_experts[block]) for block in blocks]
    figure, axes = grid(3, 3.2, 2.7, "Health of the routing")
    panels = (
        (entropy, "entropy of a token's gates", "bits", np.log2(max(2, experts))),
        (balance, "evenness of the load", "1: all experts get the same", 1.0),
        (dead, "dead experts", "experts that no token goes to", max(1, experts)),
    )
    for axis, (values, title, y, most) in zip(axes, panels, strict=True):
        axis.bar(range(len(blocks)), values, color=COLORS[0])
        axis.axhline(most, color=GREY, linestyle="--", linewidth=1)
        axis.set_ylim(0, 1.1 * most)
        label(axis, title, "block", y)
        name_ticks(axis, "x", blocks, most=10)
    few_ticks(axes[2], "y", whole=True)
    return Drawing(
        "health",
        "Health of the routing",
        "Gates of low entropy are sharp choices; at the entropy of the chosen experts (1 bit for two) routing is a "
        "constant factor on them. A load of evenness 1 gives every expert the same number of jumps. Dashed lines are "
        "the most that is possible.",
        figure,
        ["block", "gate entropy, bits", "evenness", "dead experts"],
        [list(row) for row in zip(blocks, entropy.tolist(), balance.tolist(), dead, strict=True)],
        findings=[
            f"Mean gate entropy {entropy.mean():.2f} bits, evenness {balance.mean():.2f}, {sum(dead)} dead experts."
        ],
    )


def draw_drift(first: Centers, last: Centers, checkpoints: Mapping[int, Centers], words: str) -> Drawing:
    """How far centres moved: by block and expert from start to end, and over the steps of training."""
    paths = [path for path in last if path in first]
    final = {path: _cosine(first[path], last[path]) for path in paths}
    experts = list(dict.fromkeys(path.rpartition(".")[2] for path in paths))
    series = {expert: [final[path] for path in paths if path.endswith(f".{expert}")] for expert in experts}
    steps = {step: [_cosine(first[p], found[p]) for p in paths if p in found] for step, found in checkpoints.items()}
    figure, axes = grid(1 + bool(steps), 4.2, 3.0, "Drift of the centres from where they began")
    for place, (expert, values) in enumerate(series.items()):
        axes[0].plot(values, "osD^vPX"[place % 7], ms=4, color=COLORS[place % len(COLORS)], label=expert)
    label(axes[0], "from start to end", "routed blocks, in order", "cosine", legend=True)
    if steps:
        drawn = [(0, [1.0]), *steps.items()]
        low, mean, high = ([float(how(values)) for _, values in drawn] for how in (np.min, np.mean, np.max))
        axes[1].fill_between([step for step, _ in drawn], low, high, color=COLORS[0], alpha=0.2, linewidth=0)
        axes[1].plot([step for step, _ in drawn], mean, "o-", ms=4, color=COLORS[0])
        label(axes[1], "mean and range over all centres", "step", "cosine")
    return Drawing(
        "drift",
        "Drift of the centres",
        f"The cosine between a centre at the start ({words}) and later: 1 means that it has not turned.",
        figure,
        ["projection", "end", *(f"step {step}" for step in checkpoints)],
        [
            [path, final[path], *(_cosine(first[path], found[path]) for found in checkpoints.values() if path in found)]
            for path in paths
        ],
        findings=[f"Mean cosine of first and last centres: {np.mean(list(final.values())):.3f}."],
    )


def _cosine(a: Any, b: Any) -> float:
    return float((a * b).sum() / (a.norm() * b.norm()).clamp_min(1e-12))


def draw_comparison(usages: Sequence[ExpertUsage], names: Sequence[str]) -> Drawing:
    """Two adapters: the mean shares of both, their difference and the task information of both."""
    one, two = (usage.shares.mean(0) for usage in usages)
    blocks, experts = usages[0].blocks, usages[0].experts
    height = min(9.0, max(2.8, 0.13 * len(blocks) + 1.2))
    figure, axes = grid(4, 2.3, height, "Two adapters, mean over tasks")
    for axis, values, name in zip(axes, (one, two), names, strict=False):
        image = heatmap(axis, values, blocks, experts, (0, max(0.5, float(np.nanmax([one, two])))))
        label(axis, name, y="block")
    color_bar(figure, axes[:2], image, "share of jumps")
    difference = 100 * (two - one)
    limit = max(10.0, float(np.nanmax(np.abs(difference))))
    color_bar(figure, axes[2], heatmap(axes[2], difference, blocks, experts, (-limit, limit)), "points")
    label(axes[2], "second minus first")
    for place, (usage, name) in enumerate(zip(usages, names, strict=True)):
        axes[3].plot(usage.bits, range(len(blocks)), "os"[place] + "-", ms=3, lw=1, color=COLORS[place], label=name)
    axes[3].set_ylim(len(blocks) - 0.5, -0.5)
    few_ticks(axes[3], "x")
    label(axes[3], "task information", "bits", legend=True)
    name_ticks(axes[3], "y", blocks)
    return Drawing(
        "comparison",
        "Two adapters beside each other",
        "Mean shares of the jumps of both, the difference in percentage points, and the bits that an expert says about "
        "the task.",
        figure,
        ["block", "expert", "first", "second", "difference in points"],
        [
            [block, expert, one[b, e], two[b, e], difference[b, e]]
            for b, block in enumerate(blocks)
            for e, expert in enumerate(experts)
            if not np.isnan(one[b, e])
        ],
        findings=[f"Largest difference of a share: {np.nanmax(np.abs(difference)):.1f} points."],
    )
