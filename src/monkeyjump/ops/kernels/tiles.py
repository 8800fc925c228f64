"""Block sizes of the kernels, and how many row blocks a launch has."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

FAST_MEMORY = 8192  # entries of the other operand of a tile; several of them lie in a multiprocessor's memory at a time
# tokens up to which a launch costs more than its work, and work is done twice to save one: with 64 tokens one launch
# took a third of the time of two, at widths of 896 and 4096
FEW = 64
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"  # Triton reads it when a kernel is defined, so do we


@functools.cache
def padded(columns: int, least: int = 16) -> int:
    """The next power of two, at least what a matrix instruction takes."""
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
    "thin_down": Tile(32, 128, warps=8, stages=8),
    "thin_down_wide": Tile(32, 256, warps=16, stages=2),
    "thin_up": Tile(32, 128),
    "thin_up_alone": Tile(32, 256),  # without a base to read
    "thin_up_backward": Tile(16, 1024),
    "add_parts": Tile(64, 16),
    "route": Tile(32, 128, stages=4),
    "route_many": Tile(64, 128, stages=4),
    "route_rows": Tile(16, 128, warps=8, stages=2),
    "route_few": Tile(2, 128, warps=1, stages=8),  # one warp: no sum waits for another
    "add_sums": Tile(256, 16),  # at 4,096 tokens all row blocks at once, in a hundred programs
    "scale": Tile(32, 128),
    "nearest": Tile(128, 64),
    "sums": Tile(64, 128),
}
