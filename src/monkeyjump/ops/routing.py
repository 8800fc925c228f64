"""Routing over the Triton kernels, in eager mode and under torch.compile: no gradient, no parameters.

Shapes: B batch, T tokens, N = B * T, D hidden width, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from monkeyjump.ops.kernels import route as kernels
from monkeyjump.ops.kernels.route import Routing, supported
from monkeyjump.ops.lowrank import rows_of
from monkeyjump.ops.registration import registered, shapes_of

__all__ = ["Routing", "fused_gates", "supported"]


def fused_gates(
    h: Tensor,
    centers: list[Tensor],
    routing: Routing,
    queries: Tensor | None = None,
    sums: Sequence[Tensor] | None = None,
    counts: Sequence[Tensor] = (),
) -> Tensor:
    """Gates [B, T, E] of h [B, T, D], fp32.

    With `sums`, the sums [D] and counts [] of the queries ([B, T] bool; None: every token) are written by expert.
    """
    flat = rows_of(h)
    if sums is not None and queries is not None:
        queries = queries.expand(h.shape[:-1]).reshape(-1)
    if not torch.compiler.is_compiling():
        gates = kernels.token_gates(flat, centers, routing, queries, sums, counts)
    elif sums is None:
        gates = gates_op(flat, centers, routing.top_k, routing.temperature, routing.renormalize)
    else:
        ks, flags = [routing.top_k, routing.member_k], [routing.renormalize, routing.unit]
        gates = gates_into_op(flat, centers, queries, list(sums), list(counts), ks, routing.temperature, flags)
    return gates.view(*h.shape[:-1], len(centers))


@registered("fused_gates")
def gates_op(h: Tensor, centers: list[Tensor], top_k: int, temperature: float, renormalize: bool) -> Tensor:
    """Gates [N, E]."""
    settings = Routing(top_k, temperature, renormalize, member_k=1, unit=True)
    return kernels.token_gates(h.contiguous(), centers, settings)


@shapes_of(gates_op)
def _(h, centers, top_k, temperature, renormalize):
    return h.new_empty(h.shape[0], len(centers), dtype=torch.float32)


@registered("fused_gates_into", mutates=("sums", "counts"))
def gates_into_op(
    h: Tensor, centers: list[Tensor], queries: Tensor | None, sums: list[Tensor], counts: list[Tensor], ks: list[int],
    temperature: float, flags: list[bool],
) -> Tensor:  # fmt: skip
    """Gates [N, E]; sums [D] and counts [] of the tokens that each centre will follow are written where they belong."""
    (top_k, member_k), (renormalize, unit) = ks, flags
    settings = Routing(top_k, temperature, renormalize, member_k, unit)
    return kernels.token_gates(h.contiguous(), centers, settings, queries, sums, counts)


@shapes_of(gates_into_op)
def _(h, centers, queries, sums, counts, ks, temperature, flags):
    return h.new_empty(h.shape[0], len(centers), dtype=torch.float32)
