"""A group of projections as registered ops for torch.compile: the frozen product, the update, and their gradients.

The compiler makes no kernel of its own for any of it, so the ops do what eager mode does, with the same functions. The
gradient is one op unless gates have one too, or experts share an A. Then it is two, and what lies between them (few
numbers a token) is left to the compiler. `grouped` is what a model calls; a compiled graph holds the others.

Shapes: N tokens, D input width, M projections of widths O, R rank, C columns of B.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from monkeyjump.ops.grouped import Frozen, down_gradients, kept_dtype, outputs, split_like
from monkeyjump.ops.kernels import lora as kernels
from monkeyjump.ops.kernels.parts import total
from monkeyjump.ops.registration import composed, registered, shapes_of
from monkeyjump.ops.settings import Dropout, Strengths, Update, new_seed, rank_gradients, with_diagonal

Tensor = torch.Tensor
# the compiler need not copy an input to give it the layout it was traced with: the ops make rows dense themselves
ANY_LAYOUT = torch.Tag.flexible_layout


# every, G and the first column of each projection: the gates are its columns of the one tensor, or of its own
Places = list[int]


def _strengths(scale: float, gates: list[Tensor], diagonals: list[Tensor], places: Places) -> Strengths:
    every, number, *starts = places
    none = (None,) * len(starts)
    owners = gates if len(gates) > 1 else gates * len(starts)
    if owners and number < owners[0].shape[1]:  # a view costs the host as much as a new tensor
        owners = [gate[:, start : start + number] for gate, start in zip(owners, starts, strict=True)]
    return Strengths(scale, tuple(owners) or none, tuple(diagonals) or none, every)


def _spread(dgates: list[Any], gates: list[Tensor], places: Places) -> list[Any]:
    """The gradients of the projections' columns as gradients of the tensors they are columns of."""
    if len(gates) > 1:
        return dgates
    _, number, *starts = places
    if starts == [number * m for m in range(len(starts))] and number * len(starts) == gates[0].shape[1]:
        return [torch.cat(dgates, 1)]
    wide = torch.zeros_like(gates[0])
    for start, dgate in zip(starts, dgates, strict=True):
        wide[:, start : start + number] += dgate
    return [wide]


@registered("drawn_seed", tags=(torch.Tag.nondeterministic_seeded,))
def drawn_seed(like: Tensor) -> Tensor:
    """A seed for a mask, on the device of `like`, which is to be what is masked.

    The compiler takes two calls with one tensor for one: with a weight, a block that is called twice in a graph would
    mask twice alike.
    """
    return new_seed(like.device)


@shapes_of(drawn_seed)
def _(like):
    return like.new_empty((), dtype=torch.int64)


@registered("grouped_forward", tags=(ANY_LAYOUT,))
def grouped_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    As: list[Tensor],
    Bs: list[Tensor],
    gates: list[Tensor],
    diagonals: list[Tensor],
    seed: Tensor | None,
    p: float,
    scale: float,
    places: Places,
    gated: bool,
) -> list[Tensor]:
    """M of y [N, O], then z [N, M * R]; `gated`: the gates have a gradient."""
    strengths = _strengths(scale, gates, diagonals, places)
    As, Bs = [A.contiguous() for A in As], [B.contiguous() for B in Bs]
    update = Update(As, Bs, strengths, Dropout.of(seed, p))
    ys, z = outputs(x.contiguous(), Frozen([weight], [bias]), update, kept_dtype(x, gated))
    return [*ys, z]


@shapes_of(grouped_forward)
def _(x, weight, bias, As, Bs, gates, diagonals, seed, p, scale, places, gated):
    z = x.new_empty(x.shape[0], len(As) * As[0].shape[0], dtype=kept_dtype(x, gated))
    return [*(x.new_empty(x.shape[0], B.shape[0]) for B in Bs), z]


@registered("grouped_backward", tags=(ANY_LAYOUT,))
def grouped_backward(
    dys: list[Tensor],
    x: Tensor | None,
    z: Tensor,
    weight: Tensor,
    As: list[Tensor],
    Bs: list[Tensor],
    gates: list[Tensor],
    diagonals: list[Tensor],
    seed: Tensor | None,
    p: float,
    scale: float,
    places: Places,
    with_dx: bool,
) -> tuple[Tensor, Tensor]:
    """(dx [N, D], empty without `with_dx`; all dB, for diagonals of ones, and with x all dA, one after the other)."""
    dys, x = [dy.contiguous() for dy in dys], None if x is None else x.contiguous()
    As, Bs = [A.contiguous() for A in As], [B.contiguous() for B in Bs]
    dz, parts = kernels.up_backward(dys, z, Bs, _strengths(scale, gates, diagonals, places), True)
    dx, more = down_gradients(dys, [weight], x, dz, As, Dropout.of(seed, p), with_dx)
    return z.new_empty(0) if dx is None else dx, total([*parts, *more])


@shapes_of(grouped_backward)
def _(dys, x, z, weight, As, Bs, gates, diagonals, seed, p, scale, places, with_dx):
    sums = sum(B.numel() for B in Bs) + (0 if x is None else sum(A.numel() for A in As))
    return _new_dx(dys, z, weight, with_dx), z.new_empty(sums, dtype=torch.float32)


@registered("grouped_up_backward", tags=(ANY_LAYOUT,))
def grouped_up_backward(
    dys: list[Tensor],
    z: Tensor,
    Bs: list[Tensor],
    gates: list[Tensor],
    diagonals: list[Tensor],
    scale: float,
    places: Places,
) -> tuple[Tensor, Tensor]:
    """(t = dy B [N, M * C]; all dB, for diagonals of ones, one after the other)."""
    dys, Bs = [dy.contiguous() for dy in dys], [B.contiguous() for B in Bs]
    t, parts = kernels.up_backward(dys, z, Bs, _strengths(scale, gates, diagonals, places), False)
    return t, total(parts)


@shapes_of(grouped_up_backward)
def _(dys, z, Bs, gates, diagonals, scale, places):
    shapes = (z.shape[0], len(Bs) * Bs[0].shape[1]), (sum(B.numel() for B in Bs),)
    t, sums = (z.new_empty(shape, dtype=torch.float32) for shape in shapes)
    return t, sums


@registered("grouped_down_backward", tags=(ANY_LAYOUT,))
def grouped_down_backward(
    dys: list[Tensor],
    x: Tensor | None,
    dz: Tensor,
    weight: Tensor,
    As: list[Tensor],
    seed: Tensor | None,
    p: float,
    with_dx: bool,
) -> tuple[Tensor, Tensor]:
    """(dx [N, D], empty without `with_dx`; with x all dA, one after the other)."""
    dys, x = [dy.contiguous() for dy in dys], None if x is None else x.contiguous()
    As = [A.contiguous() for A in As]
    dx, parts = down_gradients(dys, [weight], x, dz.contiguous(), As, Dropout.of(seed, p), with_dx)
    return dz.new_empty(0) if dx is None else dx, total(parts) if parts else dz.new_empty(0)


@shapes_of(grouped_down_backward)
def _(dys, x, dz, weight, As, seed, p, with_dx):
    sums = 0 if x is None else sum(A.numel() for A in As)
    return _new_dx(dys, dz, weight, with_dx), dz.new_empty(sums)


def _new_dx(dys: list[Tensor], z: Tensor, weight: Tensor, with_dx: bool) -> Tensor:
    return dys[0].new_empty(dys[0].shape[0], weight.shape[1]) if with_dx else z.new_empty(0)


class _Grouped(torch.autograd.Function):
    """The ops and their gradient; what follows the settings: M of A, M of B, the gates, the diagonals."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, seed: Tensor | None, settings: tuple, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        p, scale, places, trained, gated, _ = settings
        *ys, z = grouped_forward(x, weight, bias, *_apart(tensors, settings), seed, p, scale, places, gated)
        ctx.save_for_backward(x if trained else None, weight, z, seed, *tensors)
        ctx.settings = settings
        return tuple(ys)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight, z, seed, *tensors = ctx.saved_tensors
        p, scale, places, _, gated, _ = ctx.settings
        As, Bs, gates, diagonals = _apart(tensors, ctx.settings)
        dys, with_dx = list(grads), ctx.needs_input_grad[0]
        dgates: list[Any] = [None] * len(gates)
        if not gated and Bs[0].shape[1] == As[0].shape[0]:
            dx, sums = grouped_backward(dys, x, z, weight, As, Bs, gates, diagonals, seed, p, scale, places, with_dx)
            ups = sum(B.numel() for B in Bs)
            flat_dBs, flat_dAs = sums[:ups], sums[ups:]
        else:
            t, flat_dBs = grouped_up_backward(dys, z, Bs, gates, diagonals, scale, places)
            dz, found = rank_gradients(t, z, _strengths(scale, gates, diagonals, places), gated)
            dgates = _spread(found, gates, places) if gated else dgates
            dx, flat_dAs = grouped_down_backward(dys, x, dz, weight, As, seed, p, with_dx)
        ones = zip(split_like(flat_dBs, Bs), Bs, diagonals or [None] * len(Bs), strict=True)
        dBs, ddiagonals = zip(*(with_diagonal(dB, B, diagonal) for dB, B, diagonal in ones), strict=True)
        dAs = [None] * len(As) if x is None else split_like(flat_dAs, As)
        own = (*dAs, *dBs, *dgates, *ddiagonals[: len(diagonals)])
        return dx if with_dx else None, None, None, None, None, *own


def _apart(tensors: Sequence[Tensor], settings: tuple) -> tuple[list[Any], ...]:
    M, G, found = len(settings[2]) - 2, settings[-1], list(tensors)
    return found[:M], found[M : 2 * M], found[2 * M : 2 * M + G], found[2 * M + G :]


@composed("grouped_lora")
def grouped(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    As: list[Tensor],
    Bs: list[Tensor],
    gates: list[Tensor],
    diagonals: list[Tensor],
    seed: Tensor | None,
    p: float,
    scale: float,
    places: Places,
    trained: bool,
    gated: bool,
) -> list[Tensor]:
    """M of y [N, O]; `trained`: A has a gradient; `gated`: the gates have one."""
    settings = (p, scale, places, trained, gated, len(gates))
    return list(_Grouped.apply(x, weight, bias, seed, settings, *As, *Bs, *gates, *diagonals))
