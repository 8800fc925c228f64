"""Experts that no token jumps to get a second chance: their centres are put beside the one that most tokens jump to."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from monkeyjump.tuner.model import require_context
from monkeyjump.tuner.trace import staged_load

NEARBY = 0.05  # of the length of the busiest centre: near enough to share its tokens, far enough to divide them


@torch.no_grad()
def revive_experts(
    model: nn.Module, experts: Mapping[str, Sequence[str]], adapter_name: str = "default", seed: int = 0
) -> None:
    """Move the centres of these experts, named by block as in a trace. All ranks move them alike."""
    loads = staged_load(model, adapter_name)
    for router in require_context(model).routers():
        if router.key not in experts or adapter_name not in router.layers:
            continue
        names, layers = router.names[adapter_name], router.layers[adapter_name]
        # one row for each expert, in the order of their names; an adapter whose ranks are experts has several
        own = [layer.monkeyjump_center[adapter_name] for layer in layers]
        centers = [row for center in own for row in center.view(-1, center.shape[-1])]
        share = loads[router.key].share
        busiest = centers[share.index(max(share))].clone()
        groups = router.configs[adapter_name].groups or len(names)
        for place in map(names.index, experts[router.key]):
            first = names[place % groups]  # of its group, whose experts have one centre
            generator = torch.Generator().manual_seed(seed + zlib.crc32(f"{router.key}/{first}".encode()))
            step = nn.functional.normalize(torch.randn(len(busiest), generator=generator), dim=0).to(busiest)
            centers[place].copy_(busiest + NEARBY * busiest.norm() * step)
