"""The frozen product, its bias and the low-rank update in one launch, for few tokens (a step of generation).

    y = x W^T + b + (x A^T * s) B^T

Few tokens make a product as long as it takes to read W, and a launch as long as the product. While a program reads its
rows of W it multiplies the tokens with A as well: both halves of its fp32 entries, which fill a matrix instruction
that would be mostly empty.

Shapes: N tokens, D and O input and output width, M projections that share x, R rank of one A, C columns of B (column c
reads z[:, c % R]), G gates of a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from monkeyjump.ops.kernels.launch import Launcher
from monkeyjump.ops.kernels.pieces import gates_of_token, strength, strength_numbers
from monkeyjump.ops.kernels.products import halves, product
from monkeyjump.ops.kernels.tiles import FEW, TILES, padded, row_blocks
from monkeyjump.ops.settings import Update

HALVES = tl.constexpr(16)  # rows of a matrix instruction, for both halves of every row of A
MOST_RANKS = 8
MOST_COLUMNS = 8  # of B: plain sums


@triton.jit
def few_linear_kernel(x, weights, biases, As, gates, diagonals, Bs, ys, z, Os, strides,
                      D, scale, N, z_stride, gate_stride, every,
                      R: tl.constexpr, C: tl.constexpr, G: tl.constexpr,
                      BN: tl.constexpr, BO: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """Everything transposed, with tokens as columns: a matrix instruction has many rows and may have few columns."""
    rows = tl.arange(0, BN)
    block = tl.program_id(1)  # counts the output columns of all projections, one after the other
    half = tl.arange(0, HALVES)
    for m in tl.static_range(len(ys)):
        O = Os[m]
        if (block >= 0) & (block * BO < O):
            outs = block * BO + tl.arange(0, BO)
            acc, low_rank = tl.zeros((BO, BN), tl.float32), tl.zeros((HALVES, BN), tl.float32)
            for start in range(0, D, BD):
                ins = start + tl.arange(0, BD)
                some = (ins < D)[:, None] & (rows < N)[None, :]
                tile = tl.load(x + rows.to(tl.int64)[None, :] * D + ins[:, None], mask=some, other=0.0)
                known = (outs < O)[:, None] & (ins < D)[None, :]
                w = tl.load(weights[m] + outs.to(tl.int64)[:, None] * D + ins[None, :], mask=known, other=0.0)
                acc += product(w, tile)
                known = (half < 2 * R)[:, None] & (ins < D)[None, :]
                a = tl.load(As[m] + (half % R)[:, None] * D + ins[None, :], mask=known, other=0.0).to(tl.float32)
                high, low = halves(a, tile.dtype)
                low_rank += product(tl.where((half < R)[:, None], high, low), tile)
            if biases[m] is not None:
                acc += tl.load(biases[m] + outs, mask=outs < O, other=0.0).to(tl.float32)[:, None]
            for c in tl.static_range(C):
                found = tl.sum(tl.where((half % R == c % R)[:, None], low_rank, 0.0), 0, keep_dims=True)  # [1, BN]
                s = strength(gates[m], diagonals[m], scale, rows, c + tl.arange(0, 1), N, gate_stride, every, C, G)
                b = tl.load(Bs[m] + outs * C + c, mask=outs < O, other=0.0).to(tl.float32)
                acc += b[:, None] * (found * tl.trans(s))
                if c < R:
                    kept = (rows < tl.where(block == 0, N, 0))[None, :]
                    tl.store(z + rows[None, :] * z_stride + m * R + c, found, mask=kept)
            where = rows.to(tl.int64)[None, :] * strides[m] + outs[:, None]
            tl.store(ys[m] + where, acc.to(x.dtype.element_ty), mask=(rows < N)[None, :] & (outs < O)[:, None])
        block -= tl.cdiv(O, BO)


_few_linear = Launcher(few_linear_kernel)


def fits(x: torch.Tensor, update: Update) -> bool:
    """Whether one launch is made for this: few tokens and columns, no mask, and a dtype of the matrix units."""
    few = x.shape[0] <= FEW and update.As[0].shape[0] <= MOST_RANKS and update.Bs[0].shape[1] <= MOST_COLUMNS
    return few and update.dropout is None and x.dtype in (torch.bfloat16, torch.float16)


def few_linear(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    update: Update,
    keep: torch.dtype = torch.float32,
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """(M of y [N, O]; z = x A^T, [N, M * R], in the dtype to keep it in) for x [N, D]; M of W [O, D] and b [O]."""
    As, Bs, strengths, Os = update.As, update.Bs, update.strengths, update.widths
    (N, D), R, C = x.shape, As[0].shape[0], Bs[0].shape[1]
    z = torch.empty(N, len(As) * R, device=x.device, dtype=keep)
    ys = [torch.empty(N, O, device=x.device, dtype=x.dtype) for O in Os]
    tile, rows = TILES["few_linear"], padded(N)
    _few_linear((1, sum(row_blocks(O, tile.rows) for O in Os)),
        x, tuple(weights), tuple(biases), tuple(As), strengths.gates, strengths.diagonals, tuple(Bs), tuple(ys), z, Os,
        tuple(y.stride(0) for y in ys), D, *strength_numbers(strengths, z), R, C, gates_of_token(strengths),
        rows, tile.rows, tile.width(D), warps=tile.warps, stages=tile.stages,
    )  # fmt: skip
    return ys, z
