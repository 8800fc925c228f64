"""Triton kernels of the gated low-rank update and what launches them. Nothing here knows of autograd.

    z = dropout(x) A^T                     down: one pass over x for all projections that read it
    y = base + (z * s) B^T                 up: s[n, c] = scale * diagonal[c] * gate[n // every, c // (C / G)]
    t = dy B,  dB = dy^T (z * s)           up_backward: one pass over dy
    dA = dz^T dropout(x),  dx = dz A       down_backward: one pass over x

Shapes: N tokens, D and O input and output width, M projections that share x, R rank of one A, C columns of B (C = R, or
experts * R where the experts share one A and column c reads z[:, c % R]), G gates of a token, P row blocks. Sums over
tokens are written per row block and added up by a second kernel in a fixed order: the same bits every time, which
atomics would not give.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from monkeyjump.ops.kernels.tiles import INTERPRETED, TILES, padded, row_blocks
from monkeyjump.ops.strength import Dropout, Strength

WIDE = tl.constexpr(INTERPRETED)  # the interpreter cannot multiply bf16: there, operands are widened after rounding


@triton.jit
def product(a, b):
    """a b, accumulated in fp32."""
    if WIDE:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def dropped(tile, rows, cols, width, seed, threshold):
    """The tile with the zeros of `reference.keep_mask`: entry i of x is kept as a pure function of (seed, i)."""
    index = rows.to(tl.int64)[:, None] * width + cols[None, :]
    bits = index.to(tl.uint32) * 0x9E3779B1 + seed
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B
    bits = (bits ^ (bits >> 13)) * 0xC2B2AE35
    return tl.where((bits ^ (bits >> 16)) >= threshold, tile, 0.0)


@triton.jit
def stacked(tensors, index, across, row_stride, col_stride, inside, R: tl.constexpr):
    """Entry [i, j] of the tensors stacked along i, R of each: index [.., 1] or [1, ..], across the other way."""
    tile = tl.load(tensors[0] + index * row_stride + across * col_stride, mask=inside & (index < R), other=0.0)
    for m in tl.static_range(1, len(tensors)):
        own = inside & (index >= m * R) & (index < (m + 1) * R)
        tile += tl.load(tensors[m] + (index - m * R) * row_stride + across * col_stride, mask=own, other=0.0)
    return tile


@triton.jit
def scaled(z, gate, diagonal, scale, rows, cols, N, z_stride, gate_stride, every,
           R: tl.constexpr, C: tl.constexpr, G: tl.constexpr):  # fmt: skip
    """(z, s) of a row block in the columns of B, zero outside: [BN, CP] each."""
    inside = (rows < N)[:, None] & (cols < C)[None, :]
    values = tl.load(z + rows[:, None] * z_stride + (cols % R)[None, :], mask=inside, other=0.0)
    s = tl.where(inside, scale, 0.0)
    if diagonal is not None:
        s *= tl.load(diagonal + cols, mask=cols < C, other=0.0)[None, :]
    if gate is not None:
        where = (rows // every)[:, None] * gate_stride + (cols // (C // G))[None, :]
        s *= tl.load(gate + where, mask=inside, other=0.0)
    return values, s


@triton.jit
def down_kernel(x, As, z, seed, threshold, keep_scale, N, D,
                R: tl.constexpr, MP: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    ranks = tl.arange(0, MP)
    number: tl.constexpr = R * len(As)
    acc = tl.zeros((BN, MP), tl.float32)
    for start in range(0, D, BD):
        cols = start + tl.arange(0, BD)
        inside = (rows < N)[:, None] & (cols < D)[None, :]
        tile = tl.load(x + rows.to(tl.int64)[:, None] * D + cols[None, :], mask=inside, other=0.0)
        if seed is not None:
            tile = dropped(tile, rows, cols, D, tl.load(seed).to(tl.uint32), threshold)
        a = stacked(As, ranks[None, :], cols[:, None], D, 1, (cols < D)[:, None], R)
        acc += product(tile, a.to(tile.dtype))
    mask = (rows < N)[:, None] & (ranks < number)[None, :]
    tl.store(z + rows[:, None] * number + ranks[None, :], acc * keep_scale, mask=mask)


@triton.jit
def up_kernel(base, z, gate, diagonal, B, y, scale, N, O, z_stride, gate_stride, every,
              R: tl.constexpr, C: tl.constexpr, G: tl.constexpr,
              CP: tl.constexpr, BN: tl.constexpr, BO: tl.constexpr):  # fmt: skip
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    outs = tl.program_id(1) * BO + tl.arange(0, BO)
    cols = tl.arange(0, CP)
    inside = (rows < N)[:, None] & (outs < O)[None, :]
    where = rows.to(tl.int64)[:, None] * O + outs[None, :]
    tile = tl.load(base + where, mask=inside, other=0.0)
    b = tl.load(B + outs[None, :] * C + cols[:, None], mask=(cols < C)[:, None] & (outs < O)[None, :], other=0.0)
    values, s = scaled(z, gate, diagonal, scale, rows, cols, N, z_stride, gate_stride, every, R, C, G)
    delta = product((values * s).to(tile.dtype), b.to(tile.dtype))
    tl.store(y + where, (tile.to(tl.float32) + delta).to(tile.dtype), mask=inside)


@triton.jit
def up_backward_kernel(dy, z, gate, diagonal, B, t, parts, scale, N, O, z_stride, gate_stride, every,
                       R: tl.constexpr, C: tl.constexpr, G: tl.constexpr, TIMES_S: tl.constexpr,
                       CP: tl.constexpr, BN: tl.constexpr, BO: tl.constexpr):  # fmt: skip
    block = tl.program_id(0)
    rows = block * BN + tl.arange(0, BN)
    cols = tl.arange(0, CP)
    values, s = scaled(z, gate, diagonal, scale, rows, cols, N, z_stride, gate_stride, every, R, C, G)
    acc = tl.zeros((BN, CP), tl.float32)
    for start in range(0, O, BO):
        outs = start + tl.arange(0, BO)
        inside = (rows < N)[:, None] & (outs < O)[None, :]
        tile = tl.load(dy + rows.to(tl.int64)[:, None] * O + outs[None, :], mask=inside, other=0.0)
        b = tl.load(B + outs[:, None] * C + cols[None, :], mask=(outs < O)[:, None] & (cols < C)[None, :], other=0.0)
        acc += product(tile, b.to(tile.dtype))
        part = product(tl.trans((values * s).to(tile.dtype)), tile)  # [CP, BO]
        mask = (cols < C)[:, None] & (outs < O)[None, :]
        tl.store(parts + (block * C + cols[:, None]) * O + outs[None, :], part, mask=mask)
    mask = (rows < N)[:, None] & (cols < C)[None, :]
    tl.store(t + rows[:, None] * C + cols[None, :], acc * s if TIMES_S else acc, mask=mask)


@triton.jit
def down_backward_kernel(x, dzs, As, dx, parts, seed, threshold, keep_scale, N, D, dz_stride,
                         R: tl.constexpr, MP: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    block = tl.program_id(0)
    rows = block * BN + tl.arange(0, BN)
    cols = tl.program_id(1) * BD + tl.arange(0, BD)
    ranks = tl.arange(0, MP)
    number: tl.constexpr = R * len(dzs)
    inside = (rows < N)[:, None] & (cols < D)[None, :]
    where = rows.to(tl.int64)[:, None] * D + cols[None, :]
    dz = stacked(dzs, ranks[None, :], rows[:, None], 1, dz_stride, (rows < N)[:, None], R) * keep_scale
    if parts is not None:
        tile = tl.load(x + where, mask=inside, other=0.0)
        dtype = tile.dtype
        if seed is not None:
            tile = dropped(tile, rows, cols, D, tl.load(seed).to(tl.uint32), threshold)
        part = product(tl.trans(dz.to(dtype)), tile)  # [MP, BD]
        mask = (ranks < number)[:, None] & (cols < D)[None, :]
        tl.store(parts + (block * number + ranks[:, None]) * D + cols[None, :], part, mask=mask)
    if dx is not None:
        dtype: tl.constexpr = dx.dtype.element_ty
        a = stacked(As, ranks[:, None], cols[None, :], D, 1, (cols < D)[None, :], R)
        back = product(dz.to(dtype), a.to(dtype))
        if seed is not None:
            back = dropped(back, rows, cols, D, tl.load(seed).to(tl.uint32), threshold)
        tl.store(dx + where, back.to(dtype), mask=inside)


@triton.jit
def add_parts_kernel(parts, out, P, C, W, out_row, out_col, BP: tl.constexpr, BW: tl.constexpr):
    """out[c, w] = sum over p of parts[p, c, w]."""
    c = tl.program_id(0)
    cols = tl.program_id(1) * BW + tl.arange(0, BW)
    acc = tl.zeros((BP, BW), tl.float32)
    for start in range(0, P, BP):
        blocks = start + tl.arange(0, BP)
        mask = (blocks < P)[:, None] & (cols < W)[None, :]
        acc += tl.load(parts + (blocks[:, None] * C + c) * W + cols[None, :], mask=mask, other=0.0)
    tl.store(out + c * out_row + cols * out_col, tl.sum(acc, 0), mask=cols < W)


def down(x: torch.Tensor, As: Sequence[torch.Tensor], dropout: Dropout | None) -> torch.Tensor:
    """x [N, D], M of [R, D] -> z [N, M * R], fp32."""
    N, D = x.shape
    R = As[0].shape[0]
    z = torch.empty(N, len(As) * R, device=x.device, dtype=torch.float32)
    tile = TILES["down"]
    down_kernel[(row_blocks(N, tile.rows),)](
        x, tuple(As), z, *_mask(dropout), N, D, R, padded(len(As) * R), tile.rows, tile.width(D),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return z


def up(base: torch.Tensor, z: torch.Tensor, B: torch.Tensor, strength: Strength) -> torch.Tensor:
    """base [N, O], z [N, R], B [O, C] -> base + (z * s) B^T."""
    N, O = base.shape
    y = torch.empty_like(base)
    tile = TILES["up"]
    up_kernel[(row_blocks(N, tile.rows), row_blocks(O, tile.width(O)))](
        base, z, strength.gate, strength.diagonal, B, y, *_numbers(strength, N, O, z), *_columns(strength, z, B),
        padded(B.shape[1]), tile.rows, tile.width(O), num_warps=tile.warps,
    )  # fmt: skip
    return y


def up_backward(
    dy: torch.Tensor, z: torch.Tensor, B: torch.Tensor, strength: Strength, times_s: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(t, dB): t = dy B [N, C] fp32, times s if asked; dB [O, C] fp32."""
    N, O = dy.shape
    C = B.shape[1]
    tile = TILES["up_backward"]
    P = row_blocks(N, tile.rows)
    t = torch.empty(N, C, device=dy.device, dtype=torch.float32)
    parts = torch.empty(P, C, O, device=dy.device, dtype=torch.float32)
    up_backward_kernel[(P,)](
        dy, z, strength.gate, strength.diagonal, B, t, parts, *_numbers(strength, N, O, z), *_columns(strength, z, B),
        times_s, padded(C), tile.rows, tile.width(O), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    dB = torch.empty(O, C, device=dy.device, dtype=torch.float32)
    add_parts(parts, dB, 1, C)
    return t, dB


def down_backward(
    x: torch.Tensor | None,
    dzs: Sequence[torch.Tensor],
    As: Sequence[torch.Tensor],
    dropout: Dropout | None,
    dx_dtype: torch.dtype | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(dx [N, D], None without a dtype; dA [M * R, D] fp32, None without x) from dz, M of [N, R] fp32, one stride."""
    N, D = dzs[0].shape[0], As[0].shape[1]
    R = As[0].shape[0]
    number = len(As) * R
    tile = TILES["down_backward"]
    P = row_blocks(N, tile.rows)
    device = As[0].device
    dx = None if dx_dtype is None else torch.empty(N, D, device=device, dtype=dx_dtype)
    parts = None if x is None else torch.empty(P, number, D, device=device, dtype=torch.float32)
    down_backward_kernel[(P, row_blocks(D, tile.width(D)))](
        x, tuple(dzs), tuple(As), dx, parts, *_mask(dropout), N, D, dzs[0].stride(0), R, padded(number),
        tile.rows, tile.width(D), num_warps=tile.warps,
    )  # fmt: skip
    if parts is None:
        return dx, None
    dA = torch.empty(number, D, device=device, dtype=torch.float32)
    add_parts(parts, dA, D, 1)
    return dx, dA


def add_parts(parts: torch.Tensor, out: torch.Tensor, out_row: int, out_col: int) -> None:
    P, C, W = parts.shape
    tile = TILES["add_parts"]
    width = tile.width(W)
    add_parts_kernel[(C, row_blocks(W, width))](
        parts, out, P, C, W, out_row, out_col, min(padded(P, 1), tile.rows), width, num_warps=tile.warps
    )  # fmt: skip


def _mask(dropout: Dropout | None) -> tuple[torch.Tensor | None, int, float]:
    return (None, 0, 1.0) if dropout is None else (dropout.seed, dropout.threshold, dropout.scale)


def _numbers(strength: Strength, N: int, O: int, z: torch.Tensor) -> tuple[float, int, int, int, int, int]:
    gate_stride = 0 if strength.gate is None else strength.gate.stride(0)
    return strength.scale, N, O, z.stride(0), gate_stride, strength.every


def _columns(strength: Strength, z: torch.Tensor, B: torch.Tensor) -> tuple[int, int, int]:
    return z.shape[1], B.shape[1], 1 if strength.gate is None else strength.gate.shape[1]

