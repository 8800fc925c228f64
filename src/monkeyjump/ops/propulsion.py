"""Propulsion's scaling as a differentiable op over the Triton kernels.

Eager mode only: under torch.compile the reference is elementwise work that the compiler fuses into its neighbours.
"""

from __future__ import annotations

from typing import Any

import torch

from monkeyjump.ops.kernels import propulsion as kernels
from monkeyjump.ops.lowrank import gate_rows, rows_of


def scaled(base: torch.Tensor, offset: torch.Tensor, degree: int, gate: torch.Tensor | None) -> torch.Tensor:
    """base + gate * ((1 + offset) ** degree - 1) * base: base [..., O], offset [O], gate [..., 1] without gradient."""
    every = 1
    if gate is not None:
        gate = gate_rows(gate)
        every = base.numel() // base.shape[-1] // gate.shape[0]
    return _Scaled.apply(base, offset, degree, gate, every)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, base: torch.Tensor, offset: torch.Tensor, degree: int, gate: torch.Tensor | None, every: int
    ) -> torch.Tensor:
        flat = rows_of(base)
        ctx.save_for_backward(flat, offset, gate)
        ctx.degree, ctx.every = degree, every
        return kernels.scale(flat, offset, degree, gate, every).view(base.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        flat, offset, gate = ctx.saved_tensors
        dbase, doffset = kernels.scale_backward(rows_of(dy), flat, offset, ctx.degree, gate, ctx.every)
        return dbase.view(dy.shape), doffset, None, None, None
