"""The kernels as registered ops: one node each for torch.compile, capturable in CUDA graphs, differentiable.

A registered op cannot take a dataclass, so masks and strengths arrive here as plain tensors and numbers.
"""

from __future__ import annotations

from typing import Any

import torch

from monkeyjump.ops.kernels import lora
from monkeyjump.ops.kernels import route as routing
from monkeyjump.ops.settings import Dropout, Routing, Strengths, rank_gradients, with_diagonal


def plain(dropout: Dropout | None) -> tuple[torch.Tensor | None, float]:
    return (None, 0.0) if dropout is None else (dropout.seed, dropout.p)


@torch.library.custom_op("monkeyjump::lora_down", mutates_args=())
def lora_down(x: torch.Tensor, As: list[torch.Tensor], seed: torch.Tensor | None, p: float) -> torch.Tensor:
    """dropout(x) A^T of every A, side by side: [N, M * R], fp32."""
    return lora.down(x.contiguous(), As, Dropout.of(seed, p))


@lora_down.register_fake
def _(x, As, seed, p):
    return x.new_empty(x.shape[0], len(As) * As[0].shape[0], dtype=torch.float32)


@torch.library.custom_op("monkeyjump::lora_down_backward", mutates_args=())
def lora_down_backward(x: torch.Tensor, dz: torch.Tensor, seed: torch.Tensor | None, p: float) -> torch.Tensor:
    """dz^T dropout(x): [M * R, D], fp32."""
    shaped = [x.new_empty(dz.shape[1], x.shape[1])]  # only the shape of A is needed
    dA = lora.down_backward_alone(x.contiguous(), dz.contiguous(), shaped, Dropout.of(seed, p), None)[1]
    assert dA is not None
    return dA


@lora_down_backward.register_fake
def _(x, dz, seed, p):
    return x.new_empty(dz.shape[1], x.shape[1], dtype=torch.float32)


@torch.library.custom_op("monkeyjump::lora_down_input", mutates_args=())
def lora_down_input(
    dz: torch.Tensor, As: list[torch.Tensor], seed: torch.Tensor | None, p: float, dtype: torch.dtype
) -> torch.Tensor:
    """dx = dropout'(dz A): [N, D]."""
    dx = lora.down_backward_alone(None, dz.contiguous(), As, Dropout.of(seed, p), dtype)[0]
    assert dx is not None
    return dx


@lora_down_input.register_fake
def _(dz, As, seed, p, dtype):
    return dz.new_empty(dz.shape[0], As[0].shape[1], dtype=dtype)


def _save_down(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    x, As, seed, p = inputs
    ctx.save_for_backward(x, seed, *As)
    ctx.p = p


def _down_gradients(ctx: Any, dz: torch.Tensor) -> Any:
    x, seed, *As = ctx.saved_tensors
    dx = lora_down_input(dz, As, seed, ctx.p, x.dtype) if ctx.needs_input_grad[0] else None
    dA = lora_down_backward(x, dz, seed, ctx.p)
    return dx, list(dA.split(As[0].shape[0])), None, None


lora_down.register_autograd(_down_gradients, setup_context=_save_down)


@torch.library.custom_op("monkeyjump::lora_up", mutates_args=())
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


@lora_up.register_fake
def _(base, z, B, gate, diagonal, scale, every):
    return base.new_empty(base.shape)


@torch.library.custom_op("monkeyjump::lora_up_backward", mutates_args=())
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


@lora_up_backward.register_fake
def _(dy, z, B, gate, diagonal, scale, every, times_s):
    return dy.new_empty(dy.shape[0], B.shape[1], dtype=torch.float32), dy.new_empty(B.shape, dtype=torch.float32)


def _save_up(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    _, z, B, gate, diagonal, scale, every = inputs
    ctx.save_for_backward(z, B, gate, diagonal)
    ctx.scale, ctx.every = scale, every


def _up_gradients(ctx: Any, dy: torch.Tensor) -> Any:
    z, B, gate, diagonal = ctx.saved_tensors
    t, dB = lora_up_backward(dy, z, B, gate, diagonal, ctx.scale, ctx.every, False)
    dB, ddiagonal = with_diagonal(dB, B, diagonal)
    dz, (dgate,) = rank_gradients(t, z, Strengths.single(ctx.scale, gate, diagonal, ctx.every), True)
    return dy, dz, dB, dgate, ddiagonal, None, None


lora_up.register_autograd(_up_gradients, setup_context=_save_up)


@torch.library.custom_op("monkeyjump::route", mutates_args=())
def route(
    h: torch.Tensor, centers: list[torch.Tensor], top_k: int, temperature: float, renormalize: bool
) -> torch.Tensor:
    """Gates [N, E]."""
    return routing.route(h.contiguous(), centers, Routing(top_k, temperature, renormalize, member_k=1, unit=True))


@route.register_fake
def _(h, centers, top_k, temperature, renormalize):
    return h.new_empty(h.shape[0], len(centers), dtype=torch.float32)


@torch.library.custom_op("monkeyjump::route_into", mutates_args=("sums", "counts"))
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


@route_into.register_fake
def _(h, centers, queries, sums, counts, ks, temperature, flags):
    return h.new_empty(h.shape[0], len(centers), dtype=torch.float32)
