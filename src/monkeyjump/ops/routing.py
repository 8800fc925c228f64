"""Routing over the Triton kernels, in eager mode and under torch.compile: no gradient, no parameters.

Shapes: B batch, T tokens, D hidden width, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from monkeyjump.ops import custom
from monkeyjump.ops.kernels import route as kernels
from monkeyjump.ops.kernels.route import supported
from monkeyjump.ops.settings import Routing, rows_of

__all__ = ["Routing", "route", "route_and_sum", "route_into", "supported"]


def route(h: torch.Tensor, centers: list[torch.Tensor], routing: Routing) -> torch.Tensor:
    """Gates [B, T, E] of h [B, T, D], fp32."""
    flat = rows_of(h)
    if torch.compiler.is_compiling():
        gates = custom.route(flat, centers, routing.top_k, routing.temperature, routing.renormalize)
    else:
        gates = kernels.route(flat, centers, routing)
    return gates.view(*h.shape[:-1], len(centers))


def route_into(
    h: torch.Tensor,
    centers: list[torch.Tensor],
    queries: torch.Tensor | None,
    routing: Routing,
    sums: Sequence[torch.Tensor],
    counts: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Gates [B, T, E]; sums [D] and counts [] of the queries ([B, T] bool; None: every token) are written by expert."""
    flat = rows_of(h)
    if queries is not None:
        queries = queries.expand(h.shape[:-1]).reshape(-1)
    if torch.compiler.is_compiling():
        ks, flags = [routing.top_k, routing.member_k], [routing.renormalize, routing.unit]
        gates = custom.route_into(flat, centers, queries, list(sums), list(counts), ks, routing.temperature, flags)
    else:
        gates = kernels.route_and_sum(flat, centers, queries, routing, sums, counts)
    return gates.view(*h.shape[:-1], len(centers))


def route_and_sum(
    h: torch.Tensor, centers: list[torch.Tensor], queries: torch.Tensor | None, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gates [B, T, E]; sums [E, D] and counts [E]."""
    sums = torch.empty(len(centers), h.shape[-1], device=h.device)
    counts = torch.empty(len(centers), device=h.device)
    return route_into(h, centers, queries, routing, sums.unbind(), counts.unbind()), sums, counts
