"""The kernels as registered ops: one node each for torch.compile, capturable in CUDA graphs.

A registered op cannot take a dataclass, so masks and strengths arrive here as plain tensors and numbers. Gradients are
those of the autograd functions that call them (`gated_lora`).
"""

from __future__ import annotations

import torch

from monkeyjump.ops.kernels import lora
from monkeyjump.ops.kernels import route as routing
from monkeyjump.ops.registration import registered, shapes_of
from monkeyjump.ops.settings import Dropout, Routing, Strengths


def plain(dropout: Dropout | None) -> tuple[torch.Tensor | None, float]:
    return (None, 0.0) if dropout is None else (dropout.seed, dropout.p)


@registered("lora_down")
def lora_down(x: torch.Tensor, As: list[torch.Tensor], seed: torch.Tensor | None, p: float) -> torch.Tensor:
    """dropout(x) A^T of every A, side by side: [N, M * R], fp32."""
    return lora.down(x.contiguous(), As, Dropout.of(seed, p))


@shapes_of(lora_down)
def _(x, As, seed, p):
    return x.new_empty(x.shape[0], len(As) * As[0].shape[0], dtype=torch.float32)


@registered("lora_down_backward")
def lora_down_backward(x: torch.Tensor, dz: torch.Tensor, seed: torch.Tensor | None, p: float) -> torch.Tensor:
    """dz^T dropout(x): [M * R, D], fp32."""
    shaped = [x.new_empty(dz.shape[1], x.shape[1])]  # only the shape of A is needed
    dA = lora.down_backward_alone(x.contiguous(), dz.contiguous(), shaped, Dropout.of(seed, p), None)[1]
    assert dA is not None
    return dA


@shapes_of(lora_down_backward)
def _(x, dz, seed, p):
    return x.new_empty(dz.shape[1], x.shape[1], dtype=torch.float32)


@registered("lora_down_input")
def lora_down_input(
    dz: torch.Tensor, As: list[torch.Tensor], seed: torch.Tensor | None, p: float, dtype: torch.dtype
) -> torch.Tensor:
    """dx = dropout'(dz A): [N, D]."""
    dx = lora.down_backward_alone(None, dz.contiguous(), As, Dropout.of(seed, p), dtype)[0]
    assert dx is not None
    return dx


@shapes_of(lora_down_input)
def _(dz, As, seed, p, dtype):
    return dz.new_empty(dz.shape[0], As[0].shape[1], dtype=dtype)


@registered("lora_up")
def lora_up(
    base: torch.Tensor,
    z: torch.Tensor,
    B: torch.Tensor,
    gate: torch.Tensor | None,
    diagonal: torch.Tensor | None,
    scale: float,
    every: int,
) -> torch.Tensor:
    """base + (z * s) B^T: [N, O]."""
    y = torch.empty_like(base, memory_format=torch.contiguous_format)
    lora.up([base.contiguous()], z, [B], Strengths.single(scale, gate, diagonal, every), [y])
    return y


@shapes_of(lora_up)
def _(base, z, B, gate, diagonal, scale, every):
    return base.new_empty(base.shape)


@registered("lora_up_backward")
def lora_up_backward(
    dy: torch.Tensor,
    z: torch.Tensor,
    B: torch.Tensor,
    gate: torch.Tensor | None,
    diagonal: torch.Tensor | None,
    scale: float,
    every: int,
    times_s: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dy B [N, C], times s if asked; dB [O, C] for a diagonal of ones), fp32."""
    return lora.up_backward_alone(dy.contiguous(), z, B, Strengths.single(scale, gate, diagonal, every), times_s)


@shapes_of(lora_up_backward)
def _(dy, z, B, gate, diagonal, scale, every, times_s):
    return dy.new_empty(dy.shape[0], B.shape[1], dtype=torch.float32), dy.new_empty(B.shape, dtype=torch.float32)


@registered("route")
def route(
    h: torch.Tensor, centers: list[torch.Tensor], top_k: int, temperature: float, renormalize: bool
) -> torch.Tensor:
    """Gates [N, E]."""
    return routing.route(h.contiguous(), centers, Routing(top_k, temperature, renormalize, member_k=1, unit=True))


@shapes_of(route)
def _(h, centers, top_k, temperature, renormalize):
    return h.new_empty(h.shape[0], len(centers), dtype=torch.float32)


@registered("route_into", mutates=("sums", "counts"))
def route_into(
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
    return routing.route_and_sum(h.contiguous(), centers, queries, settings, sums, counts)


@shapes_of(route_into)
def _(h, centers, queries, sums, counts, ks, temperature, flags):
    return h.new_empty(h.shape[0], len(centers), dtype=torch.float32)
