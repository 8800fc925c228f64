"""The two products of k-means, on matrix units where tokens are bf16: x is read as it is, the other side in two halves.

Shapes: G blocks, M vectors, n tokens, D hidden. An fp32 number as the sum of two bf16 numbers has 16 bits of mantissa.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Tokens whose sum one program of a matrix product makes: short enough for fp32, and enough programs to fill a GPU.
SUMMED_TOGETHER = 1024


def multiplies_narrow(x: Tensor) -> bool:
    """Whether tokens are multiplied without an fp32 copy: only CUDA multiplies bf16 into an fp32 result."""
    return x.dtype == torch.bfloat16 and x.is_cuda and torch.version.hip is None


def halves(value: Tensor, dim: int) -> Tensor:
    """fp32 as two bf16 tensors, the second the error of the first, stacked along a new dimension."""
    high = value.bfloat16()
    return torch.stack([high, (value - high).bfloat16()], dim)


def dots(vectors_GMD: Tensor, tokens_GnD: Tensor) -> Tensor:
    """[G, M, n] fp32."""
    if tokens_GnD.dtype != torch.bfloat16:
        return torch.bmm(vectors_GMD, tokens_GnD.mT)
    high, low = _product(halves(vectors_GMD, 1).flatten(1, 2), tokens_GnD.mT).chunk(2, 1)
    return high.add_(low)


def add_sums(sums_GMD: Tensor, member_GMn: Tensor, weight: Tensor, tokens_GnD: Tensor) -> None:
    """Add to each of the M sums its member tokens times their weight: [G, n], or the halves [G, 2, n] for bf16."""
    if tokens_GnD.dtype != torch.bfloat16:
        sums_GMD.baddbmm_(member_GMn * weight[:, None], tokens_GnD)
        return
    weights = (member_GMn[:, None] * weight[:, :, None]).flatten(1, 2)  # [G, 2M, n]
    for sums, weights_2Mn, tokens_nD in zip(sums_GMD, weights, tokens_GnD, strict=True):
        sums.add_(_weighted_sum(weights_2Mn, tokens_nD).unflatten(0, (2, -1)).sum(0))


def _weighted_sum(weights_Mn: Tensor, tokens_nD: Tensor) -> Tensor:
    """[M, D] fp32, in many short sums: a single one has too few programs, and loses digits where it cuts them off."""
    parts = tokens_nD.shape[0] // SUMMED_TOGETHER
    whole = parts * SUMMED_TOGETHER
    total = torch.zeros(weights_Mn.shape[0], tokens_nD.shape[1], device=tokens_nD.device)
    if parts:
        shape = (parts, SUMMED_TOGETHER)
        weights = weights_Mn[:, :whole].unflatten(1, shape).transpose(0, 1)
        total += _product(weights, tokens_nD[:whole].unflatten(0, shape)).sum(0)
    if whole < tokens_nD.shape[0]:
        total += _product(weights_Mn[None, :, whole:], tokens_nD[None, whole:])[0]
    return total


def _product(a: Tensor, b: Tensor) -> Tensor:
    """bf16 times bf16 in fp32; elsewhere than on CUDA (in tests) by way of copies."""
    return torch.bmm(a, b, out_dtype=torch.float32) if a.is_cuda else torch.bmm(a.float(), b.float())
