"""Frozen linears that read the same input, with their low-rank updates, as one differentiable op.

    y_m = x W_m^T + b_m + (dropout(x) A_m^T * s_m) B_m^T

In eager mode on small models the host is slower than the GPU: what counts is the number of launches and of autograd
nodes. One node holds all projections of a group; its backward adds every contribution into one dx, where autograd
would keep one tensor per projection and adapter and add them up. Where the weights lie side by side in memory, all
frozen products are one product; of the gradients only narrow ones are put together, which costs a copy.

Shapes: N tokens, D input width, M projections of widths O, R rank, C columns of B, G gates of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from monkeyjump.ops.kernels import few
from monkeyjump.ops.kernels import lora as kernels
from monkeyjump.ops.kernels.parts import total
from monkeyjump.ops.kernels.tiles import FEW
from monkeyjump.ops.settings import (
    Dropout,
    GateColumns,
    Strengths,
    Update,
    gate_rows,
    new_seed,
    rank_gradients,
    rows_of,
    with_diagonal,
)

FIELDS = 4  # tensors of one adapter among the arguments of the autograd function


@dataclass
class Projection:
    """One frozen linear and its adapter's tensors."""

    weight: torch.Tensor  # [O, D], frozen
    bias: torch.Tensor | None  # [O], frozen
    A: torch.Tensor  # [R, D]
    B: torch.Tensor  # [O, C]
    gate: torch.Tensor | None  # [..., G] in the leading shape of x, or [B, 1, G]
    diagonal: torch.Tensor | None  # [C]


@dataclass
class Frozen:
    """The weights [O, D] and biases [O] of a group's linears, or one of each where they lie together in memory."""

    weights: list[torch.Tensor]
    biases: list[torch.Tensor | None]

    @classmethod
    def of(cls, projections: Sequence[Projection]) -> Frozen:
        return cls([projection.weight for projection in projections], [projection.bias for projection in projections])

    def apart(self, widths: Sequence[int]) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor | None]]:
        """The weights and biases of the linears of these widths, each by itself."""
        if len(self.weights) == len(widths):
            return self.weights, self.biases
        bias = self.biases[0]
        biases = [None] * len(widths) if bias is None else bias.split_with_sizes(widths)
        return self.weights[0].split_with_sizes(widths), biases


def grouped_lora(
    x: torch.Tensor,
    projections: Sequence[Projection],
    scale: float,
    dropout: float,
    seed: torch.Tensor | None = None,
    together: Frozen | None = None,
    columns: GateColumns | None = None,
) -> tuple[torch.Tensor, ...]:
    """y of every projection for x [..., D]; all A of one shape, all gated or none; one mask, of this seed or a new.

    `together` are the weights of all as one, `columns` the gates. Under torch.compile the first is needed for several
    projections, and the second is faster.
    """
    if torch.compiler.is_compiling():  # an op of its own draws the seed: the compiler takes two kernels for it
        if dropout > 0 and seed is None:
            from monkeyjump.ops.custom_group import drawn_seed

            seed = drawn_seed(x)
        return _traced(x, seed, (scale, dropout), together or Frozen.of(projections), projections, columns)
    seed = None if dropout == 0 else new_seed(x.device) if seed is None else seed
    gates = [None if projection.gate is None else gate_rows(projection.gate) for projection in projections]
    if len({gate.stride(0) for gate in gates if gate is not None}) > 1:
        gates = [None if gate is None else gate.contiguous() for gate in gates]
    every = 1 if gates[0] is None else x.numel() // x.shape[-1] // gates[0].shape[0]
    settings, frozen = (scale, dropout, every), together or Frozen.of(projections)
    arguments: list[torch.Tensor | None] = []
    for projection, gate in zip(projections, gates, strict=True):
        arguments += [projection.A.contiguous(), projection.B.contiguous(), gate, projection.diagonal]
    return _apply(x, seed, settings, frozen, *arguments)


def _traced(
    x: torch.Tensor,
    seed: torch.Tensor | None,
    settings: tuple[float, float],
    frozen: Frozen,
    projections: Sequence[Projection],
    columns: GateColumns | None,
) -> tuple[torch.Tensor, ...]:
    """Under torch.compile: a registered op."""
    from monkeyjump.ops import custom_group

    scale, p = settings
    gates, starts = [], [0] * len(projections)
    if columns is not None:
        gates, starts = [columns.wide], list(columns.starts)
    elif projections[0].gate is not None:
        gates = [projection.gate for projection in projections if projection.gate is not None]
    number = columns.number if columns is not None else gates[0].shape[-1] if gates else 1
    gates = [gate_rows(gate) for gate in gates]
    every = x.numel() // x.shape[-1] // gates[0].shape[0] if gates else 1
    ys = custom_group.grouped(
        rows_of(x), frozen.weights[0], frozen.biases[0],
        [projection.A for projection in projections], [projection.B for projection in projections], gates,
        [projection.diagonal for projection in projections if projection.diagonal is not None], seed, p, scale,
        [every, number, *starts],
        any(projection.A.requires_grad for projection in projections), any(gate.requires_grad for gate in gates),
    )  # fmt: skip
    return tuple(y.view(*x.shape[:-1], y.shape[-1]) for y in ys)


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, seed: torch.Tensor | None, settings: tuple, frozen: Frozen, *arguments: Any
    ) -> Any:
        scale, p, every = settings
        flat = rows_of(x)
        As, Bs, gates, diagonals = (arguments[i::FIELDS] for i in range(FIELDS))
        update = Update(As, Bs, Strengths(scale, gates, diagonals, every), Dropout.of(seed, p))
        ys, z = outputs(flat, frozen, update, kept_dtype(x, any(ctx.needs_input_grad[4 + 2 :: FIELDS])))
        trained = any(A.requires_grad for A in As)
        ctx.save_for_backward(flat if trained else None, seed, z, *arguments)
        ctx.settings, ctx.frozen, ctx.shape = settings, frozen, x.shape
        return tuple(y.view(*x.shape[:-1], y.shape[1]) for y in ys)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        flat, seed, z, *arguments = ctx.saved_tensors
        scale, p, every = ctx.settings
        As, Bs, gates, diagonals = (tuple(arguments[i::FIELDS]) for i in range(FIELDS))
        strengths = Strengths(scale, gates, diagonals, every)
        dys = [rows_of(grad) for grad in grads]
        M, gated = len(As), any(ctx.needs_input_grad[4 + 2 :: FIELDS])
        simple = Bs[0].shape[1] == As[0].shape[0] and not gated
        result: list[Any] = [None] * (M * FIELDS)
        dz, parts = kernels.up_backward(dys, z, Bs, strengths, simple)
        if not simple:
            dz, result[2::FIELDS] = rank_gradients(dz, z, strengths, gated)
        dx, more = down_gradients(
            dys, ctx.frozen.weights, flat, dz, As, Dropout.of(seed, p), with_dx=ctx.needs_input_grad[0]
        )
        sums = total([*parts, *more])
        ups = sum(B.numel() for B in Bs)
        for m, dB in enumerate(split_like(sums[:ups], Bs)):
            result[m * FIELDS + 1], result[m * FIELDS + 3] = with_diagonal(dB, Bs[m], diagonals[m])
        if flat is not None:
            result[0::FIELDS] = split_like(sums[ups:], As)
        return None if dx is None else dx.view(ctx.shape), None, None, None, *result


# Without the checks for functorch's transforms, which take as long as a launch and none of which this op supports.
_apply = super(torch.autograd.Function, _Grouped).apply


# columns of outputs, at least, that are worth products of their own: each adds to an update that is there already
ALONE = 1024


def kept_dtype(x: torch.Tensor, gated: bool) -> torch.dtype:
    """In which z is kept for the backward: its rounding is that of x, but for the gradients of gates."""
    return torch.float32 if gated else x.dtype


def outputs(
    x: torch.Tensor, frozen: Frozen, update: Update, keep: torch.dtype
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """(y of every projection, [N, O]; z [N, M * R] in the dtype to keep it in) for x [N, D]."""
    if x.shape[0] > FEW and min(update.widths) >= ALONE:
        return _update_first(x, frozen, update, keep)
    bases = [F.linear(x, weight, bias) for weight, bias in zip(frozen.weights, frozen.biases, strict=True)]
    ys = bases
    if len(bases) < len(update.Bs):
        # taken apart while the updates are added: what backward keeps of one output must not keep the others
        bases = list(bases[0].split_with_sizes(update.widths, 1))
        ys = [base.new_empty(base.shape) for base in bases]
    return ys, few.down_up(x, update, bases, ys, keep)


def _update_first(
    x: torch.Tensor, frozen: Frozen, update: Update, keep: torch.dtype
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The same, with updates that are written where the products then add to them: the kernel need not read."""
    weights, biases = frozen.apart(update.widths)
    ys = [x.new_empty(x.shape[0], width) for width in update.widths]
    z, kept = kernels.down_kept(x, update, keep)
    kernels.up([None] * len(ys), z, update.Bs, update.strengths, ys, biases)
    for y, weight in zip(ys, weights, strict=True):
        y.addmm_(x, weight.t())
    return ys, kept


NARROW = 256  # columns of gradients that are worth a copy to make two products one (k and v of grouped attention)


def _joined_where_narrow(dys: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[int]]:
    """The gradients, with neighbours put together that are narrow, and the widths."""
    groups: list[list[torch.Tensor]] = []
    for dy in dys:
        if groups and dy.shape[1] <= NARROW and groups[-1][-1].shape[1] <= NARROW:
            groups[-1].append(dy)
        else:
            groups.append([dy])
    joined = [group[0] if len(group) == 1 else torch.cat(group, 1) for group in groups]
    return joined, [dy.shape[1] for dy in joined]


def down_gradients(
    dys: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    x: torch.Tensor | None,
    dz: torch.Tensor,
    As: Sequence[torch.Tensor],
    dropout: Dropout | None,
    with_dx: bool,
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """(dx [N, D] by the ranks and by the weights; with x the parts of dA).

    The ranks come first: a product adds its result to what is there while it writes it, a kernel would have to read it.
    """
    dx = torch.empty(dz.shape[0], As[0].shape[1], dtype=dys[0].dtype, device=dz.device) if with_dx else None
    parts = kernels.down_backward(x, dz, As, dropout, dx)
    if dx is not None:
        if len(weights) < len(dys):
            dys, widths = _joined_where_narrow(dys)
            weights = weights[0].split_with_sizes(widths)
        for dy, weight in zip(dys, weights, strict=True):
            dx.addmm_(dy, weight)
    return dx, parts


def split_like(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Consecutive parts of a vector in the shapes of the tensors."""
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
