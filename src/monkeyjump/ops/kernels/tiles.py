"""Block sizes of the kernels, the number of row blocks of a launch, and loading the rows of a tensor tile by tile."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

import triton
import triton.language as tl

FAST_MEMORY = 8192  # entries of the other operand of a tile; a multiprocessor's memory holds several such operands
# Up to this many tokens a launch costs more than its work, so that work is done twice to save one. With 64 tokens one
# launch took a third of the time of two on an H200, at widths of 896 and 4096.
FEW_TOKENS = 64
WIDE = 1024  # columns of x beyond which kernels take other tiles: wider ones, or more warps for a row
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"  # Triton reads it when a kernel is defined, so do we


@functools.cache
def padded(columns: int, least: int = 16) -> int:
    """The next power of two, but at least the columns that a matrix instruction takes."""
    return max(least, 1 << (columns - 1).bit_length())


def row_blocks(tokens: int, rows: int) -> int:
    return -(-tokens // rows)


@dataclass(frozen=True)
class Tile:
    """Rows and columns of a program's tile, its warps, and how many tiles are loaded ahead."""

    rows: int
    columns: int
    warps: int = 4
    stages: int = 3

    def width(self, columns: int, beside: int = 1) -> int:
        """The columns of the tile: fewer where the tensor is narrower, or has many entries `beside` each column."""
        return min(padded(columns), self.columns, max(16, FAST_MEMORY // padded(beside)))


TILES = {
    "down": Tile(32, 128, stages=4),
    "up": Tile(32, 128),
    "few_sums": Tile(4, 128),
    "few_sums_wide": Tile(4, 256),
    "few_products": Tile(16, 128),
    "backward": Tile(64, 128, warps=8),
    "down_backward_wide": Tile(64, 64),
    "sums_down": Tile(32, 128, warps=8, stages=8),
    "sums_down_wide": Tile(32, 256, warps=16, stages=2),
    "sums_up": Tile(32, 128),
    "sums_up_alone": Tile(32, 256),  # without a base to read
    "sums_up_backward": Tile(16, 1024),
    "add_parts": Tile(64, 16),
    "route": Tile(32, 128, stages=4),
    "route_many": Tile(64, 128, stages=4),
    "route_rows": Tile(16, 128, warps=8, stages=2),
    "route_few": Tile(2, 128, warps=1, stages=8),  # with one warp no sum waits for another
    "add_sums": Tile(256, 16),  # at 4,096 tokens all row blocks at once, in a hundred programs
    "scale": Tile(32, 128),
    "nearest": Tile(128, 64),
    "sums": Tile(64, 128),
}


def tiles_at_once(D: int, width: int, most: int) -> int:
    """How many tiles of a row are loaded at once: at most `most`, and the same number at every step along the row."""
    tiles = row_blocks(D, width)
    return row_blocks(tiles, row_blocks(tiles, most))


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
def lane_sums(values, BN: tl.constexpr, BD: tl.constexpr, V: tl.constexpr):
    """[BN, BD] -> [BN, BD / V]: each thread adds up what it has loaded at once."""
    return tl.sum(tl.reshape(values, (BN, BD // V, V)), 2)


@triton.jit
def columns_of(start, BD: tl.constexpr, V: tl.constexpr):
    """The columns of a step along a row, V for a thread. By fours, bf16 comes to the threads that fp32 comes to."""
    return start + tl.max_contiguous(tl.arange(0, BD), V)


@triton.jit
def row_tiles(row_starts, known, start, D, BD: tl.constexpr, DEPTH: tl.constexpr, V: tl.constexpr):
    """The next tiles of the rows; all of them are on their way before the first is used."""
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
