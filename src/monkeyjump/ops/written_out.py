"""Compiled inference: products with few columns as plain sums, which torch.compile fuses into the kernels around them.

With few tokens every kernel costs its launch. A matrix product with two columns is a kernel of its own; written as sums
over the row, it becomes part of the norm, the rotation or the residual addition around it. With the many tokens of a
training step this form is the slower one (docs/speed.md). Where groups of projections are known, they are used instead.

Shapes: N tokens, D width, C few columns.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from monkeyjump.ops import reference
from monkeyjump.ops.settings import Dropout, Strengths

MOST = 8  # columns; with more, a product on the matrix units is less work


def product(x: torch.Tensor, W: torch.Tensor) -> torch.Tensor:
    """x W^T for x fp32 [..., D], W [C, D]: fp32 [..., C]."""
    if W.shape[0] > MOST:
        return F.linear(x.to(W.dtype), W).float()
    return torch.stack([(x * row.float()).sum(-1) for row in W.unbind()], -1)


def expansion(z: torch.Tensor, W: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """z W for z [N, C], W [C, D], both rounded to `dtype`."""
    z, W = z.to(dtype), W.to(dtype)
    if z.shape[1] > MOST:
        return F.linear(z, W.T)
    total = z[:, :1].float() * W[0].float()
    for column in range(1, z.shape[1]):
        total = total + z[:, column : column + 1].float() * W[column].float()
    return total


def down(x: torch.Tensor, As: list[torch.Tensor], dropout: Dropout | None) -> torch.Tensor:
    """dropout(x) A^T of every A side by side."""
    wide = x.float()
    if dropout is not None:
        wide = wide * reference.keep_mask(x.shape, dropout.seed, dropout.p) * dropout.scale
    return product(wide, torch.cat(As).to(x.dtype))


def up(base: torch.Tensor, z: torch.Tensor, B: torch.Tensor, strengths: Strengths) -> torch.Tensor:
    """base + (z * s) B^T."""
    N, C = z.shape[0], B.shape[1]
    zs = z.repeat(1, C // z.shape[1]) * strengths.first(N, C)
    return (base + expansion(zs, B.T, base.dtype)).to(base.dtype)
