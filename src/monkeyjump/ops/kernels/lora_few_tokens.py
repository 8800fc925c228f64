"""The whole low-rank update in one launch, for few tokens (a step of generation).

    y = base + (dropout(x) A^T * s) B^T

With few tokens a launch costs more than what it does. Every program here makes the z = dropout(x) A^T that it needs by
itself, although all tiles of columns of y need the same, instead of waiting for another kernel. Few ranks are computed
by plain sums in fp32, with A and B as they are; more go through the matrix units, rounded as `down` and `up` do.

Shapes: N tokens, D and O input and output width, M projections that share x, R rank of one A, C columns of B (column c
reads z[:, c % R]), G gates of a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from monkeyjump.ops.kernels.dot import product
from monkeyjump.ops.kernels.launch import Launcher
from monkeyjump.ops.kernels.lora_operands import dropped, gates_of_token, mask_numbers, strength, strength_numbers
from monkeyjump.ops.kernels.tiles import TILES, WIDE, columns_of, padded, row_blocks
from monkeyjump.ops.lowrank import Update

MOST_COLUMNS = 128  # columns of B beyond which making z again for every tile costs more than a launch
# Limits of plain sums: ranks, each of which takes registers for every row; columns of B; entries of an A.
SUMS_RANKS, SUMS_COLUMNS, SUMS_ENTRIES = 4, 8, 10_240
EARLY = 4  # steps along a row that a program loads before anything else
ALONG = 256  # entries of a row that one warp works on


@triton.jit
def row_tile(x, rows, N, D, step: tl.constexpr, BD: tl.constexpr):
    cols = columns_of(step * BD, BD, 4)
    inside = (rows < N)[:, None] & (cols < D)[None, :]
    return tl.load(x + rows.to(tl.int64)[:, None] * D + cols[None, :], mask=inside, other=0.0)


@triton.jit
def row_sums(x, early, A, early_A, rows, N, D, seed, threshold, keep_scale,
             R: tl.constexpr, BD: tl.constexpr, STEPS: tl.constexpr):  # fmt: skip
    """z = dropout(x) A^T of a row block, rank by rank: R of [BN, 1]. The first steps have been loaded already."""
    totals = ()
    for step in tl.static_range(STEPS):
        cols = columns_of(step * BD, BD, 4)
        tile = early[step] if step < len(early) else row_tile(x, rows, N, D, step, BD)
        if seed is not None:
            tile = dropped(tile, rows, cols, D, tl.load(seed).to(tl.uint32), threshold)
        found = ()
        for r in tl.static_range(R):
            a = early_A[step * R + r] if step < len(early) else tl.load(A + r * D + cols, mask=cols < D, other=0.0)
            share = tile.to(tl.float32) * a[None, :]
            if step > 0:
                share += totals[r]
            found = found + (share,)  # type: ignore[assignment]  # noqa: RUF005, no star in Triton
        totals = found
    z = ()
    for r in tl.static_range(R):
        z = z + (tl.sum(totals[r], 1, keep_dims=True) * keep_scale,)  # type: ignore[assignment]  # noqa: RUF005
    return z


@triton.jit
def few_sums_kernel(x, As, bases, gates, diagonals, Bs, ys, z, Os, base_strides, strides, seed, threshold, keep_scale,
                    D, scale, N, z_stride, gate_stride, every,
                    R: tl.constexpr, C: tl.constexpr, G: tl.constexpr, BN: tl.constexpr, BO: tl.constexpr,
                    BD: tl.constexpr, STEPS: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """Each program loads before it computes, so that it waits for memory once."""
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    block = tl.program_id(1)  # counts the output columns of all projections, one after the other
    early = ()
    for step in tl.static_range(EARLY):
        early = early + (row_tile(x, rows, N, D, step, BD),)  # type: ignore[assignment]  # noqa: RUF005, no star in Triton
    for m in tl.static_range(len(ys)):
        O = Os[m]
        if (block >= 0) & (block * BO < O):
            early_A, factors, columns = (), (), ()
            for part in tl.static_range(EARLY * R):
                ins = columns_of(part // R * BD, BD, 4)
                a = tl.load(As[m] + (part % R) * D + ins, mask=ins < D, other=0.0)
                early_A = early_A + (a,)  # type: ignore[assignment]  # noqa: RUF005
            outs = block * BO + tl.arange(0, BO)
            inside = (rows < N)[:, None] & (outs < O)[None, :]
            long_rows = rows.to(tl.int64)[:, None]
            tile = tl.load(bases[m] + long_rows * base_strides[m] + outs[None, :], mask=inside, other=0.0)
            for c in tl.static_range(C):
                s = strength(gates[m], diagonals[m], scale, rows, c + tl.arange(0, 1), N, gate_stride, every, C, G)
                factors = factors + (s,)  # type: ignore[assignment]  # noqa: RUF005
            for c in tl.static_range(C):
                b = tl.load(Bs[m] + outs * C + c, mask=outs < O, other=0.0)
                columns = columns + (b,)  # type: ignore[assignment]  # noqa: RUF005
            zs = row_sums(x, early, As[m], early_A, rows, N, D, seed, threshold, keep_scale, R, BD, STEPS)
            delta = tl.zeros((BN, BO), tl.float32)
            for c in tl.static_range(C):
                delta += zs[c % R] * factors[c] * columns[c][None, :]
            where = long_rows * strides[m] + outs[None, :]
            tl.store(ys[m] + where, (tile.to(tl.float32) + delta).to(tile.dtype), mask=inside)
            kept = (rows < tl.where(block == 0, N, 0))[:, None]
            for r in tl.static_range(R):
                tl.store(z + rows[:, None] * z_stride + m * R + r, zs[r], mask=kept)
        block -= tl.cdiv(O, BO)


@triton.jit
def few_products_kernel(x, As, bases, gates, diagonals, Bs, ys, z, Os, base_strides, strides, seed, threshold,
                        keep_scale, D, scale, N, z_stride, gate_stride, every,
                        R: tl.constexpr, C: tl.constexpr, G: tl.constexpr, BN: tl.constexpr, BO: tl.constexpr,
                        BD: tl.constexpr, CP: tl.constexpr):  # fmt: skip
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    cols = tl.arange(0, CP)
    block = tl.program_id(1)
    for m in tl.static_range(len(ys)):
        O = Os[m]
        if (block >= 0) & (block * BO < O):
            outs = block * BO + tl.arange(0, BO)
            inside = (rows < N)[:, None] & (outs < O)[None, :]
            long_rows = rows.to(tl.int64)[:, None]
            tile = tl.load(bases[m] + long_rows * base_strides[m] + outs[None, :], mask=inside, other=0.0)
            within = (cols < C)[:, None] & (outs < O)[None, :]
            b = tl.load(Bs[m] + outs[None, :] * C + cols[:, None], mask=within, other=0.0)
            s = strength(gates[m], diagonals[m], scale, rows, cols, N, gate_stride, every, C, G)
            acc = tl.zeros((BN, CP), tl.float32)
            for start in range(0, D, BD):
                ins = start + tl.arange(0, BD)
                some = (rows < N)[:, None] & (ins < D)[None, :]
                part = tl.load(x + long_rows * D + ins[None, :], mask=some, other=0.0)
                if seed is not None:
                    part = dropped(part, rows, ins, D, tl.load(seed).to(tl.uint32), threshold)
                known = (cols < C)[None, :] & (ins < D)[:, None]
                a = tl.load(As[m] + (cols % R)[None, :] * D + ins[:, None], mask=known, other=0.0)
                acc += product(part, a.to(part.dtype))
            acc *= keep_scale
            delta = product((acc * s).to(tile.dtype), b.to(tile.dtype))
            where = long_rows * strides[m] + outs[None, :]
            tl.store(ys[m] + where, (tile.to(tl.float32) + delta).to(tile.dtype), mask=inside)
            kept = (rows < tl.where(block == 0, N, 0))[:, None] & (cols < R)[None, :]
            tl.store(z + rows[:, None] * z_stride + m * R + cols[None, :], acc, mask=kept)
        block -= tl.cdiv(O, BO)


_few_sums, _few_products = Launcher(few_sums_kernel), Launcher(few_products_kernel)


def at_once(
    x: Tensor, update: Update, bases: Sequence[Tensor], ys: Sequence[Tensor], keep: torch.dtype = torch.float32
) -> Tensor:
    """Writes base + (z * s) B^T into ys and returns z in the dtype `keep`, in one launch (see `lora.down_up`)."""
    As, Bs, strengths, Os = update.As, update.Bs, update.strengths, update.widths
    (N, D), R, C = x.shape, As[0].shape[0], Bs[0].shape[1]
    z = torch.empty(N, len(As) * R, device=x.device, dtype=keep)
    arguments = (
        x, tuple(As), tuple(bases), strengths.gates, strengths.diagonals, tuple(Bs), tuple(ys), z, Os,
        tuple(base.stride(0) for base in bases), tuple(y.stride(0) for y in ys), *mask_numbers(update.dropout), D,
        *strength_numbers(strengths, z), R, C, gates_of_token(strengths),
    )  # fmt: skip
    if R <= SUMS_RANKS and C <= SUMS_COLUMNS and R * D <= SUMS_ENTRIES:
        tile = TILES["few_sums" if D <= WIDE else "few_sums_wide"]
        warps = max(1, min(tile.warps, padded(D) // ALONG))
        rows, width, depth = min(tile.rows, padded(N, 1)), tile.width(max(Os)), min(padded(D), 256 * warps)
        steps = row_blocks(D, depth)
        grid = row_blocks(N, rows), sum(row_blocks(O, width) for O in Os)
        _few_sums(grid, *arguments, rows, width, depth, steps, min(steps, EARLY), warps=warps)
        return z
    tile = TILES["few_products"]
    width, depth = tile.width(max(Os), padded(C)), tile.width(D, padded(C))
    grid = row_blocks(N, tile.rows), sum(row_blocks(O, width) for O in Os)
    _few_products(
        grid, *arguments, tile.rows, width, depth, padded(C), warps=tile.warps, stages=tile.stages
    )  # fmt: skip
    return z
