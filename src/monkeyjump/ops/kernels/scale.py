"""Triton kernels of Propulsion: the output times 1 + gate * ((1 + offset) ** degree - 1), per token and column.

Shapes: N tokens, O output width, P row blocks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from monkeyjump.ops.kernels.launch import Launcher
from monkeyjump.ops.kernels.lora import Parts
from monkeyjump.ops.kernels.tiles import TILES, row_blocks


@triton.jit
def power(offset, DEGREE: tl.constexpr):
    """(1 + offset) ** DEGREE - 1 from f <- f + o + f o: exact to fp32 for offsets of any size and sign."""
    f = tl.zeros_like(offset)
    for _ in tl.static_range(DEGREE):
        f = f + offset + f * offset
    return f


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
    f = power(tl.load(offset + outs, mask=outs < O, other=0.0), DEGREE)
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
    tl.store(dbase + where, (wide + wide * (g * power(o, DEGREE)[None, :])).to(grad.dtype), mask=inside)
    value = tl.load(base + where, mask=inside, other=0.0).to(tl.float32)
    slope = DEGREE * (1 + power(o, DEGREE - 1))  # d/do (1 + o) ** n = n (1 + o) ** (n - 1)
    tl.store(parts + block * O + outs, slope * tl.sum(wide * value * g, 0), mask=outs < O)


_scale, _scale_backward = Launcher(scale_kernel), Launcher(scale_backward_kernel)


def scale(base: torch.Tensor, offset: torch.Tensor, degree: int, gate: torch.Tensor | None, every: int) -> torch.Tensor:
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
    dy: torch.Tensor, base: torch.Tensor, offset: torch.Tensor, degree: int, gate: torch.Tensor | None, every: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dbase [N, O], doffset [O] fp32)."""
    N, O = base.shape
    tile = TILES["backward"]
    dbase = torch.empty_like(base)
    parts = Parts.of(N, O, base.device)
    _scale_backward((parts.tensor.shape[0], row_blocks(O, tile.width(O))),
        dy, base, offset, gate, dbase, parts.tensor, N, O, 0 if gate is None else gate.stride(0), every, degree,
        parts.rows, tile.width(O), warps=tile.warps,
    )  # fmt: skip
    return dbase, parts.total()
