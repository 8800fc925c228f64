"""The products of the gated low-rank update, each by the kernels that suit its sizes. Nothing here knows of autograd.

    z = dropout(x) A^T                     down: one pass over x for all projections that read it
    y = base + (z * s) B^T                 up: s[n, c] = scale * diagonal[c] * gate[n // every, c // (C / G)]
    t = dy B,  dB = dy^T (z * s)           up_backward: one pass over dy; s without the diagonal in dB
    dA = dz^T dropout(x),  dx = dz A       down_backward: one pass over x

`lora_few_tokens` does down and up in one launch for the few tokens of a step of generation. `lora_sums` computes few
columns by plain sums, `lora_products` everything else on the matrix units.

Shapes: N tokens, D and O input and output width, M projections that share x, R rank of one A, C columns of B (C = R, or
experts * R where the experts share one A and column c reads z[:, c % R]), G gates of a token, P row blocks. A sum over
tokens is made as partial sums, one for each row block, which `partial_sums.total` adds up.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from monkeyjump.ops.kernels import lora_few_tokens, lora_products, lora_sums
from monkeyjump.ops.kernels.partial_sums import total
from monkeyjump.ops.kernels.tiles import FEW_TOKENS, TILES, row_blocks
from monkeyjump.ops.lowrank import Dropout, Strengths, Update


def down_up(
    x: torch.Tensor,
    update: Update,
    bases: Sequence[torch.Tensor],
    ys: Sequence[torch.Tensor],
    keep: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Writes base + (z * s) B^T into ys, which may be the bases, and returns z = dropout(x) A^T, [N, M * R].

    x [N, D], M of bases and ys [N, O], whose rows may lie in wider tensors. What is added to y is fp32; z is returned
    in the dtype `keep`.
    """
    if x.shape[0] <= FEW_TOKENS and update.Bs[0].shape[1] <= lora_few_tokens.MOST_COLUMNS:
        return lora_few_tokens.at_once(x, update, bases, ys, keep)
    z, kept = down_kept(x, update, keep)
    up(bases, z, update.Bs, update.strengths, ys)
    return kept


def down(
    x: torch.Tensor,
    As: Sequence[torch.Tensor],
    dropout: Dropout | None,
    precise: bool = False,
    kept: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [N, D], M of [R, D] -> z [N, M * R], fp32; also into `kept`, of another dtype.

    Where there are many columns A is rounded to the dtype of x, unless `precise`.
    """
    z = torch.empty(x.shape[0], len(As) * As[0].shape[0], device=x.device, dtype=torch.float32)
    if z.shape[1] <= lora_sums.MOST_COLUMNS:
        lora_sums.down(x, As, dropout, z, kept)
    else:
        lora_products.down(x, As, dropout, precise, z, kept)
    return z


def down_kept(x: torch.Tensor, update: Update, keep: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """z of an update, [N, M * R], in fp32 and in the dtype `keep`."""
    if keep == torch.float32:
        z = down(x, update.As, update.dropout)
        return z, z
    kept = torch.empty(x.shape[0], len(update.As) * update.As[0].shape[0], device=x.device, dtype=keep)
    return down(x, update.As, update.dropout, kept=kept), kept


def up(
    bases: Sequence[torch.Tensor | None],
    z: torch.Tensor,
    Bs: Sequence[torch.Tensor],
    strengths: Strengths,
    ys: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None] | None = None,
) -> None:
    """Writes y = base + bias + (z * s) B^T into ys, which may be the bases.

    M of bases and ys [N, O], whose rows may lie in wider tensors; z [N, M * R]; M of B [O, C] and bias [O]. A base that
    is None counts as zero.
    """
    biases = (None,) * len(Bs) if biases is None else biases
    kernels = lora_sums if Bs[0].shape[1] in lora_sums.COLUMNS_OF_B else lora_products
    kernels.up(bases, z, Bs, strengths, ys, biases)


def up_backward(
    dys: Sequence[torch.Tensor], z: torch.Tensor, Bs: Sequence[torch.Tensor], strengths: Strengths, times_s: bool
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """(t = dy B of every projection, [N, M * C] fp32, times s if asked; the partial sums of all dB [O, C]).

    The dB are those of a diagonal of ones: `lowrank.with_diagonal` makes of them the true ones and the diagonal's.
    """
    t = torch.empty(z.shape[0], len(Bs) * Bs[0].shape[1], device=z.device, dtype=torch.float32)
    kernels = lora_sums if lora_sums.sums_up_backward(Bs) else lora_products
    return t, [kernels.up_backward(dys, z, Bs, strengths, times_s, t)]


def up_backward_blocks(tokens: int, Bs: Sequence[torch.Tensor]) -> int:
    """P of the partial sums that `up_backward` returns."""
    return row_blocks(tokens, TILES["sums_up_backward" if lora_sums.sums_up_backward(Bs) else "backward"].rows)


def down_backward(
    x: torch.Tensor | None,
    dz: torch.Tensor,
    As: Sequence[torch.Tensor],
    dropout: Dropout | None,
    dx: torch.Tensor | None,
    precise: bool = False,
) -> list[torch.Tensor]:
    """Writes dz A into dx [N, D] and returns the partial sums of dA [M * R, D], from dz [N, M * R] fp32.

    Without dx, or without x, that part is left out. dz and A are rounded to the dtype of x, unless `precise`.
    """
    if x is None and dx is None:
        return []
    parts = lora_products.down_backward(x, dz, As, dropout, dx, precise)
    return [] if parts is None else [parts]


def down_backward_alone(
    x: torch.Tensor | None,
    dz: torch.Tensor,
    As: Sequence[torch.Tensor],
    dropout: Dropout | None,
    dx_dtype: torch.dtype | None,
    precise: bool = False,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(dx [N, D], None without a dtype; dA [M * R, D], None without x)."""
    N, (R, D) = dz.shape[0], As[0].shape
    dx = None if dx_dtype is None else torch.empty(N, D, device=dz.device, dtype=dx_dtype)
    parts = down_backward(x, dz, As, dropout, dx, precise)
    return dx, total(parts).view(len(As) * R, D) if parts else None
