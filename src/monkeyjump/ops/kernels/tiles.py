"""Block sizes of the kernels, and how many row blocks a launch has."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"  # Triton reads it when a kernel is defined, so do we


@functools.cache
def padded(columns: int, least: int = 16) -> int:
    """The next power of two, at least what a matrix instruction takes."""
    return max(least, 1 << (columns - 1).bit_length())


def row_blocks(tokens: int, rows: int) -> int:
    return -(-tokens // rows)


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; on the CPU, where kernels are interpreted, few programs are best."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@dataclass(frozen=True)
class Tile:
    """Rows and columns of a program's tile, its warps, and how deep its loop is pipelined."""

    rows: int
    columns: int
    warps: int = 4
    stages: int = 3

    def width(self, columns: int) -> int:
        """The columns of the tile, fewer where the tensor is narrower."""
        return min(padded(columns), self.columns)


TILES = {
    "down": Tile(32, 128, stages=4),
    "up": Tile(32, 128),
    "backward": Tile(32, 128),
    "down_backward": Tile(32, 128),
    "add_parts": Tile(32, 64),
    "scale": Tile(32, 128),
    "scale_backward": Tile(64, 128),
}
