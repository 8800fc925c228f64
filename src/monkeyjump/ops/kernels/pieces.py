"""What kernels of low-rank updates are made of, and the numbers they are launched with.

Shapes: as in `lora`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from monkeyjump.ops.kernels.tiles import row_blocks
from monkeyjump.ops.settings import Dropout, Strengths


@triton.jit
def dropped(tile, rows, cols, width, seed, threshold):
    """The tile with the zeros of `reference.keep_mask`: entry i of x is kept as a pure function of (seed, i)."""
    start = (rows.to(tl.uint32) * width + seed) * 0x9E3779B1  # modulo 2 ** 32, as all of it
    bits = start[:, None] + (cols.to(tl.uint32) * 0x9E3779B1)[None, :]
    # the second sum of `keep_mask` multiplied out: one instruction an entry less
    bits = (bits ^ (bits >> 15)) * 0x85EBCA6B + seed * ((0xC2B2AE35 * 0x85EBCA6B) % 2**32)
    return tl.where(bits >= threshold, tile, 0.0)


@triton.jit
def stacked(tensors, index, across, row_stride, col_stride, inside, R: tl.constexpr):
    """Entry [i, j] of the tensors stacked along i, R of each: index [.., 1] or [1, ..], across the other way."""
    tile = tl.load(tensors[0] + index * row_stride + across * col_stride, mask=inside & (index < R), other=0.0)
    for m in tl.static_range(1, len(tensors)):
        own = inside & (index >= m * R) & (index < (m + 1) * R)
        tile += tl.load(tensors[m] + (index - m * R) * row_stride + across * col_stride, mask=own, other=0.0)
    return tile


@triton.jit
def stacked_rows(tensors, ranks, cols, D, R: tl.constexpr):
    """The rows of the tensors [R, D], stacked and transposed: [BD, MP]. Few rows are read one by one, each once."""
    if R * len(tensors) <= 16:
        inside = cols < D
        tile = tl.where((ranks == 0)[None, :], tl.load(tensors[0] + cols, mask=inside, other=0.0)[:, None], 0.0)
        for row in tl.static_range(1, R * len(tensors)):
            values = tl.load(tensors[row // R] + (row % R) * D + cols, mask=inside, other=0.0)
            tile = tl.where((ranks == row)[None, :], values[:, None], tile)
    else:
        tile = stacked(tensors, ranks[None, :], cols[:, None], D, 1, (cols < D)[:, None], R)
    return tile


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
def lane_sums(values, BN: tl.constexpr, BD: tl.constexpr, V: tl.constexpr):
    """[BN, BD] -> [BN, BD / V]: what a thread has loaded at once, added up."""
    return tl.sum(tl.reshape(values, (BN, BD // V, V)), 2)


@triton.jit
def columns_of(start, BD: tl.constexpr, V: tl.constexpr):
    """The columns of a step along a row, V for a thread. By fours, bf16 comes to the threads that fp32 comes to."""
    return start + tl.max_contiguous(tl.arange(0, BD), V)


@triton.jit
def row_tiles(row_starts, known, start, D, BD: tl.constexpr, DEPTH: tl.constexpr, V: tl.constexpr):
    """The next tiles of the rows: all of them on their way before the first is used."""
    tiles = ()
    for step in tl.static_range(DEPTH):
        cols = columns_of(start + step * BD, BD, V)
        tile = tl.load(row_starts + cols[None, :], mask=known[:, None] & (cols < D)[None, :], other=0.0)
        tiles = tiles + (tile,)  # type: ignore[assignment]  # noqa: RUF005, no star in Triton
    return tiles


@triton.jit
def first_tiles(row_starts, known, D, BD: tl.constexpr, DEPTH: tl.constexpr, V: tl.constexpr, MORE: tl.constexpr):
    """What `next_tiles` begins with: the first tiles of rows that have MORE than are loaded at once."""
    tiles = ()
    if MORE:
        tiles = row_tiles(row_starts, known, 0, D, BD, DEPTH, V)
    return tiles


@triton.jit
def next_tiles(ahead, row_starts, known, start, D,
               BD: tl.constexpr, DEPTH: tl.constexpr, V: tl.constexpr, MORE: tl.constexpr):  # fmt: skip
    """(The tiles from `start` on, those behind them): the latter are on their way while the former are used."""
    if MORE:
        tiles = ahead
        later = row_tiles(row_starts, known, start + BD * DEPTH, D, BD, DEPTH, V)
    else:
        tiles = row_tiles(row_starts, known, start, D, BD, DEPTH, V)
        later = ()
    return tiles, later


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


def row_strides(bases: Sequence[torch.Tensor | None]) -> tuple[int, ...]:
    return tuple(0 if base is None else base.stride(0) for base in bases)


def mask_numbers(dropout: Dropout | None) -> tuple[torch.Tensor | None, int, float]:
    return (None, 0, 1.0) if dropout is None else (dropout.seed, dropout.threshold, dropout.scale)


def strength_numbers(strengths: Strengths, z: torch.Tensor) -> tuple[float, int, int, int, int]:
    gate = strengths.gates[0]
    return strengths.scale, z.shape[0], z.stride(0), 0 if gate is None else gate.stride(0), strengths.every


def gates_of_token(strengths: Strengths) -> int:
    gate = strengths.gates[0]
    return 1 if gate is None else gate.shape[1]


def depth(D: int, width: int, most: int) -> int:
    """Of the tiles of a row as many as are loaded at once: not more than this, and as many each time."""
    tiles = row_blocks(D, width)
    return row_blocks(tiles, row_blocks(tiles, most))
