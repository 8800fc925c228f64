"""The parts of a gated low-rank update as the kernels take them (tensors, dropout mask, factors), and their gradients.

Shapes: N tokens, D and O input and output width, M projections, R rank of one A, C columns of B, G gates of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def rows_of(tensor: Tensor) -> Tensor:
    """[..., W] as dense rows [N, W], which is what the kernels read; it is copied only where it has to be."""
    return tensor.reshape(-1, tensor.shape[-1]).contiguous()


def gate_rows(gate: Tensor) -> Tensor:
    """A gate [..., G] as [N, G] with dense rows; the rows themselves may lie apart, as columns of a wider tensor do."""
    gate = gate.reshape(-1, gate.shape[-1])
    return gate if gate.shape[1] == 1 or gate.stride(1) == 1 else gate.contiguous()


@dataclass(frozen=True)
class GateColumns:
    """The gates of a group of projections as columns of one tensor [..., W].

    A compiler is shown the whole tensor. A view that begins somewhere inside is not aligned, and the compiler would
    give up wide loads of whatever is computed from it.
    """

    tensor: Tensor
    first_columns: tuple[int, ...]  # of every projection
    number: int  # G, the columns of one projection

    def by_projection(self) -> list[Tensor]:
        """[..., G] of every projection."""
        return [self.tensor[..., first : first + self.number] for first in self.first_columns]


MOST_SEEDS = 2**31


def new_seed(device: torch.device) -> Tensor:
    return torch.randint(MOST_SEEDS, (), device=device)


@dataclass(frozen=True)
class Dropout:
    """A dropout mask, which is made from its seed wherever it is needed and never stored."""

    seed: Tensor  # int64, []
    p: float

    @classmethod
    def of(cls, seed: Tensor | None, p: float) -> Dropout | None:
        """The mask of this seed, or None without one."""
        return None if seed is None else cls(seed, p)

    @property
    def threshold(self) -> int:
        return int(self.p * 2**32)

    @property
    def scale(self) -> float:
        return 1 / (1 - self.p)


@dataclass(frozen=True)
class Strengths:
    """The factors of every projection of a group: s = scale * diagonal[c] * gate[n // every, c // (C / G)]."""

    scale: float
    gates: tuple[Tensor | None, ...]  # [N / every, G] each, of one row stride; all or none
    diagonals: tuple[Tensor | None, ...]  # [C] each
    every: int = 1  # tokens that share a row of a gate


@dataclass
class Update:
    """The low-rank updates of projections that read the same x: (dropout(x) A^T * s) B^T of each."""

    As: Sequence[Tensor]  # M of [R, D]
    Bs: Sequence[Tensor]  # M of [O, C]
    strengths: Strengths
    dropout: Dropout | None = None

    @property
    def widths(self) -> tuple[int, ...]:
        """O of every projection."""
        return tuple(B.shape[0] for B in self.Bs)


@dataclass
class Projection:
    """One frozen linear and its adapter's tensors."""

    weight: Tensor | None  # [O, D], frozen; None where the frozen output is given
    bias: Tensor | None  # [O], frozen
    A: Tensor  # [R, D]
    B: Tensor  # [O, C]
    gate: Tensor | None  # [..., G] in the leading shape of x, or [B, 1, G]
    diagonal: Tensor | None  # [C]


@dataclass
class Frozen:
    """The weights [O, D] and biases [O] of a group's linears, or one of each where they lie together in memory."""

    weights: list[Tensor]
    biases: list[Tensor | None]

    @classmethod
    def of(cls, projections: Sequence[Projection]) -> Frozen:
        weights = [projection.weight for projection in projections if projection.weight is not None]
        return cls(weights, [projection.bias for projection in projections])

    def by_projection(self, widths: Sequence[int]) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
        """The weights and biases of the linears of these widths, each by itself."""
        if len(self.weights) == len(widths):
            return self.weights, self.biases
        bias = self.biases[0]
        biases = [None] * len(widths) if bias is None else bias.split_with_sizes(widths)
        return self.weights[0].split_with_sizes(widths), biases


def rank_gradients(t: Tensor, z: Tensor, strengths: Strengths, gated: bool) -> tuple[Tensor, list[Tensor | None]]:
    """(dz [N, M * R], M of dgate [N / every, G]) from t = dy B [N, M * C] and z [N, M * R]; gated: gates have one."""
    M = len(strengths.gates)
    N, C, R = t.shape[0], t.shape[1] // M, z.shape[1] // M
    gates = [gate for gate in strengths.gates if gate is not None]
    diagonals = [diagonal for diagonal in strengths.diagonals if diagonal is not None]
    inner = t.view(N, M, C) * (strengths.scale * torch.stack(diagonals) if diagonals else strengths.scale)
    outer: Tensor | float = 1.0
    if gates:
        outer = torch.stack(gates, 1).repeat_interleave(C // gates[0].shape[1], 2)
        outer = outer if strengths.every == 1 else outer.repeat_interleave(strengths.every, 0)
    dz = (inner * outer).view(N, M, C // R, R).sum(2).view(N, M * R)  # column c of B reads z[:, c % R]
    if not gates or not gated:
        return dz, [None] * M
    along = inner * z.view(N, M, 1, R).expand(N, M, C // R, R).reshape(N, M, C)
    G = gates[0].shape[1]
    return dz, list(along.view(N // strengths.every, strengths.every, M, G, C // G).sum((1, 4)).unbind(1))
