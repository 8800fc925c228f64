"""The centroid router: tokens against one centre per projection, no parameters and no gradients.

Shapes: B batch, T tokens, D hidden width, E routed projections of the block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from monkeyjump.config import MonkeyJumpConfig
from monkeyjump.ops import dispatch
from monkeyjump.ops import reference as ops
from monkeyjump.routing.granularity import Selection, pool_rows


@dataclass
class Decision:
    """What a router decided for one block: `gates` apply to the tokens, `sums` and `counts` feed the EMA."""

    gates: torch.Tensor  # [B, T, E], or [B, 1, E] when a whole row shares one decision
    sums: torch.Tensor | None = None  # [E, D]
    counts: torch.Tensor | None = None  # [E]


@dataclass(frozen=True)
class Staged:
    """Where the sums [D] and counts [] of each expert wait for the next commit."""

    sums: list[torch.Tensor]
    counts: list[torch.Tensor]

    def write(self, decision: Decision) -> None:
        assert decision.sums is not None
        assert decision.counts is not None
        torch._foreach_copy_(self.sums, list(decision.sums.unbind()))
        torch._foreach_copy_(self.counts, list(decision.counts.unbind()))


@torch.no_grad()
def decide(
    h: torch.Tensor,
    centers: Sequence[torch.Tensor] | torch.Tensor,
    mean: torch.Tensor | None,
    selection: Selection,
    config: MonkeyJumpConfig,
    *,
    training: bool = False,
    with_statistics: bool = False,
    into: Staged | None = None,
) -> Decision:
    """Gates of the routed projections for the tokens h [B, T, D] that enter a block, from their E centres [D].

    Autocast is off: similarities of nearly parallel vectors need fp32. Noise changes the gates only; the statistics
    that move the centres follow the clean assignment. With `into` these are written there and not returned.
    """
    if torch.is_autocast_enabled(h.device.type):
        with torch.autocast(h.device.type, enabled=False):
            return decide(
                h, centers, mean, selection, config, training=training, with_statistics=with_statistics, into=into
            )
    if _in_one_kernel(h, centers, mean, selection, config, training):
        return _fused(h, centers, selection.queries, config, with_statistics, into)
    decision = _composed(h, centers, mean, selection, config, training, with_statistics or into is not None)
    if into is not None:
        into.write(decision)
    return decision


def _composed(
    h: torch.Tensor,
    centers: Sequence[torch.Tensor] | torch.Tensor,
    mean: torch.Tensor | None,
    selection: Selection,
    config: MonkeyJumpConfig,
    training: bool,
    with_statistics: bool,
) -> Decision:
    """The decision by the reference ops, which know every way of routing."""
    if selection.pool is not None:
        h = pool_rows(h, selection.mask, selection.pool)
    u = ops.features(h, mean, normalize=config.ema_space == "normalized")
    logits = ops.similarity_logits(u, torch.stack(list(centers)), config.similarity)
    noisy = logits + config.jitter * torch.randn_like(logits) if training and config.jitter > 0 else logits
    gates = ops.gates(noisy, config.top_k, config.temperature, config.renormalize)
    if config.mean_gate is not None:
        gates = gates * (config.mean_gate / gates.mean(-1, keepdim=True).clamp_min(ops.EPS))
    if selection.source is not None:
        gates = gates.gather(1, selection.source.to(h.device).unsqueeze(-1).expand(-1, -1, gates.shape[-1]))
    if not with_statistics:
        return Decision(gates)
    members = ops.top_k_mask(logits, 1 if config.ema_assign == "top1" else config.top_k)
    queries = None if selection.queries is None else selection.queries.to(h.device)
    return Decision(gates, *ops.cluster_sums(u, members, queries))


def _in_one_kernel(
    h: torch.Tensor,
    centers: Sequence[torch.Tensor] | torch.Tensor,
    mean: torch.Tensor | None,
    selection: Selection,
    config: MonkeyJumpConfig,
    training: bool,
) -> bool:
    """Whether the kernel knows this way of routing: cosines, every token by itself, nothing drawn at random."""
    plain = selection.pool is None and selection.source is None and mean is None and config.mean_gate is None
    if not plain or config.similarity != "cosine" or (training and config.jitter > 0) or not dispatch.uses_kernels(h):
        return False
    from monkeyjump.ops import routing

    return routing.supported(len(centers))


def _fused(
    h: torch.Tensor,
    centers: Sequence[torch.Tensor] | torch.Tensor,
    queries: torch.Tensor | None,
    config: MonkeyJumpConfig,
    with_statistics: bool,
    into: Staged | None,
) -> Decision:
    """The decision by the kernel."""
    from monkeyjump.ops import routing

    settings = routing.Routing(
        top_k=config.top_k or len(centers),
        temperature=config.temperature,
        renormalize=config.renormalize,
        member_k=1 if config.ema_assign == "top1" else config.top_k or len(centers),
        unit=config.ema_space == "normalized",
    )
    if into is not None:
        return Decision(routing.fused_gates_into(h, list(centers), queries, settings, into.sums, into.counts))
    if not with_statistics:
        return Decision(routing.fused_gates(h, list(centers), settings))
    return Decision(*routing.fused_gates_and_sums(h, list(centers), queries, settings))


def uniform_gates(h: torch.Tensor, experts: int, config: MonkeyJumpConfig) -> torch.Tensor:
    """The control without routing: the same gate for every token and projection, [B, 1, E]."""
    return torch.full((h.shape[0], 1, experts), config.uniform.uniform_gate, device=h.device)


def shuffled_gates(gates: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """The control that keeps the gates and breaks their tie to the token: permuted over the real tokens of the batch.

    Gates that a whole row shares ([B, 1, E]) are permuted over the rows.
    """
    flat = gates.flatten(0, 1)
    keys = torch.rand(flat.shape[0], device=flat.device)
    if mask is None or mask.numel() != flat.shape[0]:
        return flat[keys.argsort()].view_as(gates)
    padding = ~mask.flatten().to(flat.device)
    order = (keys + padding).argsort()  # the real tokens at random, then the padding
    places = padding.long().argsort(stable=True)  # the real tokens in order, then the padding
    return torch.empty_like(flat).index_copy_(0, places, flat[order]).view_as(gates)


def task_gates(task_ids: torch.Tensor, experts: int, config: MonkeyJumpConfig) -> torch.Tensor:
    """Oracle routing: a token goes to its task's expert with gate 1. task_ids [B, 1 or T] -> [B, 1 or T, E]."""
    if config.task_experts is None:
        expert = task_ids % experts
    else:
        expert = torch.tensor(config.task_experts, device=task_ids.device)[task_ids]
    return torch.nn.functional.one_hot(expert.long(), experts).float()
