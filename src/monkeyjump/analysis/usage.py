"""Which experts the tokens of each task go to, block by block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from monkeyjump.tuner.centers.sample import forward_inputs
from monkeyjump.tuner.trace import ExpertLoad, record_routing


@dataclass
class ExpertUsage:
    """Loads by task and block, `loads[task][block]`; of a model that reads pictures also by kind of token."""

    loads: dict[str, dict[str, ExpertLoad]]
    kinds: ExpertUsage | None = None  # the same with kinds of tokens in the place of tasks

    @property
    def tasks(self) -> list[str]:
        return list(self.loads)

    @property
    def blocks(self) -> list[str]:
        return list(next(iter(self.loads.values()), {}))

    @property
    def experts(self) -> list[str]:
        """The routed projections of all blocks, in the order in which they first occur."""
        return list(
            dict.fromkeys(name for loads in self.loads.values() for load in loads.values() for name in load.experts)
        )

    @property
    def shares(self) -> npt.NDArray[np.float64]:
        """The part of a block's jumps that went to each expert, [tasks, blocks, experts]; NaN if a block lacks it."""
        experts, missing = self.experts, float("nan")
        tables = [
            [dict(zip(load.experts, load.share, strict=True)) for load in loads.values()]
            for loads in self.loads.values()
        ]
        return np.array([[[share.get(name, missing) for name in experts] for share in table] for table in tables])

    @property
    def deviations(self) -> npt.NDArray[np.float64]:
        """The shares of each task minus their mean over tasks, in percentage points: [tasks, blocks, experts]."""
        shares = self.shares
        return 100 * (shares - shares.mean(0))

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
            **({} if self.kinds is None else {"kinds": asdict(self.kinds)["loads"]}),
        }


@torch.no_grad()
def expert_usage(model: nn.Module, batches: Mapping[str, Sequence[dict[str, torch.Tensor]]]) -> ExpertUsage:
    """Run the batches of each task through the model and count where their tokens went."""
    device, base = next(model.parameters()).device, getattr(model, "get_base_model", lambda: model)()
    decoder_only = not getattr(getattr(base, "config", None), "is_encoder_decoder", False)
    was_training = model.training
    model.eval()
    loads, by_kind = {}, dict[str, list[dict[str, ExpertLoad]]]()
    for task, task_batches in batches.items():
        if not task_batches:  # a task without a row that fits went nowhere
            continue
        with record_routing(model) as trace:
            for batch in task_batches:
                inputs = forward_inputs(base, batch, device)
                # prompt_lengths say where prompts end; labels say it too, but they ask for the logits of all tokens
                inputs.pop("labels" if "prompt_lengths" in inputs and decoder_only else "logits_to_keep", None)
                model(**inputs)
        loads[task] = {block: trace.load(block) for block in trace.blocks()}
        for kind in trace.kinds():
            by_kind.setdefault(kind, []).append({block: trace.load(block, kind=kind) for block in trace.blocks()})
    model.train(was_training)
    kinds = {kind: _mean(found) for kind, found in by_kind.items()}
    return ExpertUsage(loads, ExpertUsage(kinds) if kinds else None)


def _mean(found: list[dict[str, ExpertLoad]]) -> dict[str, ExpertLoad]:
    """The mean over tasks, block by block."""

    def mean(rows: list[list[float]]) -> list[float]:
        return np.mean(rows, 0).tolist()

    return {
        block: ExpertLoad(
            load.experts,
            mean([loads[block].share for loads in found]),
            mean([loads[block].mean_gate for loads in found]),
        )
        for block, load in found[0].items()
    }
