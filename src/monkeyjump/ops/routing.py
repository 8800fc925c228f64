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
    mean: Tensor | None = None,
) -> Tensor:
    """Gates [B, T, E] of h [B, T, D], fp32; with a mean [D] of the tokens in the centred space.

    With `sums`, the sums [D] and counts [] of the queries ([B, T] bool; None: every token) are written by expert.
    """
    flat = rows_of(h)
    if sums is not None and queries is not None:
        queries = queries.expand(h.shape[:-1]).reshape(-1)
    if not torch.compiler.is_compiling():
        gates = kernels.token_gates(flat, centers, routing, queries, sums, counts, mean)
        return gates.view(*h.shape[:-1], len(centers))
    vectors = centers if mean is None else [*centers, mean]
    ks, flags = [routing.top_k, routing.member_k], [routing.renormalize, routing.unit, mean is not None]
    scales = [routing.temperature, routing.strength]
    if sums is None:
        gates = gates_op(flat, vectors, ks, scales, flags)
    else:
        gates = gates_into_op(flat, vectors, queries, list(sums), list(counts), ks, scales, flags)
    return gates.view(*h.shape[:-1], len(centers))


@registered("fused_gates")
def gates_op(h: Tensor, vectors: list[Tensor], ks: list[int], scales: list[float], flags: list[bool]) -> Tensor:
    """Gates [N, E]; the vectors are the centres and, in the centred space, the mean."""
    centers, mean, how = _told(vectors, ks, scales, flags)
    return kernels.token_gates(h.contiguous(), centers, how, mean=mean)


@shapes_of(gates_op)
def _(h, vectors, ks, scales, flags):
    return h.new_empty(h.shape[0], len(vectors) - flags[2], dtype=torch.float32)


@registered("fused_gates_into", mutates=("sums", "counts"))
def gates_into_op(
    h: Tensor, vectors: list[Tensor], queries: Tensor | None, sums: list[Tensor], counts: list[Tensor], ks: list[int],
    scales: list[float], flags: list[bool],
) -> Tensor:  # fmt: skip
    """Gates [N, E]; sums [D] and counts [] of the tokens that each centre will follow are written where they belong."""
    centers, mean, how = _told(vectors, ks, scales, flags)
    return kernels.token_gates(h.contiguous(), centers, how, queries, sums, counts, mean)


@shapes_of(gates_into_op)
def _(h, vectors, queries, sums, counts, ks, scales, flags):
    return h.new_empty(h.shape[0], len(vectors) - flags[2], dtype=torch.float32)


def _told(
    vectors: list[Tensor], ks: list[int], scales: list[float], flags: list[bool]
) -> tuple[list[Tensor], Tensor | None, Routing]:
    (top_k, member_k), (temperature, strength), (renormalize, unit, centered) = ks, scales, flags
    how = Routing(top_k, temperature, renormalize, member_k, unit, strength)
    return (vectors[:-1], vectors[-1], how) if centered else (vectors, None, how)
