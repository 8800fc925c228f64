"""What is local to a token, as plain sums over few columns: torch.compile fuses them into the kernels around them.

A matrix product with two columns is a kernel of its own that reads its input again. Written as sums over the row, it
becomes part of the norm, the rotation or the residual addition that has the row in registers already.

Shapes: N tokens, D width, C few columns, E experts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from monkeyjump.ops import reference
from monkeyjump.ops.settings import Dropout, Routing, Strengths

MOST = 8  # columns; with more, a product on the matrix units is less work
# Which parts of a compiled training step are written out; the others are registered ops. A step without gradients
# (inference) is written out whole. To be set by measurements; no GPU has measured them yet.
TRAINING_PARTS = {"up", "dx"}  # of "down", "up", "dx"


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


def down_input(
    dzs: list[torch.Tensor], As: list[torch.Tensor], dropout: Dropout | None, dtype: torch.dtype
) -> torch.Tensor:
    """dx = dropout'(dz A)."""
    dx = expansion(torch.cat(dzs, 1), torch.cat(As), dtype)
    if dropout is not None:
        dx = dx * reference.keep_mask(dx.shape, dropout.seed, dropout.p) * dropout.scale
    return dx.to(dtype)


def up(base: torch.Tensor, z: torch.Tensor, B: torch.Tensor, strengths: Strengths) -> torch.Tensor:
    """base + (z * s) B^T."""
    N, C = z.shape[0], B.shape[1]
    zs = z.repeat(1, C // z.shape[1]) * strengths.of(0, N, C)
    return (base + expansion(zs, B.T, base.dtype)).to(base.dtype)


def gates(
    h: torch.Tensor, centers: list[torch.Tensor], routing: Routing
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(gates [..., E], cosines [..., E], norms [..., 1]) of h [..., D]."""
    wide = h.float()
    norm = wide.square().sum(-1, keepdim=True).sqrt().clamp_min(reference.EPS)
    cosines = product(wide, F.normalize(torch.stack(centers), dim=-1, eps=reference.EPS)) / norm
    return reference.gates(cosines, routing.top_k, routing.temperature, routing.renormalize), cosines, norm
