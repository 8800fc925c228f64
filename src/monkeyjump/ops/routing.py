"""Routing over the Triton kernels, in eager mode and under torch.compile: no gradient, no parameters.

Shapes: B batch, T tokens, N = B * T, D hidden width, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from monkeyjump.ops.kernels import route as kernels
from monkeyjump.ops.kernels.route import Routing, supported
from monkeyjump.ops.lowrank import rows_of
from monkeyjump.ops.registration import registered, shapes_of

__all__ = ["Routing", "fused_gates", "fused_gates_and_sums", "fused_gates_into", "supported"]


def fused_gates(h: torch.Tensor, centers: list[torch.Tensor], routing: Routing) -> torch.Tensor:
    """Gates [B, T, E] of h [B, T, D], fp32."""
    flat = rows_of(h)
    if torch.compiler.is_compiling():
        gates = gates_op(flat, centers, routing.top_k, routing.temperature, routing.renormalize)
    else:
        gates = kernels.token_gates(flat, centers, routing)
    return gates.view(*h.shape[:-1], len(centers))


def fused_gates_into(
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
        gates = gates_into_op(flat, centers, queries, list(sums), list(counts), ks, routing.temperature, flags)
    else:
        gates = kernels.token_gates_and_sums(flat, centers, queries, routing, sums, counts)
    return gates.view(*h.shape[:-1], len(centers))


def fused_gates_and_sums(
    h: torch.Tensor, centers: list[torch.Tensor], queries: torch.Tensor | None, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gates [B, T, E]; sums [E, D] and counts [E]."""
    sums = torch.empty(len(centers), h.shape[-1], device=h.device)
    counts = torch.empty(len(centers), device=h.device)
    return fused_gates_into(h, centers, queries, routing, sums.unbind(), counts.unbind()), sums, counts


@registered("fused_gates")
def gates_op(
    h: torch.Tensor, centers: list[torch.Tensor], top_k: int, temperature: float, renormalize: bool
) -> torch.Tensor:
    """Gates [N, E]."""
    settings = Routing(top_k, temperature, renormalize, member_k=1, unit=True)
    return kernels.token_gates(h.contiguous(), centers, settings)


@shapes_of(gates_op)
def _(h, centers, top_k, temperature, renormalize):
    return h.new_empty(h.shape[0], len(centers), dtype=torch.float32)


@registered("fused_gates_into", mutates=("sums", "counts"))
def gates_into_op(
    h: torch.Tensor,
    centers: list[torch.Tensor],
    queries: torch.Tensor | None,
    sums: list[torch.Tensor],
    counts: list[torch.Tensor],
    ks: list[int],
    temperature: float,
    flags: list[bool],
) -> torch.Tensor:
    """Gates [N, E]; sums [D] and counts [] of the tokens that each centre will follow are written where they belong."""
    (top_k, member_k), (renormalize, unit) = ks, flags
    settings = Routing(top_k, temperature, renormalize, member_k, unit)
    return kernels.token_gates_and_sums(h.contiguous(), centers, queries, settings, sums, counts)


@shapes_of(gates_into_op)
def _(h, centers, queries, sums, counts, ks, temperature, flags):
    return h.new_empty(h.shape[0], len(centers), dtype=torch.float32)
