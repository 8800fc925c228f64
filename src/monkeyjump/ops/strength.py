"""What multiplies the rank activation, and the mask on the input, as the kernels and their gradients take them.

Shapes: N tokens, R rank of one A, C columns of B, G gates of a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Dropout:
    """A mask made from its seed wherever it is needed, never stored."""

    seed: torch.Tensor  # int64, []
    p: float

    @property
    def threshold(self) -> int:
        return int(self.p * 2**32)

    @property
    def scale(self) -> float:
        return 1 / (1 - self.p)


@dataclass(frozen=True)
class Strength:
    """The factor on the rank activation: scale * diagonal[c] * gate[n // every, c // (C / G)]."""

    scale: float
    gate: torch.Tensor | None = None  # [N / every, G], last dimension contiguous
    diagonal: torch.Tensor | None = None  # [C]
    every: int = 1  # tokens that share a row of `gate`


def rank_gradients(
    t: torch.Tensor, z: torch.Tensor, strength: Strength
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(dz [N, R], dgate [N / every, G], ddiagonal [C]) from t = dy B [N, C]: what the factors of the rank activation get."""
    N, C = t.shape
    R = z.shape[1]
    spread = z.repeat(1, C // R)  # column c of B reads z[:, c % R]
    dz = (t * strength_of(strength, N, C)).view(N, C // R, R).sum(1)
    dgate = ddiagonal = None
    if strength.gate is not None:
        G = strength.gate.shape[1]
        by_column = t * spread * (strength.scale if strength.diagonal is None else strength.scale * strength.diagonal)
        dgate = by_column.view(N // strength.every, strength.every, G, C // G).sum((1, 3))
    if strength.diagonal is not None:
        without = Strength(strength.scale, strength.gate, None, strength.every)
        ddiagonal = (t * spread * strength_of(without, N, C)).sum(0)
    return dz, dgate, ddiagonal


def strength_of(strength: Strength, N: int, C: int) -> torch.Tensor | float:
    """s, as a number or as fp32 [C], [N, C]."""
    s: torch.Tensor | float = strength.scale
    if strength.diagonal is not None:
        s = s * strength.diagonal
    if strength.gate is not None:
        gate = strength.gate.repeat_interleave(C // strength.gate.shape[1], 1)
        s = s * (gate if strength.every == 1 else gate.repeat_interleave(strength.every, 0))
    return s
