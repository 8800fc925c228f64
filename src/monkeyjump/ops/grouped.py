"""Frozen linears that read the same input, with their low-rank updates, as one differentiable op for eager mode.

    y_m = x W_m^T + b_m + (dropout(x) A_m^T * s_m) B_m^T

In eager mode on small models the host is slower than the GPU: what counts is the number of launches and of autograd
nodes. One node holds all projections of a group; its backward adds every contribution into one dx, where autograd
would keep one tensor per projection and adapter and add them up.

Shapes: N tokens, D input width, M projections of widths O, R rank, C columns of B, G gates of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from monkeyjump.ops.kernels import lora as kernels
from monkeyjump.ops.kernels.lora import Parts
from monkeyjump.ops.settings import Dropout, Strengths, gate_rows, new_seed, rank_gradients, rows_of

FIELDS = 6  # tensors of one projection among the arguments of the autograd function


@dataclass
class Projection:
    """One frozen linear and its adapter's tensors."""

    weight: torch.Tensor  # [O, D], frozen
    bias: torch.Tensor | None  # [O], frozen
    A: torch.Tensor  # [R, D]
    B: torch.Tensor  # [O, C]
    gate: torch.Tensor | None  # [..., G] in the leading shape of x, or [B, 1, G]
    diagonal: torch.Tensor | None  # [C]


def grouped_lora(
    x: torch.Tensor, projections: Sequence[Projection], scale: float, dropout: float, seed: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """y of every projection for x [..., D]; all A of one shape, all gated or none; one mask, of this seed or a new."""
    gates = [None if projection.gate is None else gate_rows(projection.gate) for projection in projections]
    if len({gate.stride(0) for gate in gates if gate is not None}) > 1:
        gates = [None if gate is None else gate.contiguous() for gate in gates]
    every = 1 if gates[0] is None else x.numel() // x.shape[-1] // gates[0].shape[0]
    arguments: list[torch.Tensor | None] = []
    for projection, gate in zip(projections, gates, strict=True):
        A, B = projection.A.contiguous(), projection.B.contiguous()
        arguments += [projection.weight, projection.bias, A, B, gate, projection.diagonal]
    seed = None if dropout == 0 else new_seed(x.device) if seed is None else seed
    return _apply(x, seed, (scale, dropout, every), *arguments)


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seed: torch.Tensor | None, settings: tuple, *arguments: Any) -> Any:
        scale, p, every = settings
        flat = rows_of(x)
        weights, biases, As, Bs, gates, diagonals = (arguments[i::FIELDS] for i in range(FIELDS))
        z = kernels.down(flat, As, None if seed is None else Dropout(seed, p))
        bases = [F.linear(flat, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
        kernels.up(bases, z, Bs, Strengths(scale, gates, diagonals, every), bases)
        trained = any(A.requires_grad for A in As)
        ctx.save_for_backward(flat if trained else None, seed, z, *arguments)
        ctx.settings, ctx.shape, ctx.dtype = settings, x.shape, x.dtype
        return tuple(base.view(*x.shape[:-1], base.shape[1]) for base in bases)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        flat, seed, z, *arguments = ctx.saved_tensors
        scale, p, every = ctx.settings
        weights, _, As, Bs, gates, diagonals = (tuple(arguments[i::FIELDS]) for i in range(FIELDS))
        M, (R, D), C = len(As), As[0].shape, Bs[0].shape[1]
        dys = [rows_of(grad) for grad in grads]
        strengths = Strengths(scale, gates, diagonals, every)
        gate_grads = [ctx.needs_input_grad[3 + m * FIELDS + 4] for m in range(M)]
        simple = diagonals[0] is None and C == R and not any(gate_grads)
        ups = sum(B.numel() for B in Bs)
        parts = Parts.of(z.shape[0], ups + (0 if flat is None else M * R * D), z.device)
        ts = kernels.up_backward(dys, z, Bs, strengths, simple, parts)
        result: list[Any] = [None] * (M * FIELDS)
        dzs = ts
        if not simple:
            dzs = []
            for m, t in enumerate(ts):
                dz, dgate, ddiagonal = rank_gradients(t, z[:, m * R : (m + 1) * R], strengths, m)
                dzs.append(dz)
                result[m * FIELDS + 4] = dgate if gate_grads[m] else None
                result[m * FIELDS + 5] = ddiagonal
        dx = _through_weights(dys, weights) if ctx.needs_input_grad[0] else None
        if dx is not None or flat is not None:
            dropout = None if seed is None else Dropout(seed, p)
            kernels.down_backward(flat, dzs, As, dropout, dx, parts, ups, add=True)
        total = parts.total()
        start = 0
        for m, B in enumerate(Bs):
            result[m * FIELDS + 3] = total[start : start + B.numel()].view(B.shape)
            start += B.numel()
            if flat is not None:
                result[m * FIELDS + 2] = total[ups + m * R * D : ups + (m + 1) * R * D].view(R, D)
        return None if dx is None else dx.view(ctx.shape), None, None, *result


def _through_weights(dys: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum over m of dy_m W_m, in one tensor."""
    dx = dys[0] @ weights[0]
    for dy, weight in zip(dys[1:], weights[1:], strict=True):
        dx.addmm_(dy, weight)
    return dx


# Without the checks for functorch's transforms, which take as long as a launch and none of which this op supports.
_apply = super(torch.autograd.Function, _Grouped).apply
