"""Kernels for few columns (a low rank, few projections): plain fp32 sums instead of matrix products.

A matrix instruction multiplies 16 columns whatever is asked of it, and its operands pass through shared memory with
barriers between the steps. For a handful of columns plain sums are faster: every thread adds up the entries it has
loaded at once, and only one number of each thread and column crosses to others.

Shapes: as in `lora`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from monkeyjump.ops.kernels.launch import Launcher
from monkeyjump.ops.kernels.lora_operands import base_tile, dropped
from monkeyjump.ops.kernels.tiles import columns_of, first_tiles, lane_sums, next_tiles

MOST_COLUMNS = 8  # columns of z, each of which is an instruction for every entry of x
COLUMNS_OF_B = (1, 2, 4)
LEAST_DY = 512  # columns of every dy from which all threads lie along one row, so that no sum over rows crosses them


@triton.jit
def down_kernel(x, As, z, kept, seed, threshold, keep_scale, N, D,
                R: tl.constexpr, CP: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
                DEPTH: tl.constexpr, V: tl.constexpr, MORE: tl.constexpr):  # fmt: skip
    """With MORE, a row has more tiles than are loaded at once; the next ones are loaded while these are added up."""
    rows, columns = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, CP)
    number: tl.constexpr = R * len(As)
    row_starts = x + rows.to(tl.int64)[:, None] * D
    sums = ()
    for _ in tl.static_range(number):
        sums = sums + (tl.zeros((BN, BD // V), tl.float32),)  # type: ignore[assignment]  # noqa: RUF005, no star in Triton
    ahead = first_tiles(row_starts, rows < N, D, BD, DEPTH, V, MORE)
    for start in range(0, D, BD * DEPTH):
        tiles, ahead = next_tiles(ahead, row_starts, rows < N, start, D, BD, DEPTH, V, MORE)
        for step in tl.static_range(DEPTH):
            cols = columns_of(start + step * BD, BD, V)
            tile = tiles[step]
            if seed is not None:
                tile = dropped(tile, rows, cols, D, tl.load(seed).to(tl.uint32), threshold)
            tile = tile.to(tl.float32)
            added = ()
            for c in tl.static_range(number):
                a = tl.load(As[c // R] + (c % R) * D + cols, mask=cols < D, other=0.0)
                added = added + (sums[c] + lane_sums(tile * a[None, :], BN, BD, V),)  # type: ignore[assignment]  # noqa: RUF005
            sums = added
    found = tl.zeros((BN, CP), tl.float32)
    for c in tl.static_range(number):
        found = tl.where((columns == c)[None, :], tl.sum(sums[c], 1)[:, None], found)
    mask = (rows < N)[:, None] & (columns < number)[None, :]
    where = rows[:, None] * number + columns[None, :]
    tl.store(z + where, found * keep_scale, mask=mask)
    if kept is not None:
        tl.store(kept + where, found * keep_scale, mask=mask)


@triton.jit
def up_kernel(bases, biases, z, gates, diagonals, Bs, ys, Os, base_strides, strides,
              scale, N, z_stride, gate_stride, every,
              R: tl.constexpr, C: tl.constexpr, G: tl.constexpr, BN: tl.constexpr, BO: tl.constexpr):  # fmt: skip
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    block = tl.program_id(1)  # counts the output columns of all projections, one after the other
    for m in tl.static_range(len(ys)):
        O = Os[m]
        if (block >= 0) & (block * BO < O):
            outs = block * BO + tl.arange(0, BO)
            inside = (rows < N)[:, None] & (outs < O)[None, :]
            long_rows = rows.to(tl.int64)[:, None]
            y = base_tile(bases[m], biases[m], long_rows, outs, base_strides[m], O, inside)
            for c in tl.static_range(C):
                values = tl.load(z + m * R + rows * z_stride + c % R, mask=rows < N, other=0.0)
                values *= column_strength(gates[m], scale, rows, N, gate_stride, every, c, C, G)
                if diagonals[m] is not None:
                    values *= tl.load(diagonals[m] + c)
                b = tl.load(Bs[m] + outs * C + c, mask=outs < O, other=0.0)
                y += values[:, None] * b[None, :]
            tl.store(ys[m] + long_rows * strides[m] + outs[None, :], y.to(ys[m].dtype.element_ty), mask=inside)
        block -= tl.cdiv(O, BO)


@triton.jit
def side_by_side(columns, BN: tl.constexpr, BD: tl.constexpr):
    """One [BN, BD, C] of C times [BN, BD], for C = 1, 2 or 4."""
    if len(columns) == 1:
        result = tl.reshape(columns[0], (BN, BD, 1))
    elif len(columns) == 2:
        result = tl.join(columns[0], columns[1])
    else:
        result = tl.reshape(tl.join(tl.join(columns[0], columns[2]), tl.join(columns[1], columns[3])), (BN, BD, 4))
    return result


@triton.jit
def column_strength(gate, scale, rows, N, gate_stride, every, c: tl.constexpr, C: tl.constexpr, G: tl.constexpr):
    """s of column c, without the diagonal: [BN]."""
    s = tl.where(rows < N, scale, 0.0)
    if gate is not None:
        s *= tl.load(gate + (rows // every) * gate_stride + c // (C // G), mask=rows < N, other=0.0)
    return s


@triton.jit
def up_backward_of_one(dy, z, gate, diagonal, B, t, parts, O, stride, scale, N, W,
                       z_stride, t_stride, gate_stride, every,
                       R: tl.constexpr, C: tl.constexpr, G: tl.constexpr, TIMES_S: tl.constexpr,
                       BN: tl.constexpr, BO: tl.constexpr, V: tl.constexpr):  # fmt: skip
    block, columns = tl.program_id(0), tl.arange(0, C)
    rows = block * BN + tl.arange(0, BN)
    weights, sums = (), ()
    for c in tl.static_range(C):
        s = column_strength(gate, scale, rows, N, gate_stride, every, c, C, G)
        values = tl.load(z + rows * z_stride + c % R, mask=rows < N, other=0.0)
        weights = weights + (values * s,)  # type: ignore[assignment]  # noqa: RUF005, no star in Triton
        sums = sums + (tl.zeros((BN, BO // V), tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    row_starts = dy + rows.to(tl.int64)[:, None] * stride
    for start in range(0, O, BO):
        outs = columns_of(start, BO, V)
        inside = (rows < N)[:, None] & (outs < O)[None, :]
        tile = tl.load(row_starts + outs[None, :], mask=inside, other=0.0).to(tl.float32)
        added, shares = (), ()
        for c in tl.static_range(C):
            b = tl.load(B + outs * C + c, mask=outs < O, other=0.0)
            added = added + (sums[c] + lane_sums(tile * b[None, :], BN, BO, V),)  # type: ignore[assignment]  # noqa: RUF005
            shares = shares + (tile * weights[c][:, None],)  # type: ignore[assignment]  # noqa: RUF005
        sums = added
        part = tl.sum(side_by_side(shares, BN, BO), 0)  # [BO, C]
        where = block.to(tl.int64) * W + outs[:, None] * C + columns[None, :]
        tl.store(parts + where, part, mask=(outs < O)[:, None])
    found = tl.zeros((BN, C), tl.float32)
    for c in tl.static_range(C):
        along = tl.sum(sums[c], 1)
        if TIMES_S:
            along *= column_strength(gate, scale, rows, N, gate_stride, every, c, C, G)
            if diagonal is not None:
                along *= tl.load(diagonal + c)
        found = tl.where((columns == c)[None, :], along[:, None], found)
    tl.store(t + rows[:, None] * t_stride + columns[None, :], found, mask=(rows < N)[:, None])


@triton.jit
def up_backward_kernel(dys, z, gates, diagonals, Bs, t, parts, Os, strides, offsets, scale, N, W,
                       z_stride, gate_stride, every,
                       R: tl.constexpr, C: tl.constexpr, G: tl.constexpr, TIMES_S: tl.constexpr,
                       BN: tl.constexpr, BO: tl.constexpr, V: tl.constexpr):  # fmt: skip
    for m in tl.static_range(len(dys)):
        if tl.program_id(1) == m:
            up_backward_of_one(
                dys[m], z + m * R, gates[m], diagonals[m], Bs[m], t + m * C, parts + offsets[m], Os[m], strides[m],
                scale, N, W, z_stride, C * len(dys), gate_stride, every, R, C, G, TIMES_S, BN, BO, V
            )  # fmt: skip


down, up, up_backward = map(Launcher, (down_kernel, up_kernel, up_backward_kernel))
