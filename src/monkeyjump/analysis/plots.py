"""Figures of expert usage: by task, before and after training, task against task, and the health of the routing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from monkeyjump.analysis import style
from monkeyjump.analysis.style import COLORS, GREY, Drawing, label, name_ticks
from monkeyjump.analysis.usage import ExpertUsage
from monkeyjump.errors import ConfigError

Centers = Mapping[str, Any]  # centres by the path of their projection
_SHIFT = 10  # percentage points of a share that count as a shift
_MOST_TASKS = 18  # panels of deviations; of more tasks those are drawn that deviate most


def plot_usage(usage: ExpertUsage, path: Path, title: str = "Where tokens jump") -> Path:
    """The picture of usage that a training writes beside its adapter."""
    figure = draw_usage(usage, title).figure
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path


def draw_usage(usage: ExpertUsage, title: str = "Where tokens jump", of: str = "task") -> Drawing:
    """The mean share of each expert, how each task deviates from it, and what an expert says about the task.

    Of a model that reads pictures, the shares of each kind of token come after the mean. `of` is what the loads of the
    usage belong to, if not to tasks.
    """
    if not usage.tasks:
        raise ConfigError(
            "usage has no task with a recorded token, so that there is nothing to draw.", title="no picture"
        )
    shares, deviations, several = usage.shares, usage.deviations, len(usage.tasks) > 1
    kinds = {} if usage.kinds is None else dict(zip(usage.kinds.tasks, usage.kinds.shares, strict=True))
    first = {f"mean of the {of}s" if several else usage.tasks[0]: shares.mean(0)}
    first |= {f"{kind} tokens": values for kind, values in kinds.items()}
    size = np.nanmax(np.abs(deviations), axis=(1, 2))
    kept = np.argsort(-size, kind="stable")[:_MOST_TASKS].tolist() if several else []
    shown = [usage.tasks[place] for place in sorted(kept)]
    largest = float(np.nanmax(np.abs(deviations)))
    findings = [f"largest deviation from the mean of the {of}s: {largest:.1f} points"] if several else []
    height = min(9.0, max(2.6, 0.13 * len(usage.blocks) + 1.0))
    panels = len(first) + len(shown) + bool(usage.information)
    width = max(1.75, 0.08 * max(map(len, (*first, *shown))) + 0.4)
    figure, axes = style.grid(panels, width, height, "\n".join([title, *findings]))
    brightest = max(0.5, *(float(np.nanmax(values)) for values in (shares, *kinds.values())))
    for axis, (name, values) in zip(axes, first.items(), strict=False):
        image = style.heatmap(axis, values, usage.blocks, usage.experts, (0, brightest))
        label(axis, name)
    style.color_bar(figure, axes, image, "share of jumps")
    limit = max(largest, 10.0)  # the colours of a picture without differences do not magnify rounding errors
    for axis, task in zip(axes[len(first) :], shown, strict=False):
        deviation = deviations[usage.tasks.index(task)]
        image = style.heatmap(axis, deviation, usage.blocks, usage.experts, (-limit, limit))
        label(axis, task)
    if several:
        style.color_bar(figure, axes, image, "deviation, percentage points")
    if usage.information:
        findings.append(_draw_bits(axes[-1], usage))
    for axis in axes:
        if axis.get_subplotspec().is_first_col():
            axis.set_ylabel("block", fontsize=8)
    rows = [
        [usage.tasks[t], usage.blocks[b], usage.experts[e], share, deviations[t, b, e], usage.bits[b]]
        for (t, b, e), share in np.ndenumerate(shares)
        if not np.isnan(share)
    ]
    columns = [of, "block", "expert", "share", "deviation in points", "task bits of the block"]
    return Drawing("usage", figure, columns, rows, findings, usage.to_dict(), {"of": of})


def _draw_bits(axis: Any, usage: ExpertUsage) -> str:
    """Bars beside the heatmaps, block for block, and what they say."""
    places, found = range(len(usage.blocks)), [usage.information[block] for block in usage.blocks]
    axis.barh(places, usage.bits, color=COLORS[0], height=0.8)
    axis.plot([each.noise for each in found], places, color=COLORS[1], linewidth=1)
    axis.set_ylim(len(usage.blocks) - 0.5, -0.5)
    axis.set_xlim(min(0.0, *usage.bits), max(0.01, 1.1 * max(usage.bits)))
    name_ticks(axis, "y", usage.blocks)
    style.few_ticks(axis, "x")
    label(axis, "task information", "bits (line: chance)")
    best, above = int(np.argmax(usage.bits)), sum(each.bits > each.noise for each in found)
    return (
        f"The expert of a jump says most about the task in block {usage.blocks[best]}: {usage.bits[best]:.3f} of "
        f"{np.log2(len(usage.tasks)):.2f} bits; {above} of {len(found)} routers say more than 95 % of the shuffles."
    )


def draw_before_after(before: ExpertUsage, after: ExpertUsage, start: str) -> Drawing:
    """Shares of every expert by block before and after training, with their correlation; shifted blocks are marked."""
    experts, blocks, rows, correlations = after.experts, after.blocks, list[list[Any]](), dict[str, float]()
    figure, axes = style.grid(len(experts), 3.3, 2.7, "Usage before and after training", most=4)
    both = 100 * before.shares.mean(0), 100 * after.shares.mean(0)
    for axis, expert, x, y in zip(axes, experts, *(values.T for values in both), strict=True):
        known = ~np.isnan(x)
        varies = known.sum() > 2 and x[known].std() > 0 and y[known].std() > 0
        correlations[expert] = float(np.corrcoef(x[known], y[known])[0, 1]) if varies else float("nan")
        shifted = np.abs(y - x) > _SHIFT
        for number, block in enumerate(np.flatnonzero(shifted)):
            words = "" if number else f"moved by more than {_SHIFT} points"
            axis.axvspan(block - 0.5, block + 0.5, color=GREY, alpha=0.25, linewidth=0, label=words)
        axis.plot(x, "o-", ms=3, lw=1, color=COLORS[0], label="before")
        axis.plot(y, "s-", ms=3, lw=1, color=COLORS[1], label="after")
        axis.set_ylim(0, 1.45 * max(np.nanmax(x), np.nanmax(y), 1))
        title = f"{expert}, r = {correlations[expert]:.2f}" if varies else expert
        label(axis, title, "block", "share of jumps, %", legend=True)
        name_ticks(axis, "x", blocks, most=10)
        rows += [[blocks[b], expert, x[b], y[b], bool(shifted[b])] for b in np.flatnonzero(known)]
    moved = len({row[0] for row in rows if row[4]})
    finding = f"{moved} of {len(blocks)} blocks moved by more than {_SHIFT} points for some expert."
    columns = ["block", "expert", "before, %", "after, %", "shifted"]
    return Drawing(
        "before-after", figure, columns, rows, [finding], {"correlations": correlations}, words={"start": start}
    )


def draw_similarity(usage: ExpertUsage) -> Drawing:
    """Tasks against tasks by what distinguishes their routing, in the order of a clustering."""
    from scipy.cluster.hierarchy import dendrogram, linkage

    profiles = usage.deviations.reshape(len(usage.tasks), -1)
    profiles = profiles[:, ~np.isnan(profiles).any(0)]
    unit = profiles / np.maximum(np.linalg.norm(profiles, axis=1, keepdims=True), 1e-12)
    similarity = np.clip(unit @ unit.T, -1, 1)
    tree = linkage((1 - similarity)[np.triu_indices(len(usage.tasks), 1)], "average")
    size = max(3.4, 0.32 * len(usage.tasks) + 1.8)
    figure = style.new_figure(size + 2.0, size, "Which tasks are routed alike")
    left, right = figure.subplots(1, 2, width_ratios=[1, 3])
    order = dendrogram(tree, ax=left, orientation="left", no_labels=True, color_threshold=0, above_threshold_color=GREY)
    leaves = order["leaves"][::-1]
    tasks, ordered = [usage.tasks[leaf] for leaf in leaves], similarity[np.ix_(leaves, leaves)]
    left.axis("off")
    image = style.heatmap(right, ordered, tasks, tasks, (-1, 1))
    for which in "xy":
        name_ticks(right, which, tasks, most=60)
    style.color_bar(figure, [left, right], image, "cosine of deviations")
    rows = [[task, *row] for task, row in zip(tasks, ordered.tolist(), strict=True)]
    return Drawing("similarity", figure, ["task", *tasks], rows)


def draw_health(usage: ExpertUsage) -> Drawing:
    """Gate entropy, evenness of the load, and dead experts of every block."""
    blocks, experts = usage.blocks, len(usage.experts)
    entropy = np.array([[usage.gate_entropy[task][block] for block in blocks] for task in usage.tasks]).mean(0)
    balance = np.array([[usage.loads[task][block].entropy for block in blocks] for task in usage.tasks]).mean(0)
    dead = np.array([len(usage.dead_experts[block]) for block in blocks])
    figure, axes = style.grid(3, 3.2, 2.7, "Health of the routing")
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
    style.few_ticks(axes[2], "y", whole=True)
    means = (
        f"Mean gate entropy {entropy.mean():.2f} bits, mean evenness {balance.mean():.2f}, {dead.sum()} dead experts."
    )
    rows = [list(row) for row in zip(blocks, entropy.tolist(), balance.tolist(), dead.tolist(), strict=True)]
    return Drawing("health", figure, ["block", "gate entropy, bits", "evenness", "dead experts"], rows, [means])


def draw_drift(first: Centers, last: Centers, checkpoints: Mapping[int, Centers], start: str) -> Drawing:
    """How far centres moved: by block and expert from start to end, and over the steps of training."""
    paths = list(last)
    steps = {
        step: [_cosine(first[path], found[path]) for path in paths]
        for step, found in checkpoints.items()
        if all(path in found for path in paths)  # the folder may hold checkpoints of another method
    }
    final = [_cosine(first[path], last[path]) for path in paths]
    figure, axes = style.grid(1 + bool(steps), 4.2, 3.0, "Drift of the centres from where they began")
    for place, expert in enumerate(dict.fromkeys(path.rpartition(".")[2] for path in paths)):
        own = [value for path, value in zip(paths, final, strict=True) if path.endswith(f".{expert}")]
        axes[0].plot(own, "osD^vPX"[place % 7], ms=4, color=COLORS[place % len(COLORS)], label=expert)
    label(axes[0], "from start to end", "routed blocks, in order", "cosine", legend=True)
    if steps:
        drawn = {0: [1.0], **steps}
        low, mean, high = ([float(how(values)) for values in drawn.values()] for how in (np.min, np.mean, np.max))
        axes[1].fill_between(list(drawn), low, high, color=COLORS[0], alpha=0.2, linewidth=0)
        axes[1].plot(list(drawn), mean, "o-", ms=4, color=COLORS[0])
        label(axes[1], "mean and range over all centres", "step", "cosine")
    rows = [list(row) for row in zip(paths, final, *steps.values(), strict=True)]
    finding = f"Mean cosine of first and last centres: {np.mean(final):.3f}."
    columns = ["projection", "end", *(f"step {step}" for step in steps)]
    return Drawing("drift", figure, columns, rows, [finding], words={"start": start})


def _cosine(a: Any, b: Any) -> float:
    return float((a * b).sum() / (a.norm() * b.norm()).clamp_min(1e-12))
