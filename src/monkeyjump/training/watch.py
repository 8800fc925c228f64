"""What is seen of routing while a model trains: loads, how far centres have moved, and experts that die."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from monkeyjump.config import MonkeyJumpConfig
from monkeyjump.errors import MonkeyJumpWarning
from monkeyjump.training.progress import is_main_rank
from monkeyjump.tuner.context import RoutingContext
from monkeyjump.tuner.trace import ExpertLoad, staged_load

LOOKS = 3  # in a row before a warning: a batch of one task may well pass by an expert
EVERYTHING = 0.98  # of a block's jumps
NAMED = 4  # in one warning


class RoutingWatch:
    """Looks at the routing of a model in the steps that are logged. Centres drift from where they were at the start."""

    def __init__(self, model: Any, context: RoutingContext) -> None:
        self._model, self._context = model, context
        self._start = self._centers()
        self._in_a_row = Counter[tuple[str, str]]()

    def look(self) -> dict[str, float]:
        """What the log says of the last training forward."""
        shown = dict[str, float]()
        for name, config in self._adapters().items():
            loads = {block: load for block, load in staged_load(self._model, name).items() if sum(load.share)}
            if loads:
                shown["router/load_entropy"] = round(sum(load.entropy for load in loads.values()) / len(loads), 4)
                shown["router/largest_share"] = round(max(max(load.share) for load in loads.values()), 4)
                shown["router/dead_experts"] = sum(len(load.dead) for load in loads.values())
                self._warn(loads, config)
        drifts = [
            1 - functional.cosine_similarity(before, now, dim=-1).flatten()
            for before, now in zip(self._start, self._centers(), strict=True)
        ]
        if drifts:
            shown["router/center_drift"] = round(float(torch.cat(drifts).mean()), 4)
        for name, loss in self._context.losses.last.items():  # of the last micro-batch, without their weights
            shown[f"router/{name}_loss"] = round(float(loss), 4)
        return shown

    def _adapters(self) -> dict[str, MonkeyJumpConfig]:
        return {name: config for blocks in self._context.lists.values() for name, config in blocks.active().items()}

    def _centers(self) -> list[Tensor]:
        """Copies of all centres: one tensor for the routed projections of each block."""
        names = [name for name, config in self._adapters().items() if config.uses_centers]
        layers = [
            (name, router.layers[name]) for router in self._context.routers() for name in names if name in router.layers
        ]
        return [torch.stack([layer.monkeyjump_center[name] for layer in own]) for name, own in layers]

    def _warn(self, loads: dict[str, ExpertLoad], config: MonkeyJumpConfig) -> None:
        """Say once that experts get nothing, or that a block sends all tokens to the same ones."""
        dead, crowded = [], []
        for block, load in loads.items():
            kept = min(config.top_k or len(load.share), len(load.share) - 1)
            strongest = sorted(zip(load.share, load.experts, strict=True), reverse=True)[: max(1, kept)]
            full = len(load.share) > 1 and sum(share for share, _ in strongest) >= EVERYTHING
            taken = ", ".join(expert for _, expert in strongest)
            if self._lasts((block, ""), full):
                crowded.append(f"{block} ({taken})")
            for expert in load.experts:
                if self._lasts((block, expert), expert in load.dead) and not full:
                    dead.append(f"{block} {expert}")
        _say(dead, "expert{s} got no token in the last {looks} steps that were logged")
        _say(crowded, "block{s} sent all tokens to the same experts in the last {looks} steps that were logged")

    def _lasts(self, key: tuple[str, str], holds: bool) -> bool:
        """Whether something holds for the third time in a row; later times are not news."""
        self._in_a_row[key] = self._in_a_row[key] + 1 if holds else 0
        return self._in_a_row[key] == LOOKS


def _say(found: list[str], what: str) -> None:
    if found and is_main_rank():
        more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
        what = what.format(looks=LOOKS, s="" if len(found) == 1 else "s")
        warnings.warn(f"{len(found)} {what}: {', '.join(found[:NAMED])}{more}.", MonkeyJumpWarning, stacklevel=2)
