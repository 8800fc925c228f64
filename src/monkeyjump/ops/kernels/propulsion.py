"""Triton kernels of Propulsion: the output times 1 + gate * ((1 + offset) ** degree - 1), per token and column.

Only eager mode uses them: under torch.compile the reference is elementwise work that is fused into its neighbours.

Shapes: N tokens, O output width, P row blocks.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from monkeyjump.ops.kernels.launch import Launcher
from monkeyjump.ops.kernels.partial_sums import new_parts, total
from monkeyjump.ops.kernels.tiles import TILES, row_blocks
from monkeyjump.ops.lowrank import gate_rows, rows_of


@triton.jit
def power_minus_one(offset, DEGREE: tl.constexpr):
    """(1 + offset) ** DEGREE - 1 by repeated squaring, step by step as the reference: for offsets of any size."""
    f = offset
    for place in tl.static_range(30, -1, -1):  # unrolled; what is above the highest bit of the degree leaves no code
        if DEGREE >> (place + 1) > 0:
            f = f * (f + 2)  # (1 + f) ** 2 - 1
            if (DEGREE >> place) % 2 == 1:
                f = f + offset * (f + 1)  # (1 + f) (1 + o) - 1
    return f


@triton.jit
def slope_of_power(offset, DEGREE: tl.constexpr):
    """d/do (1 + o) ** DEGREE = DEGREE (1 + o) ** (DEGREE - 1)."""
    p = offset + 1
    power = tl.full(offset.shape, 1.0, tl.float32)
    for place in tl.static_range(30, -1, -1):
        if (DEGREE - 1) >> (place + 1) > 0:
            power = power * power
        if ((DEGREE - 1) >> place) % 2 == 1:
            power = power * p
    return DEGREE * power


@triton.jit
def gate_of(gate, rows, N, gate_stride, every):
    if gate is None:
        g = tl.where(rows < N, 1.0, 0.0)
    else:
        g = tl.load(gate + (rows // every) * gate_stride, mask=rows < N, other=0.0)
    return g


@triton.jit
def scale_kernel(base, offset, gate, y, N, O, gate_stride, every,
                 DEGREE: tl.constexpr, BN: tl.constexpr, BO: tl.constexpr):  # fmt: skip
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    outs = tl.program_id(1) * BO + tl.arange(0, BO)
    where = rows.to(tl.int64)[:, None] * O + outs[None, :]
    inside = (rows < N)[:, None] & (outs < O)[None, :]
    tile = tl.load(base + where, mask=inside, other=0.0)
    f = power_minus_one(tl.load(offset + outs, mask=outs < O, other=0.0), DEGREE)
    factor = gate_of(gate, rows, N, gate_stride, every)[:, None] * f[None, :]
    wide = tile.to(tl.float32)
    tl.store(y + where, (wide + wide * factor).to(tile.dtype), mask=inside)


@triton.jit
def scale_backward_kernel(dy, base, offset, gate, dbase, parts, N, O, gate_stride, every,
                          DEGREE: tl.constexpr, BN: tl.constexpr, BO: tl.constexpr):  # fmt: skip
    block = tl.program_id(0)
    rows = block * BN + tl.arange(0, BN)
    outs = tl.program_id(1) * BO + tl.arange(0, BO)
    where = rows.to(tl.int64)[:, None] * O + outs[None, :]
    inside = (rows < N)[:, None] & (outs < O)[None, :]
    grad = tl.load(dy + where, mask=inside, other=0.0)
    o = tl.load(offset + outs, mask=outs < O, other=0.0)
    g = gate_of(gate, rows, N, gate_stride, every)[:, None]
    wide = grad.to(tl.float32)
    tl.store(dbase + where, (wide + wide * (g * power_minus_one(o, DEGREE)[None, :])).to(grad.dtype), mask=inside)
    value = tl.load(base + where, mask=inside, other=0.0).to(tl.float32)
    tl.store(parts + block * O + outs, slope_of_power(o, DEGREE) * tl.sum(wide * value * g, 0), mask=outs < O)


_scale, _scale_backward = Launcher(scale_kernel), Launcher(scale_backward_kernel)


def scale(base: Tensor, offset: Tensor, degree: int, gate: Tensor | None, every: int) -> Tensor:
    """base [N, O], offset [O], gate [N / every, 1] or None."""
    N, O = base.shape
    y = torch.empty_like(base)
    tile = TILES["scale"]
    _scale((row_blocks(N, tile.rows), row_blocks(O, tile.width(O))),
        base, offset, gate, y, N, O, 0 if gate is None else gate.stride(0), every, degree, tile.rows, tile.width(O),
        warps=tile.warps,
    )  # fmt: skip
    return y


def scale_backward(
    dy: Tensor, base: Tensor, offset: Tensor, degree: int, gate: Tensor | None, every: int
) -> tuple[Tensor, Tensor]:
    """(dbase [N, O], doffset [O] fp32)."""
    N, O = base.shape
    tile = TILES["backward"]
    dbase = torch.empty_like(base)
    parts = new_parts(N, tile.rows, O, base.device)
    _scale_backward((parts.shape[0], row_blocks(O, tile.width(O))),
        dy, base, offset, gate, dbase, parts, N, O, 0 if gate is None else gate.stride(0), every, degree,
        tile.rows, tile.width(O), warps=tile.warps,
    )  # fmt: skip
    return dbase, total([parts])


def scaled(base: Tensor, offset: Tensor, degree: int, gate: Tensor | None) -> Tensor:
    """base + gate * ((1 + offset) ** degree - 1) * base: base [..., O], offset [O], gate [..., 1] without gradient."""
    every = 1
    if gate is not None:
        gate = gate_rows(gate)
        every = base.numel() // base.shape[-1] // gate.shape[0]
    return _Scaled.apply(base, offset, degree, gate, every)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, base: Tensor, offset: Tensor, degree: int, gate: Tensor | None, every: int) -> Tensor:
        flat = rows_of(base)
        ctx.save_for_backward(flat, offset, gate)
        ctx.degree, ctx.every = degree, every
        return scale(flat, offset, degree, gate, every).view(base.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        flat, offset, gate = ctx.saved_tensors
        dbase, doffset = scale_backward(rows_of(dy), flat, offset, ctx.degree, gate, ctx.every)
        return dbase.view(dy.shape), doffset, None, None, None
