"""The products of low-rank updates on the matrix units. `lora` has the formulas and launches these for many columns.

Shapes: as in `lora`; CP and MP are C and M * R padded to what a matrix instruction takes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from monkeyjump.ops.kernels.dot import fp32_product, precise_product, product
from monkeyjump.ops.kernels.launch import Launcher
from monkeyjump.ops.kernels.lora_operands import base_tile, dropped, scaled
from monkeyjump.ops.kernels.tiles import stacked, stacked_rows


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


down, up, up_backward, down_backward = map(Launcher, (down_kernel, up_kernel, up_backward_kernel, down_backward_kernel))
