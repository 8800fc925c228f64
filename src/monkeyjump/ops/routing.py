"""Routing over the Triton kernels, in eager mode and under torch.compile: no gradient, no parameters.

Shapes: B batch, T tokens, D hidden width, E experts.
"""

from __future__ import annotations

import torch

from monkeyjump.ops import custom
from monkeyjump.ops.kernels import route as kernels
from monkeyjump.ops.kernels.route import Routing, supported

__all__ = ["Routing", "route", "route_and_sum", "supported"]


def route(h: torch.Tensor, centers: list[torch.Tensor], routing: Routing) -> torch.Tensor:
    """Gates [B, T, E] of h [B, T, D], fp32."""
    flat = h.reshape(-1, h.shape[-1])
    if torch.compiler.is_compiling():
        gates = custom.route(flat, centers, routing.top_k, routing.temperature, routing.renormalize)
    else:
        gates = kernels.route(flat, centers, routing)
    return gates.view(*h.shape[:-1], len(centers))


def route_and_sum(
    h: torch.Tensor, centers: list[torch.Tensor], queries: torch.Tensor | None, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gates [B, T, E]; sums [E, D] and counts [E] of the queries ([B, T] bool; None: every token) by expert."""
    flat = h.reshape(-1, h.shape[-1])
    if queries is not None:
        queries = queries.expand(h.shape[:-1]).reshape(-1)
    if torch.compiler.is_compiling():
        gates, sums, counts = custom.route_and_sum(
            flat, centers, queries, routing.top_k, routing.temperature, routing.renormalize, routing.member_k,
            routing.unit,
        )  # fmt: skip
    else:
        gates, sums, counts = kernels.route_and_sum(flat, centers, queries, routing)
    return gates.view(*h.shape[:-1], len(centers)), sums, counts
