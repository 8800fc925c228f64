"""Plots of expert usage."""

from __future__ import annotations

from pathlib import Path

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
    """One panel per task: blocks down, routed projections across, colour = share of the block's jumps."""
    pyplot = _pyplot()
    tasks, blocks = usage.tasks, usage.blocks
    columns = min(len(tasks), 5)
    rows = -(-len(tasks) // columns)
    height = max(2.6, 0.16 * len(blocks) + 1.0)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(1.9 * columns + 1.2, height * rows), squeeze=False, sharey=True, layout="constrained"
    )
    image = None
    brightest = max(0.5, *(max(load.share) for loads in usage.loads.values() for load in loads.values()))
    for position, axis in enumerate(axes.flat):
        if position >= len(tasks):
            axis.axis("off")
            continue
        loads = [usage.loads[tasks[position]][block] for block in blocks]
        experts = loads[0].experts
        shares = [
            [dict(zip(load.experts, load.share, strict=True)).get(name, 0.0) for name in experts] for load in loads
        ]
        image = axis.imshow(shares, aspect="auto", vmin=0, vmax=brightest, cmap="viridis")
        axis.set_title(tasks[position], fontsize=9, parse_math=False)  # a name may hold dollar signs
        axis.set_xticks(range(len(experts)), [name.removesuffix("_proj") for name in experts], fontsize=8)
        ticks = range(0, len(blocks), max(1, len(blocks) // 10))
        axis.set_yticks(list(ticks), [blocks[i] for i in ticks], fontsize=7)
        if position % columns == 0:
            axis.set_ylabel("block", fontsize=8)
    if image is not None:
        bar = figure.colorbar(image, ax=axes, shrink=0.7)
        bar.set_label("share of jumps", fontsize=8)
        bar.ax.tick_params(labelsize=7)
    figure.suptitle(title, fontsize=11, parse_math=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path
