"""Which experts the tokens of each task go to, block by block, as numbers and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from monkeyjump.errors import ConfigError
from monkeyjump.tuner.trace import ExpertLoad, record_routing


@dataclass
class ExpertUsage:
    """Loads by task and block: `loads[task][block]`."""

    loads: dict[str, dict[str, ExpertLoad]]

    @property
    def tasks(self) -> list[str]:
        return list(self.loads)

    @property
    def blocks(self) -> list[str]:
        return list(next(iter(self.loads.values()), {}))

    @property
    def mean_gate(self) -> float:
        """Over all tasks, blocks and experts, zeros included: the constant gate of the same strength."""
        values = [gate for loads in self.loads.values() for load in loads.values() for gate in load.mean_gate]
        return sum(values) / len(values) if values else 1.0

    @property
    def dead(self) -> int:
        """Experts that no token of any task went to."""
        count = 0
        for block in self.blocks:
            shares = [self.loads[task][block].share for task in self.tasks]
            count += sum(all(share[i] == 0 for share in shares) for i in range(len(shares[0])))
        return count

    def to_dict(self) -> dict[str, Any]:
        return {
            "mean_gate": self.mean_gate,
            "dead_experts": self.dead,
            "loads": asdict(self)["loads"],
        }


@torch.no_grad()
def expert_usage(model: nn.Module, batches: Mapping[str, Sequence[dict[str, torch.Tensor]]]) -> ExpertUsage:
    """Run the batches of each task through the model and count where their tokens went."""
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    loads = {}
    for task, task_batches in batches.items():
        with record_routing(model) as trace:
            for batch in task_batches:
                model(**{key: value.to(device) for key, value in batch.items()})
        loads[task] = {block: trace.load(block) for block in trace.blocks()}
    model.train(was_training)
    return ExpertUsage(loads)


def plot_usage(usage: ExpertUsage, path: Path, title: str = "Where tokens jump") -> Path:
    """One panel per task: blocks down, routed projections across, colour = share of the block's jumps."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigError('pictures need matplotlib: pip install "monkeyjump[cli]".', title="missing package") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

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
