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
from torch import Tensor

from monkeyjump.ops.kernels import lora_few_tokens, lora_products, lora_sums
from monkeyjump.ops.kernels.lora_operands import gates_of_token, mask_numbers, strength_numbers
from monkeyjump.ops.kernels.partial_sums import new_parts
from monkeyjump.ops.kernels.tiles import FEW_TOKENS, TILES, WIDE, padded, row_blocks, tiles_at_once
from monkeyjump.ops.lowrank import Dropout, Strengths, Update


def down_up(
    x: Tensor, update: Update, bases: Sequence[Tensor], ys: Sequence[Tensor], keep: torch.dtype = torch.float32
) -> Tensor:
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
    x: Tensor, As: Sequence[Tensor], dropout: Dropout | None, precise: bool = False, kept: Tensor | None = None
) -> Tensor:
    """x [N, D], M of [R, D] -> z [N, M * R], fp32; also into `kept`, of another dtype.

    Where there are many columns A is rounded to the dtype of x, unless `precise`.
    """
    (N, D), M, R = x.shape, len(As), As[0].shape[0]
    z = torch.empty(N, M * R, device=x.device, dtype=torch.float32)
    operands = x, tuple(As), z, kept, *mask_numbers(dropout), N, D, R
    if M * R <= lora_sums.MOST_COLUMNS:
        tile = TILES["sums_down" if D <= WIDE else "sums_down_wide"]
        width = tile.width(D)
        ahead = tiles_at_once(D, width, tile.stages)
        lora_sums.down((row_blocks(N, tile.rows), 1), *operands,
            padded(M * R, 1), tile.rows, width, ahead, 8 if D <= WIDE else 4, ahead * width < D, warps=tile.warps,
        )  # fmt: skip
        return z
    tile, columns = TILES["down"], padded(M * R)
    width = tile.width(D, columns if columns == 16 else M * columns)
    lora_products.down((row_blocks(N, tile.rows), 1), *operands,
        columns, tile.rows, width, precise, warps=tile.warps, stages=tile.stages if columns <= 128 else 2,
    )  # fmt: skip
    return z


def down_kept(x: Tensor, update: Update, keep: torch.dtype) -> tuple[Tensor, Tensor]:
    """z of an update, [N, M * R], in fp32 and in the dtype `keep`."""
    if keep == torch.float32:
        z = down(x, update.As, update.dropout)
        return z, z
    kept = torch.empty(x.shape[0], len(update.As) * update.As[0].shape[0], device=x.device, dtype=keep)
    return down(x, update.As, update.dropout, kept=kept), kept


def up(
    bases: Sequence[Tensor | None],
    z: Tensor,
    Bs: Sequence[Tensor],
    strengths: Strengths,
    ys: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None = None,
) -> None:
    """Writes y = base + bias + (z * s) B^T into ys, which may be the bases.

    M of bases and ys [N, O], whose rows may lie in wider tensors; z [N, M * R]; M of B [O, C] and bias [O]. A base that
    is None counts as zero. On the matrix units z * s and B are rounded to the dtype of y.
    """
    M, C, Os = len(Bs), Bs[0].shape[1], tuple(B.shape[0] for B in Bs)
    if C in lora_sums.COLUMNS_OF_B:
        tile = TILES["sums_up" if any(base is not None for base in bases) else "sums_up_alone"]
        launch, width = lora_sums.up, tile.width(max(Os))
        sizes: tuple[int, ...] = (tile.rows, width)
    else:
        tile = TILES["up"]
        launch, width = lora_products.up, tile.width(max(Os), padded(C))
        sizes = (padded(C), tile.rows, width)
    base_strides = tuple(0 if base is None else base.stride(0) for base in bases)
    launch((row_blocks(z.shape[0], tile.rows), sum(row_blocks(O, width) for O in Os)),
        tuple(bases), (None,) * M if biases is None else tuple(biases), z, strengths.gates, strengths.diagonals,
        tuple(Bs), tuple(ys), Os, base_strides, tuple(y.stride(0) for y in ys), *strength_numbers(strengths, z),
        z.shape[1] // M, C, gates_of_token(strengths), *sizes, warps=tile.warps,
    )  # fmt: skip


def up_backward(
    dys: Sequence[Tensor], z: Tensor, Bs: Sequence[Tensor], strengths: Strengths, times_s: bool
) -> tuple[Tensor, Tensor]:
    """(t = dy B of every projection, [N, M * C] fp32, times s if asked; the partial sums of all dB [O, C]).

    The dB are those of a diagonal of ones: `gated_lora` makes of them the true ones and the diagonal's.
    """
    N, M, C, Os = z.shape[0], len(Bs), Bs[0].shape[1], tuple(B.shape[0] for B in Bs)
    t = torch.empty(N, M * C, device=z.device, dtype=torch.float32)
    if _sums_up_backward(Bs):
        launch, tile = lora_sums.up_backward, TILES["sums_up_backward"]
        sizes: tuple[int, ...] = (tile.rows, min(padded(max(Os)), tile.columns), 8)
    else:
        launch, tile = lora_products.up_backward, TILES["backward"]
        sizes = (padded(C), tile.rows, tile.width(max(Os), padded(C)))
    parts = new_parts(N, tile.rows, sum(Os) * C, z.device)
    launch((parts.shape[0], M),
        tuple(dys), z, strengths.gates, strengths.diagonals, tuple(Bs), t, parts, Os,
        tuple(dy.stride(0) for dy in dys), tuple(sum(Os[:m]) * C for m in range(M)), strengths.scale, N,
        parts.shape[1], *strength_numbers(strengths, z)[2:], z.shape[1] // M, C, gates_of_token(strengths),
        times_s, *sizes, warps=tile.warps,
    )  # fmt: skip
    return t, parts


def up_backward_blocks(tokens: int, Bs: Sequence[Tensor]) -> int:
    """P of the partial sums that `up_backward` returns."""
    return row_blocks(tokens, TILES["sums_up_backward" if _sums_up_backward(Bs) else "backward"].rows)


def _sums_up_backward(Bs: Sequence[Tensor]) -> bool:
    """Whether plain sums are the faster way of `up_backward`."""
    return Bs[0].shape[1] in lora_sums.COLUMNS_OF_B and min(B.shape[0] for B in Bs) >= lora_sums.LEAST_DY


def down_backward(
    x: Tensor | None,
    dz: Tensor,
    As: Sequence[Tensor],
    dropout: Dropout | None,
    dx: Tensor | None,
    precise: bool = False,
) -> list[Tensor]:
    """Writes dz A into dx [N, D] and returns the partial sums of dA [M * R, D], from dz [N, M * R] fp32.

    Without dx, or without x, that part is left out. dz and A are rounded to the dtype of x, unless `precise`.
    """
    if x is None and dx is None:
        return []
    N, M, (R, D) = dz.shape[0], len(As), As[0].shape
    columns, tile = padded(M * R), TILES["backward" if D <= WIDE else "down_backward_wide"]
    width = tile.width(D, columns)
    parts = None if x is None else new_parts(N, tile.rows, M * R * D, dz.device)
    lora_products.down_backward((row_blocks(N, tile.rows), row_blocks(D, width)),
        x, dz, tuple(As), dx, parts, *mask_numbers(dropout), N, D, R, columns, tile.rows, width, precise,
        warps=tile.warps,
    )  # fmt: skip
    return [] if parts is None else [parts]
