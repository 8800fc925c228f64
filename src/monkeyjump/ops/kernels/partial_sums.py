"""Sums over tokens: each row block writes its own, and one last kernel adds them up in a fixed order.

That gives the same bits every time, which atomics would not.

Shapes: P row blocks, W entries of a sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from monkeyjump.ops.kernels.launch import Launcher
from monkeyjump.ops.kernels.tiles import TILES, padded, row_blocks


def new_parts(tokens: int, rows: int, width: int, device: torch.device) -> Tensor:
    """Memory [P, W] for the partial sums of row blocks of `rows` tokens."""
    return torch.empty(row_blocks(tokens, rows), width, device=device, dtype=torch.float32)


@triton.jit
def add_parts_kernel(parts, out, Ps, Ws, BP: tl.constexpr, BW: tl.constexpr):
    block = tl.program_id(0)  # the program counts the columns of all sums, one after the other
    first = block * 0
    for i in tl.static_range(len(parts)):
        W = Ws[i]
        if (block >= 0) & (block * BW < W):
            cols = block * BW + tl.arange(0, BW)
            acc = tl.zeros((BP, BW), tl.float32)
            for start in range(0, Ps[i], BP):
                blocks = start + tl.arange(0, BP)
                mask = (blocks < Ps[i])[:, None] & (cols < W)[None, :]
                acc += tl.load(parts[i] + blocks.to(tl.int64)[:, None] * W + cols[None, :], mask=mask, other=0.0)
            tl.store(out + first + cols, tl.sum(acc, 0), mask=cols < W)
        block -= tl.cdiv(W, BW)
        first += W


_add_parts = Launcher(add_parts_kernel)


def total(parts: Sequence[Tensor]) -> Tensor:
    """The sums of all [P, W] over P, one after the other: fp32 [sum of W]."""
    Ps, Ws = tuple(part.shape[0] for part in parts), tuple(part.shape[1] for part in parts)
    out = parts[0].new_empty(sum(Ws))
    tile = TILES["add_parts"]
    _add_parts((sum(row_blocks(W, tile.columns) for W in Ws), 1),
        tuple(parts), out, Ps, Ws, min(padded(max(Ps), 1), tile.rows), tile.columns, warps=tile.warps,
    )  # fmt: skip
    return out
