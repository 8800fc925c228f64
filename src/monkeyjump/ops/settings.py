"""Settings of the ops as kernels and gradients take them: the mask on the input, the factor on the rank, the routing.

Shapes: N tokens, R rank of one A, C columns of B, G gates of a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


def rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """[..., W] as dense rows [N, W], which is what the kernels read; a copy only where it has to be."""
    return tensor.reshape(-1, tensor.shape[-1]).contiguous()


def gate_rows(gate: torch.Tensor) -> torch.Tensor:
    """A gate [..., G] as [N, G] with dense rows; the rows themselves may lie apart, as columns of a wider tensor do."""
    gate = gate.reshape(-1, gate.shape[-1])
    return gate if gate.shape[1] == 1 or gate.stride(1) == 1 else gate.contiguous()


def new_seed(device: torch.device) -> torch.Tensor:
    return torch.randint(2**31, (), device=device)


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
class Strengths:
    """Of every projection of a group: s = scale * diagonal[c] * gate[n // every, c // (C / G)]."""

    scale: float
    gates: tuple[torch.Tensor | None, ...]  # [N / every, G] each, of one row stride; all or none
    diagonals: tuple[torch.Tensor | None, ...]  # [C] each
    every: int = 1  # tokens that share a row of a gate

    @classmethod
    def single(
        cls, scale: float, gate: torch.Tensor | None = None, diagonal: torch.Tensor | None = None, every: int = 1
    ) -> Strengths:
        return cls(scale, (gate,), (diagonal,), every)

    def of(self, m: int, N: int, C: int, with_diagonal: bool = True) -> torch.Tensor | float:
        """s of projection m: a number, or fp32 [C] or [N, C]."""
        s: torch.Tensor | float = self.scale
        diagonal, gate = self.diagonals[m], self.gates[m]
        if diagonal is not None and with_diagonal:
            s = s * diagonal
        if gate is not None:
            gate = gate.repeat_interleave(C // gate.shape[1], 1)
            s = s * (gate if self.every == 1 else gate.repeat_interleave(self.every, 0))
        return s


@dataclass(frozen=True)
class Routing:
    """How similarities become gates and members; the fields of `MonkeyJumpConfig` that say so."""

    top_k: int
    temperature: float
    renormalize: bool
    member_k: int  # experts whose centre a token moves
    unit: bool  # whether the centres follow unit tokens or raw ones


def rank_gradients(
    t: torch.Tensor, z: torch.Tensor, strengths: Strengths, m: int = 0
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(dz [N, R], dgate [N / every, G], ddiagonal [C]) of projection m, from t = dy B [N, C] and its z [N, R]."""
    N, C = t.shape
    R = z.shape[1]
    gate, diagonal = strengths.gates[m], strengths.diagonals[m]
    dz = (t * strengths.of(m, N, C)).view(N, C // R, R).sum(1)  # column c of B reads z[:, c % R]
    along = t * (z if C == R else z.repeat(1, C // R))
    dgate = ddiagonal = None
    if gate is not None:
        G = gate.shape[1]
        scaled = along * (strengths.scale if diagonal is None else strengths.scale * diagonal)
        dgate = scaled.view(N // strengths.every, strengths.every, G, C // G).sum((1, 3))
    if diagonal is not None:
        ddiagonal = (along * strengths.of(m, N, C, with_diagonal=False)).sum(0)
    return dz, dgate, ddiagonal
