"""Shapes of the low-rank update that stress its kernels, and the factors of its formula in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from monkeyjump.ops import reference
from monkeyjump.ops.lowrank import Dropout, Strengths, Update
from tests.ops.common import DEVICE, normal, uniform

pytest.importorskip("triton")
from monkeyjump.ops.kernels import lora_sums
from monkeyjump.ops.kernels.tiles import TILES

OWN = [TILES[name] for name in ("down", "up", "backward", "add_parts")]
TALL = max(tile.rows for tile in OWN)
WIDE = max(tile.columns for tile in OWN)
FULL = WIDE + 1 if DEVICE.type == "cuda" else 11  # a width for the tiles of the GPU, whose memory is what is in doubt


@dataclass(frozen=True)
class Case:
    """N tokens, D input width, one output width a projection, R rank of an A, `experts` B's on it, G gates a token."""

    N: int = 9
    D: int = 20
    outs: tuple[int, ...] = (12,)
    R: int = 2
    experts: int = 1
    G: int = 0  # 0: no gate
    every: int = 1
    diagonal: bool = False
    dropout: float = 0.0
    dtype: torch.dtype = torch.float32

    @property
    def columns(self) -> int:
        return self.R * self.experts

    @property
    def projections(self) -> range:
        return range(len(self.outs))

    def x(self) -> torch.Tensor:
        return normal(self.N, self.D, seed=1, dtype=self.dtype)

    def downs(self) -> list[torch.Tensor]:
        return [normal(self.R, self.D, seed=2 + m, scale=0.5) for m in self.projections]

    def ups(self) -> list[torch.Tensor]:
        return [normal(out, self.columns, seed=20 + m, scale=0.5) for m, out in enumerate(self.outs)]

    def bases(self) -> list[torch.Tensor]:
        return [normal(self.N, out, seed=30 + m, dtype=self.dtype) for m, out in enumerate(self.outs)]

    def z(self) -> torch.Tensor:
        return normal(self.N, len(self.outs) * self.R, seed=40)

    def dzs(self) -> list[torch.Tensor]:
        return [normal(self.N, self.R, seed=50 + m) for m in self.projections]

    def mask(self) -> Dropout | None:
        return Dropout(torch.tensor(2**31 - 7, device=DEVICE), self.dropout) if self.dropout else None

    def strengths(self) -> Strengths:
        """The gates are columns of one tensor, as they come from a router."""
        gates = uniform(self.N // self.every, 1 + self.G * len(self.outs), seed=60)[:, 1:]
        diagonals = [normal(self.columns, seed=70 + m) for m in self.projections]
        return Strengths(
            0.7,
            tuple(gates[:, m * self.G : (m + 1) * self.G] if self.G else None for m in self.projections),
            tuple(diagonals[m] if self.diagonal else None for m in self.projections),
            self.every,
        )

    def update(self) -> Update:
        return Update(self.downs(), self.ups(), self.strengths(), self.mask())

    def kept(self) -> torch.Tensor:
        """What dropout multiplies x by, [N, D] float64."""
        shape = torch.Size((self.N, self.D))
        mask = self.mask()
        if mask is None:
            return torch.ones(shape, dtype=torch.float64, device=DEVICE)
        return reference.keep_mask(shape, mask.seed, mask.p).double() / (1 - mask.p)

    def s(self, strengths: Strengths, m: int) -> torch.Tensor:
        """scale * diagonal[c] * gate[n // every, c // (C / G)] of projection m, [N, C] float64."""
        s = torch.full((self.N, self.columns), strengths.scale, dtype=torch.float64, device=DEVICE)
        n, c = torch.arange(self.N, device=DEVICE)[:, None], torch.arange(self.columns, device=DEVICE)
        gate, diagonal = strengths.gates[m], strengths.diagonals[m]
        if diagonal is not None:
            s = s * diagonal[c]
        if gate is not None:
            s = s * gate[n // self.every, c // (self.columns // self.G)]
        return s

    def scaled(self, z: torch.Tensor, strengths: Strengths, m: int) -> torch.Tensor:
        """z * s of projection m in the columns of its B: column c reads z[:, c % R]."""
        own = z[:, m * self.R : (m + 1) * self.R].double()
        return own[:, torch.arange(self.columns, device=DEVICE) % self.R] * self.s(strengths, m)


CASES = {
    # nothing to add up: every tile is padding but for one entry
    "one of everything": Case(N=1, D=1, outs=(1,), R=1),
    # a single token, as in generation
    "single token": Case(N=1, D=33, outs=(17, 5, 5), R=2, G=1),
    # odd widths below one tile, fewer ranks than a matrix instruction takes
    "odd and narrow": Case(N=13, D=7, outs=(5,), R=3, G=1),
    # two tiles in every direction, the second of them nearly empty
    "past every tile": Case(N=TALL + 1, D=WIDE + 1, outs=(WIDE + 3,), R=4, G=1),
    # no masked entry but of the last projection, which begins where the first one ends
    "exact tiles": Case(N=TALL, D=WIDE, outs=(WIDE, 4), R=8, G=1),
    # the second of three projections begins at no power of two, and their widths differ: the last has two tiles
    "three share x": Case(N=TALL + 6, D=41, outs=(12, 7, WIDE + 3), R=3),
    # each with a gate and a diagonal of its own; the widest is first
    "three with strengths": Case(N=TALL + 6, D=41, outs=(WIDE + 3, 12, 7), R=2, G=1, diagonal=True),
    # columns padded from 33 to 64, and from 66 to 128 where two share x
    "rank 33": Case(outs=(12, 9), R=33, diagonal=True, G=1),
    # a large rank, which fills its columns
    "rank 64": Case(N=TALL + 2, D=40, outs=(24,), R=64, G=1, diagonal=True),
    # as many columns as three large adapters have, and as three mixtures of eight experts of rank 16 have
    "three of rank 64": Case(D=FULL, outs=(24, 8, 8), R=64, G=1),
    "three of eight experts": Case(D=FULL, outs=(9, 3, 1), R=128, G=8),
    # HydraLoRA: four B's on one A
    "shared A": Case(N=21, R=3, experts=4, G=4),
    # HydraLoRA with more columns than a matrix instruction, and no gate
    "shared A, no gate": Case(N=21, R=5, experts=7),
    # HydraLoRA on projections that share x
    "three with shared A's": Case(N=21, outs=(12, 7, 9), R=2, experts=3, G=3),
    # a mixture of four experts of rank 2 as one adapter of rank 8
    "mixture": Case(N=TALL + 3, R=8, G=4),
    # one gate for all tokens of a sequence, a sequence across two row blocks
    "sequence gate": Case(N=3 * (TALL // 2 + 3), R=2, G=1, every=TALL // 2 + 3),
    # two B's on one A, and a mixture, each of as many columns as there are sums for
    "two with experts on one A": Case(N=10, outs=(12, 7), R=2, experts=2, G=2, every=5, diagonal=True),
    "mixture of two": Case(N=21, R=4, G=2),
    # more columns than the tiles of the sums have, beside few of them, in several row blocks of the first alone
    "very wide": Case(N=18, D=1030, outs=(1030, 7), R=2, G=1),
    # the same for a mixture, sequences shorter than a block
    "sequence mixture": Case(N=35, outs=(12, 7), R=6, G=3, every=5, diagonal=True),
    # AdaLoRA without a gate
    "diagonal": Case(N=13, R=4, diagonal=True),
    # the mask is of the position in x, not in the tile
    "dropout": Case(N=TALL + 6, D=WIDE + 44, outs=(12, 7, 9), R=1, G=1, dropout=0.3),
    # almost nothing is left
    "high dropout": Case(N=13, D=41, R=1, dropout=0.9),
}
IN_LOW_PRECISION = ("past every tile", "three with shared A's", "dropout")
OF_X_ALONE = ("dropout", "high dropout")  # the input's
OF_STRENGTH = (
    *("shared A", "shared A, no gate", "mixture", "sequence gate", "sequence mixture", "diagonal"),
    *("two with experts on one A", "mixture of two"),
)
SUMS, PRODUCTS = "sums", "matrix units"


def cases(without: tuple[str, ...]) -> list[tuple[str, Case]]:
    """Every case in fp32 and some in low precision, without those that look at another kernel."""
    found = [(name, case) for name, case in CASES.items() if name not in without]
    for name in IN_LOW_PRECISION:
        if name not in without:
            for dtype in (torch.float16, torch.bfloat16):
                found.append((f"{name}, {dtype}", replace(CASES[name], dtype=dtype)))
    return found


def in_ways(found: list[tuple[str, Case]], by_sums: Callable[[Case], bool]) -> list[Any]:
    """(case, way): through the matrix units, but for what looks at sums alone, and by sums where there are some."""
    return [
        pytest.param(case, way, id=f"{name}, {way}")
        for name, case in found
        for way in (SUMS, PRODUCTS)
        if (by_sums(case) if way == SUMS else name != "very wide")
    ]


def take(way: str, patch: pytest.MonkeyPatch) -> None:
    """Take one way wherever it can be taken, whichever is faster."""
    if way == SUMS:
        patch.setattr(lora_sums, "LEAST_DY", 0)
    else:
        patch.setattr(lora_sums, "MOST_COLUMNS", 0)
        patch.setattr(lora_sums, "COLUMNS_OF_B", ())


DOWN_BACKWARD = [pytest.param(case, id=name) for name, case in cases(without=OF_STRENGTH)]
DOWN = in_ways(cases(without=OF_STRENGTH), lambda case: len(case.outs) * case.R <= lora_sums.MOST_COLUMNS)
UP = in_ways(cases(without=OF_X_ALONE), lambda case: case.columns in lora_sums.COLUMNS_OF_B)
