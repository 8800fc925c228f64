"""The centroid router compares tokens with one centre per projection. It has no parameters and no gradients.

Centres follow the tokens: one training forward stages statistics and the next one commits them.

Shapes: B batch, T tokens, D hidden width, E routed projections of the block, P projections of all blocks together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from monkeyjump.config import MonkeyJumpConfig
from monkeyjump.ops import dispatch
from monkeyjump.ops import reference as ops
from monkeyjump.routing.granularity import Selection, pool


@dataclass(frozen=True)
class Staged:
    """Where the sums [D] and counts [] of each expert wait for the next commit."""

    sums: list[Tensor]
    counts: list[Tensor]


@torch.no_grad()
def decide(
    h: Tensor,
    centers: list[Tensor],
    mean: Tensor | None,
    selection: Selection,
    config: MonkeyJumpConfig,
    *,
    training: bool = False,
    into: Staged | None = None,
) -> Tensor:
    """Gates of the tokens h [B, T, D] that enter a block, from the centres [D] of its E routed projections.

    They are [B, T, E], or [B, 1, E] where a whole row shares one decision. The sums and counts that feed the EMA are
    written `into` their place, if one is given. Autocast is off: similarities of nearly parallel vectors need fp32.
    Noise changes the gates only; the statistics that move the centres follow the clean assignment. Experts of a group
    (`task_experts`) have the same centre, so the first of each group is compared and decides for all of them.
    """
    if torch.is_autocast_enabled(h.device.type):
        with torch.autocast(h.device.type, enabled=False):
            return decide(h, centers, mean, selection, config, training=training, into=into)
    member_k = 1 if config.ema_assign == "top1" else config.top_k
    # The kernel only computes cosines of every token by itself, and draws no noise.
    plain = selection.pool is None and selection.source is None
    plain = plain and config.similarity == "cosine" and not (training and config.jitter > 0)
    plain = plain and config.groups is None
    if plain and dispatch.uses_kernels(h):
        from monkeyjump.ops import routing

        E, unit, share = len(centers), config.ema_space == "normalized", config.mean_gate
        if routing.supported(E + (mean is not None)):
            # gates of a given mean are gates that add up to one, times that mean and E
            even, strength = (config.renormalize, 1.0) if share is None else (True, share * E)
            how = routing.Routing(config.top_k or E, config.temperature, even, member_k or E, unit, strength)
            if into is None:
                return routing.fused_gates(h, centers, how, mean=mean)
            return routing.fused_gates(h, centers, how, selection.queries, into.sums, into.counts, mean)
    if selection.pool is not None:
        h = pool(h, selection)
    u = ops.features(h, mean, normalize=config.ema_space == "normalized")
    logits = ops.similarity_logits(u, torch.stack(centers[: config.groups]), config.similarity)
    noisy = logits + config.jitter * torch.randn_like(logits) if training and config.jitter > 0 else logits
    gates = ops.gates(noisy, config.top_k, config.temperature, config.renormalize)
    gates = dealt_out(gates, len(centers), -1)
    if config.mean_gate is not None:
        gates = gates * (config.mean_gate / gates.mean(-1, keepdim=True).clamp_min(ops.EPS))
    if selection.source is not None:
        gates = gates.gather(1, selection.source.to(h.device).unsqueeze(-1).expand(-1, -1, gates.shape[-1]))
    if into is not None:
        queries = None if selection.queries is None else selection.queries.to(h.device)
        sums, counts = ops.cluster_sums(u, ops.top_k_mask(logits, member_k), queries)
        torch._foreach_copy_(into.sums, list(dealt_out(sums, len(centers)).unbind()))
        torch._foreach_copy_(into.counts, list(dealt_out(counts, len(centers)).unbind()))
    return gates


def dealt_out(x: Tensor, experts: int, dim: int = 0) -> Tensor:
    """From an entry for each group to one for each expert: experts are dealt out to the groups in turn."""
    groups = x.shape[dim]
    return x if groups == experts else x.index_select(dim, torch.arange(experts, device=x.device) % groups)


def uniform_gates(h: Tensor, experts: int, config: MonkeyJumpConfig) -> Tensor:
    """The control without routing: the same gate for every token and projection, [B, 1, E]."""
    return torch.full((h.shape[0], 1, experts), config.uniform.uniform_gate, device=h.device)


def shuffled_gates(gates: Tensor, mask: Tensor | None) -> Tensor:
    """The control that breaks the tie between gates and tokens: gates are permuted over the real tokens of the batch.

    Gates that a whole row shares ([B, 1, E]) are permuted over the rows.
    """
    flat = gates.flatten(0, 1)
    keys = torch.rand(flat.shape[0], device=flat.device)
    if mask is None or mask.numel() != flat.shape[0]:
        return flat[keys.argsort()].view_as(gates)
    padding = ~mask.flatten().to(flat.device)
    order = (keys + padding).argsort()  # first the real tokens at random, then the padding
    places = padding.long().argsort(stable=True)  # first the real tokens in order, then the padding
    return torch.empty_like(flat).index_copy_(0, places, flat[order]).view_as(gates)


def task_gates(task_ids: Tensor, experts: int, config: MonkeyJumpConfig) -> Tensor:
    """Oracle routing: a token goes to its task's experts with gate 1. task_ids [B, 1 or T] -> [B, 1 or T, E]."""
    taken, groups = config.task_experts, experts
    if isinstance(taken, int):
        groups = min(taken, experts)
    elif taken is not None:
        task_ids = torch.tensor(taken, device=task_ids.device)[task_ids]
    group_of = torch.arange(experts, device=task_ids.device) % groups
    return (group_of == task_ids.unsqueeze(-1) % groups).float()


def is_due(step: Any, config: MonkeyJumpConfig) -> Any:
    """Whether the centres follow what the `step`-th training forward has staged."""
    return (step > 0) & (step % config.ema_interval == 0) & (step <= config.ema_stop)


@torch.no_grad()
def committed(centers: Tensor, sums: Tensor, counts: Tensor, step: Tensor, config: MonkeyJumpConfig) -> Tensor:
    """The centres [P, D] after `step` training forwards, given what the last of them staged.

    c <- beta c + (1 - beta) mean, on every `ema_interval`-th forward up to `ema_stop`; a centre that no token was
    routed to stays. There is no branch on the step, which lives on the device.
    """
    moves = is_due(step, config) & (counts > 0)
    mean = sums / counts.clamp_min(1).unsqueeze(-1)
    return torch.where(moves.unsqueeze(-1), config.ema_momentum * centers + (1 - config.ema_momentum) * mean, centers)
