"""The gated low-rank update as differentiable ops over the Triton kernels, in eager mode and under torch.compile.

    z_m = dropout(x) A_m^T              down, for all projections m that read x
    y = base + (z * s) B^T              up, with s = scale * diagonal * gate

In eager mode the kernels are launched directly from autograd functions, without the host time of a registered op. Under
torch.compile the same functions are traced and the kernels are registered ops, each of which the compiler sees as one
node.

Shapes: N tokens, D and O input and output width, R rank, C columns of B, G gates of a token; `...`: any leading shape.
"""

from __future__ import annotations

from typing import Any

import torch

from monkeyjump.ops.kernels import lora as kernels
from monkeyjump.ops.lowrank import (
    Dropout,
    Strengths,
    Update,
    gate_rows,
    new_seed,
    rank_gradients,
    rows_of,
    with_diagonal,
)
from monkeyjump.ops.registration import registered, shapes_of


def down(
    x: torch.Tensor, As: list[torch.Tensor], dropout: float, seed: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """z of every A, [N, R] fp32 each, with one dropout mask for all, of this seed or a new: x [..., D], A [R, D]."""
    seed = None if dropout == 0 else new_seed(x.device) if seed is None else seed
    if _compiled_inference():
        return _down(rows_of(x), [A.contiguous() for A in As], Dropout.of(seed, dropout)).split(As[0].shape[0], 1)
    return _Down.apply(x, seed, dropout, *As)


def up(
    base: torch.Tensor,
    z: torch.Tensor,
    B: torch.Tensor,
    scale: float,
    gate: torch.Tensor | None = None,
    diagonal: torch.Tensor | None = None,
) -> torch.Tensor:
    """base [..., O] + (z * s) B^T for z [N, R], B [O, C], gate [..., G], or [B, 1, G] for whole sequences."""
    every = 1
    if gate is not None:
        tokens = z.shape[0]
        gate = gate_rows(gate)
        every = tokens // gate.shape[0]
    if _compiled_inference():
        strengths = Strengths.single(scale, gate, diagonal, every)
        return _up(rows_of(base), z, B.contiguous(), strengths).view(base.shape)
    return _Up.apply(base, z, B, gate, diagonal, scale, every)


def _compiled_inference() -> bool:
    """Whether a graph without gradients is traced. The compiler misreads an autograd function there."""
    return torch.compiler.is_compiling() and not torch.is_grad_enabled()


def gated_lora(
    base: torch.Tensor,
    x: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    scale: float,
    gate: torch.Tensor | None = None,
    diagonal: torch.Tensor | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """base + (dropout(x) A^T * s) B^T: one projection by itself; in generation in one launch."""
    if dropout == 0 and not torch.is_grad_enabled() and not torch.compiler.is_compiling():
        gate = None if gate is None else gate_rows(gate)
        flat, out, y = rows_of(x), rows_of(base), torch.empty(base.shape, dtype=base.dtype, device=base.device)
        every = 1 if gate is None else flat.shape[0] // gate.shape[0]
        strengths = Strengths.single(scale, gate, diagonal, every)
        kernels.down_up(flat, Update([A.contiguous()], [B.contiguous()], strengths), [out], [y.view(out.shape)])
        return y
    (z,) = down(x, [A], dropout)
    return up(base, z, B, scale, gate, diagonal)


class _Down(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seed: torch.Tensor | None, p: float, *As: torch.Tensor) -> Any:
        trained = any(A.requires_grad for A in As)
        flat, As = rows_of(x), tuple(A.contiguous() for A in As)
        z = _down(flat, list(As), Dropout.of(seed, p))
        ctx.save_for_backward(flat if trained else None, seed, *As)
        ctx.p, ctx.shape, ctx.dtype = p, x.shape, x.dtype
        return z.split(As[0].shape[0], 1) if len(As) > 1 else (z,)

    @staticmethod
    def backward(ctx: Any, *dzs: torch.Tensor) -> Any:
        flat, seed, *As = ctx.saved_tensors
        dz = (dzs[0] if len(dzs) == 1 else torch.cat(dzs, 1)).contiguous()
        dx, dA = _down_backward(flat, dz, As, Dropout.of(seed, ctx.p), ctx.dtype if ctx.needs_input_grad[0] else None)
        dAs = (None,) * len(As) if dA is None else dA.split(As[0].shape[0])
        return None if dx is None else dx.view(ctx.shape), None, None, *dAs


class _Up(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        base: torch.Tensor,
        z: torch.Tensor,
        B: torch.Tensor,
        gate: torch.Tensor | None,
        diagonal: torch.Tensor | None,
        scale: float,
        every: int,
    ) -> torch.Tensor:
        flat, B = rows_of(base), B.contiguous()
        ctx.save_for_backward(z, B, gate, diagonal)
        ctx.scale, ctx.every = scale, every
        return _up(flat, z, B, Strengths.single(scale, gate, diagonal, every)).view(base.shape)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        z, B, gate, diagonal = ctx.saved_tensors
        strength = Strengths.single(ctx.scale, gate, diagonal, ctx.every)
        flat = rows_of(dy)
        simple = z.shape[1] == B.shape[1] and not ctx.needs_input_grad[3]
        t, dB = _up_backward(flat, z, B, strength, simple)
        dB, ddiagonal = with_diagonal(dB, B, diagonal)
        dz, (dgate,) = (t, (None,)) if simple else rank_gradients(t, z, strength, ctx.needs_input_grad[3])
        return dy, dz, dB, dgate, ddiagonal, None, None


def _down(x: torch.Tensor, As: list[torch.Tensor], dropout: Dropout | None) -> torch.Tensor:
    if torch.compiler.is_compiling():
        return lora_down(x, As, *_plain(dropout))
    return kernels.down(x, As, dropout)


def _down_backward(
    x: torch.Tensor | None,
    dz: torch.Tensor,
    As: list[torch.Tensor],
    dropout: Dropout | None,
    dx_dtype: torch.dtype | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(dx, None without a dtype; dA, None without x)."""
    if not torch.compiler.is_compiling():
        return kernels.down_backward_alone(x, dz, As, dropout, dx_dtype)
    dx = None if dx_dtype is None else lora_down_input(dz, As, *_plain(dropout), dx_dtype)
    return dx, None if x is None else lora_down_backward(x, dz, *_plain(dropout))


def _up(base: torch.Tensor, z: torch.Tensor, B: torch.Tensor, strengths: Strengths) -> torch.Tensor:
    if torch.compiler.is_compiling():
        return lora_up(base, z, B, strengths.gates[0], strengths.diagonals[0], strengths.scale, strengths.every)
    y = torch.empty_like(base)
    kernels.up([base], z, [B], strengths, [y])
    return y


def _up_backward(
    dy: torch.Tensor, z: torch.Tensor, B: torch.Tensor, strengths: Strengths, times_s: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(t, dB for a diagonal of ones)."""
    if not torch.compiler.is_compiling():
        return kernels.up_backward_alone(dy, z, B, strengths, times_s)
    gate, diagonal = strengths.gates[0], strengths.diagonals[0]
    return lora_up_backward(dy, z, B, gate, diagonal, strengths.scale, strengths.every, times_s)


def _plain(dropout: Dropout | None) -> tuple[torch.Tensor | None, float]:
    """A mask as a registered op takes it: such an op cannot take a dataclass."""
    return (None, 0.0) if dropout is None else (dropout.seed, dropout.p)


@registered("lora_down")
def lora_down(x: torch.Tensor, As: list[torch.Tensor], seed: torch.Tensor | None, p: float) -> torch.Tensor:
    """dropout(x) A^T of every A, side by side: [N, M * R], fp32."""
    return kernels.down(x.contiguous(), As, Dropout.of(seed, p))


@shapes_of(lora_down)
def _(x, As, seed, p):
    return x.new_empty(x.shape[0], len(As) * As[0].shape[0], dtype=torch.float32)


@registered("lora_down_backward")
def lora_down_backward(x: torch.Tensor, dz: torch.Tensor, seed: torch.Tensor | None, p: float) -> torch.Tensor:
    """dz^T dropout(x): [M * R, D], fp32."""
    shaped = [x.new_empty(dz.shape[1], x.shape[1])]  # only the shape of A is needed
    dA = kernels.down_backward_alone(x.contiguous(), dz.contiguous(), shaped, Dropout.of(seed, p), None)[1]
    assert dA is not None
    return dA


@shapes_of(lora_down_backward)
def _(x, dz, seed, p):
    return x.new_empty(dz.shape[1], x.shape[1], dtype=torch.float32)


@registered("lora_down_input")
def lora_down_input(
    dz: torch.Tensor, As: list[torch.Tensor], seed: torch.Tensor | None, p: float, dtype: torch.dtype
) -> torch.Tensor:
    """dx = dropout'(dz A): [N, D]."""
    dx = kernels.down_backward_alone(None, dz.contiguous(), As, Dropout.of(seed, p), dtype)[0]
    assert dx is not None
    return dx


@shapes_of(lora_down_input)
def _(dz, As, seed, p, dtype):
    return dz.new_empty(dz.shape[0], As[0].shape[1], dtype=dtype)


@registered("lora_up")
def lora_up(
    base: torch.Tensor,
    z: torch.Tensor,
    B: torch.Tensor,
    gate: torch.Tensor | None,
    diagonal: torch.Tensor | None,
    scale: float,
    every: int,
) -> torch.Tensor:
    """base + (z * s) B^T: [N, O]."""
    y = torch.empty_like(base, memory_format=torch.contiguous_format)
    kernels.up([base.contiguous()], z, [B], Strengths.single(scale, gate, diagonal, every), [y])
    return y


@shapes_of(lora_up)
def _(base, z, B, gate, diagonal, scale, every):
    return base.new_empty(base.shape)


@registered("lora_up_backward")
def lora_up_backward(
    dy: torch.Tensor,
    z: torch.Tensor,
    B: torch.Tensor,
    gate: torch.Tensor | None,
    diagonal: torch.Tensor | None,
    scale: float,
    every: int,
    times_s: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dy B [N, C], times s if asked; dB [O, C] for a diagonal of ones), fp32."""
    return kernels.up_backward_alone(dy.contiguous(), z, B, Strengths.single(scale, gate, diagonal, every), times_s)


@shapes_of(lora_up_backward)
def _(dy, z, B, gate, diagonal, scale, every, times_s):
    return dy.new_empty(dy.shape[0], B.shape[1], dtype=torch.float32), dy.new_empty(B.shape, dtype=torch.float32)
