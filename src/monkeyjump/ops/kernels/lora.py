"""Triton kernels of the gated low-rank update and what launches them. Nothing here knows of autograd.

    z = dropout(x) A^T                     down: one pass over x for all projections that read it
    y = base + (z * s) B^T                 up: s[n, c] = scale * diagonal[c] * gate[n // every, c // (C / G)]
    t = dy B,  dB = dy^T (z * s)           up_backward: one pass over dy; s without the diagonal in dB
    dA = dz^T dropout(x),  dx = dz A       down_backward: one pass over x

Shapes: N tokens, D and O input and output width, M projections that share x, R rank of one A, C columns of B (C = R, or
experts * R where the experts share one A and column c reads z[:, c % R]), G gates of a token, P row blocks. Sums over
tokens are parts: one for each row block, for `parts.total` to add up. Few columns are left to the kernels of `thin`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from monkeyjump.ops.kernels import thin
from monkeyjump.ops.kernels.launch import Launcher
from monkeyjump.ops.kernels.parts import new_parts, total
from monkeyjump.ops.kernels.pieces import (
    base_tile,
    dropped,
    gates_of_token,
    mask_numbers,
    row_strides,
    scaled,
    stacked,
    stacked_rows,
    strength_numbers,
)
from monkeyjump.ops.kernels.products import fp32_product, precise_product, product
from monkeyjump.ops.kernels.tiles import TILES, padded, row_blocks
from monkeyjump.ops.settings import Dropout, Strengths, Update


@triton.jit
def down_kernel(x, As, z, kept, seed, threshold, keep_scale, N, D,
                R: tl.constexpr, MP: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
                PRECISE: tl.constexpr):  # fmt: skip
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
        a = stacked_rows(As, ranks, cols, D, R)
        if PRECISE:
            acc += precise_product(tile, a, tile.dtype == tl.bfloat16)
        else:
            acc += product(tile, a.to(tile.dtype))
    mask = (rows < N)[:, None] & (ranks < number)[None, :]
    where = rows[:, None] * number + ranks[None, :]
    tl.store(z + where, acc * keep_scale, mask=mask)
    if kept is not None:
        tl.store(kept + where, acc * keep_scale, mask=mask)


@triton.jit
def up_kernel(bases, biases, z, gates, diagonals, Bs, ys, Os, base_strides, strides,
              scale, N, z_stride, gate_stride, every, R: tl.constexpr, C: tl.constexpr, G: tl.constexpr,
              CP: tl.constexpr, BN: tl.constexpr, BO: tl.constexpr):  # fmt: skip
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    cols = tl.arange(0, CP)
    block = tl.program_id(1)  # counts the output columns of all projections, one after the other
    for m in tl.static_range(len(ys)):
        O = Os[m]
        if (block >= 0) & (block * BO < O):
            outs = block * BO + tl.arange(0, BO)
            inside = (rows < N)[:, None] & (outs < O)[None, :]
            long_rows = rows.to(tl.int64)[:, None]
            dtype: tl.constexpr = ys[m].dtype.element_ty
            tile = base_tile(bases[m], biases[m], long_rows, outs, base_strides[m], O, inside)
            within = (cols < C)[:, None] & (outs < O)[None, :]
            b = tl.load(Bs[m] + outs[None, :] * C + cols[:, None], mask=within, other=0.0)
            values, s = scaled(
                z + m * R, gates[m], diagonals[m], scale, rows, cols, N, z_stride, gate_stride, every, R, C, G
            )  # fmt: skip
            delta = product((values * s).to(dtype), b.to(dtype))
            where = long_rows * strides[m] + outs[None, :]
            tl.store(ys[m] + where, (tile + delta).to(dtype), mask=inside)
        block -= tl.cdiv(O, BO)


@triton.jit
def up_backward_kernel(dys, z, gates, diagonals, Bs, t, parts, Os, strides, offsets, scale, N, W,
                       z_stride, gate_stride, every,
                       R: tl.constexpr, C: tl.constexpr, G: tl.constexpr, TIMES_S: tl.constexpr,
                       CP: tl.constexpr, BN: tl.constexpr, BO: tl.constexpr):  # fmt: skip
    block = tl.program_id(0)
    rows = block * BN + tl.arange(0, BN)
    cols = tl.arange(0, CP)
    for m in tl.static_range(len(dys)):
        if tl.program_id(1) == m:
            O = Os[m]
            values, s = scaled(
                z + m * R, gates[m], None, scale, rows, cols, N, z_stride, gate_stride, every, R, C, G
            )  # fmt: skip
            acc = tl.zeros((BN, CP), tl.float32)
            for start in range(0, O, BO):
                outs = start + tl.arange(0, BO)
                inside = (rows < N)[:, None] & (outs < O)[None, :]
                tile = tl.load(dys[m] + rows.to(tl.int64)[:, None] * strides[m] + outs[None, :], mask=inside, other=0.0)
                within = (outs < O)[:, None] & (cols < C)[None, :]
                b = tl.load(Bs[m] + outs[:, None] * C + cols[None, :], mask=within, other=0.0)
                acc += product(tile, b.to(tile.dtype))
                part = product(tl.trans(tile), (values * s).to(tile.dtype))  # [BO, CP]
                where = block.to(tl.int64) * W + offsets[m] + outs[:, None] * C + cols[None, :]
                tl.store(parts + where, part, mask=within)
            if diagonals[m] is not None:
                s *= tl.load(diagonals[m] + cols, mask=cols < C, other=0.0)[None, :]
            kept = (rows < N)[:, None] & (cols < C)[None, :]
            where = rows[:, None] * (C * len(dys)) + m * C + cols[None, :]
            tl.store(t + where, acc * s if TIMES_S else acc, mask=kept)


@triton.jit
def down_backward_kernel(x, dz, As, dx, parts, seed, threshold, keep_scale, N, D,
                         R: tl.constexpr, MP: tl.constexpr,
                         BN: tl.constexpr, BD: tl.constexpr, PRECISE: tl.constexpr):  # fmt: skip
    block = tl.program_id(0)
    rows = block * BN + tl.arange(0, BN)
    cols = tl.program_id(1) * BD + tl.arange(0, BD)
    ranks = tl.arange(0, MP)
    number: tl.constexpr = R * len(As)
    inside = (rows < N)[:, None] & (cols < D)[None, :]
    where = rows.to(tl.int64)[:, None] * D + cols[None, :]
    known = (rows < N)[:, None] & (ranks < number)[None, :]
    dz_tile = tl.load(dz + rows[:, None] * number + ranks[None, :], mask=known, other=0.0) * keep_scale
    if parts is not None:
        tile = tl.load(x + where, mask=inside, other=0.0)
        if seed is not None:
            tile = dropped(tile, rows, cols, D, tl.load(seed).to(tl.uint32), threshold)
        if PRECISE:
            part = tl.trans(precise_product(tl.trans(tile), dz_tile, tile.dtype == tl.bfloat16))  # [MP, BD]
        else:
            part = product(tl.trans(dz_tile.to(tile.dtype)), tile)
        mask = (ranks < number)[:, None] & (cols < D)[None, :]
        tl.store(parts + (block.to(tl.int64) * number + ranks[:, None]) * D + cols[None, :], part, mask=mask)
    if dx is not None:
        a = stacked(As, ranks[:, None], cols[None, :], D, 1, (cols < D)[None, :], R)
        if PRECISE:
            back = fp32_product(dz_tile, a, dx.dtype.element_ty == tl.bfloat16)
        else:
            back = product(dz_tile.to(dx.dtype.element_ty), a.to(dx.dtype.element_ty))
        if seed is not None:
            back = dropped(back, rows, cols, D, tl.load(seed).to(tl.uint32), threshold)
        tl.store(dx + where, back.to(dx.dtype.element_ty), mask=inside)


_down, _up, _up_backward, _down_backward = map(
    Launcher, (down_kernel, up_kernel, up_backward_kernel, down_backward_kernel)
)


def down(
    x: torch.Tensor,
    As: Sequence[torch.Tensor],
    dropout: Dropout | None,
    precise: bool = False,
    kept: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [N, D], M of [R, D] -> z [N, M * R], fp32; also into `kept`, of another dtype.

    Of many columns A is rounded to the dtype of x, unless `precise`.
    """
    N, D = x.shape
    R = As[0].shape[0]
    z = torch.empty(N, len(As) * R, device=x.device, dtype=torch.float32)
    if len(As) * R <= thin.MOST_COLUMNS:
        thin.down(x, As, dropout, z, kept)
        return z
    tile, columns = TILES["down"], padded(len(As) * R)
    _down((row_blocks(N, tile.rows), 1),
        x, tuple(As), z, kept, *mask_numbers(dropout), N, D, R, columns, tile.rows,
        tile.width(D, columns if columns == 16 else len(As) * columns), precise,
        warps=tile.warps, stages=tile.stages if columns <= 128 else 2,
    )  # fmt: skip
    return z


def down_kept(x: torch.Tensor, update: Update, keep: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """z of an update, [N, M * R]: in fp32, and in the dtype to keep it in."""
    if keep == torch.float32:
        z = down(x, update.As, update.dropout)
        return z, z
    kept = torch.empty(x.shape[0], len(update.As) * update.As[0].shape[0], device=x.device, dtype=keep)
    return down(x, update.As, update.dropout, kept=kept), kept


def up(
    bases: Sequence[torch.Tensor | None],
    z: torch.Tensor,
    Bs: Sequence[torch.Tensor],
    strengths: Strengths,
    ys: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None] | None = None,
) -> None:
    """y = base + bias + (z * s) B^T into ys, which may be the bases: M of [N, O]; z [N, M * R], B [O, C], bias [O].

    Their rows may lie in wider tensors. Without a base it is zero.
    """
    N, M = z.shape[0], len(Bs)
    C = Bs[0].shape[1]
    biases = (None,) * M if biases is None else biases
    if C in thin.COLUMNS_OF_B:
        thin.up(bases, z, Bs, strengths, ys, biases)
        return
    Os = tuple(B.shape[0] for B in Bs)
    tile = TILES["up"]
    width = tile.width(max(Os), padded(C))
    _up((row_blocks(N, tile.rows), sum(row_blocks(O, width) for O in Os)),
        tuple(bases), tuple(biases), z, strengths.gates, strengths.diagonals, tuple(Bs), tuple(ys), Os,
        row_strides(bases), tuple(y.stride(0) for y in ys), *strength_numbers(strengths, z),
        z.shape[1] // M, C, gates_of_token(strengths), padded(C), tile.rows, width, warps=tile.warps,
    )  # fmt: skip


def up_backward(
    dys: Sequence[torch.Tensor], z: torch.Tensor, Bs: Sequence[torch.Tensor], strengths: Strengths, times_s: bool
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """(t = dy B of every projection, [N, M * C] fp32, times s if asked; the parts of all dB [O, C]).

    The dB are those of a diagonal of ones: `settings.with_diagonal` makes of them the true ones and the diagonal's.
    """
    N, M = z.shape[0], len(Bs)
    C = Bs[0].shape[1]
    t = torch.empty(N, M * C, device=z.device, dtype=torch.float32)
    if thin.sums_up_backward(Bs):
        return t, [thin.up_backward(dys, z, Bs, strengths, times_s, t)]
    Os = tuple(B.shape[0] for B in Bs)
    tile = TILES["backward"]
    parts = new_parts(N, tile.rows, sum(Os) * C, z.device)
    _up_backward((parts.shape[0], M),
        tuple(dys), z, strengths.gates, strengths.diagonals, tuple(Bs), t, parts, Os,
        tuple(dy.stride(0) for dy in dys), tuple(sum(Os[:m]) * C for m in range(M)), strengths.scale, N,
        parts.shape[1], *strength_numbers(strengths, z)[2:], z.shape[1] // M, C, gates_of_token(strengths),
        times_s, padded(C), tile.rows, tile.width(max(Os), padded(C)), warps=tile.warps, stages=tile.stages,
    )  # fmt: skip
    return t, [parts]


def down_backward(
    x: torch.Tensor | None,
    dz: torch.Tensor,
    As: Sequence[torch.Tensor],
    dropout: Dropout | None,
    dx: torch.Tensor | None,
    precise: bool = False,
) -> list[torch.Tensor]:
    """From dz [N, M * R] fp32: dz A into dx [N, D], and the parts of dA [M * R, D].

    Without dx, or without x, that part is left out. dz and A are rounded to the dtype of x, unless `precise`.
    """
    if x is None and dx is None:
        return []
    N, (R, D) = dz.shape[0], As[0].shape
    columns = padded(len(As) * R)
    tile = TILES["backward" if D <= thin.WIDE else "down_backward_wide"]
    width = tile.width(D, columns)
    parts = None if x is None else new_parts(N, tile.rows, len(As) * R * D, dz.device)
    _down_backward((row_blocks(N, tile.rows), row_blocks(D, width)),
        x, dz, tuple(As), dx, parts, *mask_numbers(dropout), N, D, R, columns, tile.rows, width, precise,
        warps=tile.warps,
    )  # fmt: skip
    return [] if parts is None else [parts]


def up_backward_alone(
    dy: torch.Tensor, z: torch.Tensor, B: torch.Tensor, strengths: Strengths, times_s: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(t [N, C], dB [O, C] for a diagonal of ones) of one projection."""
    t, parts = up_backward([dy], z, [B], strengths, times_s)
    return t, total(parts).view(B.shape)


def down_backward_alone(
    x: torch.Tensor | None,
    dz: torch.Tensor,
    As: Sequence[torch.Tensor],
    dropout: Dropout | None,
    dx_dtype: torch.dtype | None,
    precise: bool = False,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(dx [N, D], None without a dtype; dA [M * R, D], None without x)."""
    N, (R, D) = dz.shape[0], As[0].shape
    dx = None if dx_dtype is None else torch.empty(N, D, device=dz.device, dtype=dx_dtype)
    parts = down_backward(x, dz, As, dropout, dx, precise)
    return dx, total(parts).view(len(As) * R, D) if parts else None
