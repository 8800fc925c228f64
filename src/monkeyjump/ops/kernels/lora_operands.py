"""The operands of all kernels of low-rank updates: dropout masks, strengths, base outputs, and the numbers they take.

Shapes: as in `lora`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from monkeyjump.ops.lowrank import Dropout, Strengths


@triton.jit
def dropped(tile, rows, cols, width, seed, threshold):
    """The tile with the zeros of `reference.keep_mask`: entry i of x is kept as a pure function of (seed, i)."""
    start = (rows.to(tl.uint32) * width + seed) * 0x9E3779B1  # all of this is modulo 2 ** 32
    bits = start[:, None] + (cols.to(tl.uint32) * 0x9E3779B1)[None, :]
    # The second sum of `keep_mask` is multiplied out, which saves one instruction per entry.
    bits = (bits ^ (bits >> 15)) * 0x85EBCA6B + seed * ((0xC2B2AE35 * 0x85EBCA6B) % 2**32)
    return tl.where(bits >= threshold, tile, 0.0)


@triton.jit
def strength(gate, diagonal, scale, rows, cols, N, gate_stride, every, C: tl.constexpr, G: tl.constexpr):
    """s of a row block in these columns of B, zero outside: [BN, CP]."""
    inside = (rows < N)[:, None] & (cols < C)[None, :]
    s = tl.where(inside, scale, 0.0)
    if diagonal is not None:
        s *= tl.load(diagonal + cols, mask=cols < C, other=0.0)[None, :]
    if gate is not None:
        first = gate + (rows // every) * gate_stride
        if G == 1:
            s *= tl.load(first, mask=rows < N, other=0.0)[:, None]
        else:
            s *= tl.load(first[:, None] + (cols // (C // G))[None, :], mask=inside, other=0.0)
    return s


@triton.jit
def scaled(z, gate, diagonal, scale, rows, cols, N, z_stride, gate_stride, every,
           R: tl.constexpr, C: tl.constexpr, G: tl.constexpr):  # fmt: skip
    """(z, s) of a row block in the columns of B, zero outside: [BN, CP] each."""
    inside = (rows < N)[:, None] & (cols < C)[None, :]
    values = tl.load(z + rows[:, None] * z_stride + (cols % R)[None, :], mask=inside, other=0.0)
    return values, strength(gate, diagonal, scale, rows, cols, N, gate_stride, every, C, G)


@triton.jit
def base_tile(base, bias, long_rows, outs, stride, O, inside):
    """The tile that an update is added to, in fp32: of the base output, or of zeros; and the bias."""
    if base is not None:
        tile = tl.load(base + long_rows * stride + outs[None, :], mask=inside, other=0.0).to(tl.float32)
    else:
        tile = tl.where(inside, 0.0, 0.0)
    if bias is not None:
        tile += tl.load(bias + outs, mask=outs < O, other=0.0).to(tl.float32)[None, :]
    return tile


def mask_numbers(dropout: Dropout | None) -> tuple[Tensor | None, int, float]:
    """(seed, threshold, keep_scale) of a kernel."""
    return (None, 0, 1.0) if dropout is None else (dropout.seed, dropout.threshold, dropout.scale)


def strength_numbers(strengths: Strengths, z: Tensor) -> tuple[float, int, int, int, int]:
    """(scale, N, z_stride, gate_stride, every) of a kernel."""
    gate = strengths.gates[0]
    return strengths.scale, z.shape[0], z.stride(0), 0 if gate is None else gate.stride(0), strengths.every


def gates_of_token(strengths: Strengths) -> int:
    gate = strengths.gates[0]
    return 1 if gate is None else gate.shape[1]
