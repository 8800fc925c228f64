"""Gated low-rank updates of projections that read one input, with their frozen products, as one differentiable op.

    y_m = x W_m^T + b_m + (dropout(x) A_m^T * s_m) B_m^T,   s = scale * diagonal * gate

`grouped_lora` computes projections whose frozen linears are plain. `gated_lora` adds the update of one projection to an
output that was computed elsewhere (a quantised, sharded or hooked linear).

In eager mode on small models the host is slower than the GPU: what counts is the number of launches and of autograd
nodes. One node holds all projections of a group; its backward adds every contribution into one dx, where autograd
would keep one tensor per projection and adapter and add them up. Under torch.compile the same autograd function calls
the same products as registered ops (`grouped_products`). The gradient is one op unless gates have one too, or experts
share an A. Then it is two, and what lies between them (few numbers a token) is left to the compiler.

Shapes: N tokens, D input width, M projections of widths O, R rank, C columns of B, G gates of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from monkeyjump.ops.grouped_products import DIRECT, REGISTERED, Places, Products, drawn_seed, strengths_of
from monkeyjump.ops.lowrank import Frozen, GateColumns, Projection, gate_rows, new_seed, rank_gradients, rows_of
from monkeyjump.ops.registration import composed


def grouped_lora(
    x: Tensor,
    projections: Sequence[Projection],
    scale: float,
    dropout: float,
    seed: Tensor | None = None,
    together: Frozen | None = None,
    columns: GateColumns | None = None,
    base: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """y of every projection for x [..., D]; all A of one shape, all gated or none; one mask, of this seed or a new one.

    `together` are the weights of all as one, which is faster, and `columns` the gates, if they are one tensor. `base`
    is the frozen output [..., O] of a single projection, where it has been computed already.
    """
    traced = torch.compiler.is_compiling()
    if dropout == 0:
        seed = None
    elif seed is None:  # in a graph an op draws it: the compiler's own code takes two kernels
        seed = drawn_seed(x) if traced else new_seed(x.device)
    gates = [projection.gate for projection in projections if projection.gate is not None]
    number, firsts = gates[0].shape[-1] if gates else 1, (0,) * len(projections)
    if columns is not None:
        gates, number, firsts = [columns.tensor], columns.number, columns.first_columns
    gates = [gate_rows(gate) for gate in gates]
    every = x.numel() // x.shape[-1] // gates[0].shape[0] if gates else 1
    frozen = together or Frozen.of(projections)
    As, Bs = [projection.A for projection in projections], [projection.B for projection in projections]
    diagonals = [projection.diagonal for projection in projections if projection.diagonal is not None]
    places, trained = [every, number, *firsts], any(A.requires_grad for A in As)
    gated = any(gate.requires_grad for gate in gates)
    if traced:
        tensors = frozen.weights, frozen.biases, As, Bs, gates, diagonals
        return tuple(grouped_lora_op(x, base, *tensors, seed, dropout, scale, places, trained, gated))
    settings, own = (dropout, scale, places, trained, gated, len(gates)), (*As, *Bs, *gates, *diagonals)
    if not torch.is_grad_enabled():  # an autograd function takes the host as long as several launches
        return _outputs(x, base, seed, frozen, settings, DIRECT, own)[0]
    return _apply(x, base, seed, frozen, settings, DIRECT, *own)


def gated_lora(
    base: Tensor,
    x: Tensor,
    A: Tensor,
    B: Tensor,
    scale: float,
    gate: Tensor | None = None,
    diagonal: Tensor | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor:
    """base + (dropout(x) A^T * s) B^T for base [..., O], x [..., D] and a gate [..., G], or [B, 1, G] for sequences."""
    alone = [Projection(None, None, A, B, gate, diagonal)]
    return grouped_lora(x, alone, scale, dropout, seed, Frozen([], []), base=base)[0]


def _outputs(
    x: Tensor, base: Tensor | None, seed: Tensor | None, frozen: Frozen, settings: tuple, products: Products,
    tensors: Sequence[Tensor],
) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:  # fmt: skip
    """(M of y [..., O]; the rows of x [N, D]; z [N, M * R])."""
    p, scale, places, _, gated, _ = settings
    rows, base = rows_of(x), None if base is None else rows_of(base)
    own = _apart(tensors, settings)
    *ys, z = products.forward(rows, base, frozen.weights, frozen.biases, *own, seed, p, scale, places, gated)
    return tuple(y.view(*x.shape[:-1], y.shape[1]) for y in ys), rows, z


class _GroupedLora(torch.autograd.Function):
    """The products and their gradients; what follows them are M of A, M of B, the gates and the diagonals."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        base: Tensor | None,
        seed: Tensor | None,
        frozen: Frozen,
        settings: tuple,
        products: Products,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ys, rows, z = _outputs(x, base, seed, frozen, settings, products, tensors)
        ctx.save_for_backward(rows if settings[3] else None, seed, z, *tensors)
        ctx.settings, ctx.weights, ctx.products, ctx.shape = settings, frozen.weights, products, x.shape
        return ys

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, seed, z, *tensors = ctx.saved_tensors
        p, scale, places, _, gated, _ = ctx.settings
        products, weights, with_dx = ctx.products, ctx.weights, ctx.needs_input_grad[0]
        As, Bs, gates, diagonals = _apart(tensors, ctx.settings)
        dys = [rows_of(grad) for grad in grads]
        dgates: list[Any] = [None] * len(gates)
        if not gated and Bs[0].shape[1] == As[0].shape[0]:
            dx, sums = products.backward(
                dys, x, z, weights, As, Bs, gates, diagonals, seed, p, scale, places, with_dx
            )  # fmt: skip
        else:
            t, partial = products.up_backward(dys, z, Bs, gates, diagonals, scale, places)
            dz, by_projection = rank_gradients(t, z, strengths_of(scale, gates, diagonals, places), gated)
            dgates = _of_tensors(by_projection, gates, places) if gated else dgates
            dx, sums = products.down_backward(dys, x, dz, partial, weights, As, seed, p, with_dx)
        own = Bs if x is None else [*Bs, *As]
        parts = sums.split([tensor.numel() for tensor in own])
        found: list[Any] = [part.view(tensor.shape) for part, tensor in zip(parts, own, strict=True)]
        dBs, dAs, ddiagonals = found[: len(Bs)], found[len(Bs) :] or [None] * len(As), []
        if diagonals:  # y depends on B and the diagonal by their product alone
            ddiagonals = [(dB * B).sum(0) for dB, B in zip(dBs, Bs, strict=True)]
            dBs = [dB * diagonal for dB, diagonal in zip(dBs, diagonals, strict=True)]
        dbase = grads[0] if ctx.needs_input_grad[1] else None
        given = dx.view(ctx.shape) if with_dx else None, dbase, None, None, None, None
        return (*given, *dAs, *dBs, *dgates, *ddiagonals)


# This leaves out the checks for functorch's transforms, which take as long as a launch; this op supports none of them.
_apply = super(torch.autograd.Function, _GroupedLora).apply


@composed("grouped_lora_products")
def grouped_lora_op(
    x: Tensor, base: Tensor | None, weights: list[Tensor], biases: list[Tensor | None], As: list[Tensor],
    Bs: list[Tensor], gates: list[Tensor], diagonals: list[Tensor], seed: Tensor | None, p: float, scale: float,
    places: Places, trained: bool, gated: bool,
) -> list[Tensor]:  # fmt: skip
    """M of y [..., O]; `trained`: A has a gradient; `gated`: the gates have one."""
    settings = p, scale, places, trained, gated, len(gates)
    own = (*As, *Bs, *gates, *diagonals)
    return list(_GroupedLora.apply(x, base, seed, Frozen(weights, biases), settings, REGISTERED, *own))


def _apart(tensors: Sequence[Tensor], settings: tuple) -> tuple[list[Any], ...]:
    """(As, Bs, gates, diagonals) of the tensors that follow the settings."""
    M, G, found = len(settings[2]) - 2, settings[-1], list(tensors)
    return found[:M], found[M : 2 * M], found[2 * M : 2 * M + G], found[2 * M + G :]


def _of_tensors(dgates: list[Any], gates: list[Tensor], places: Places) -> list[Any]:
    """The gradients of the projections' columns as gradients of the tensors they are columns of."""
    _, number, *firsts = places
    if len(gates) == len(dgates) and number == gates[0].shape[1]:
        return dgates
    if firsts == [number * m for m in range(len(firsts))] and number * len(firsts) == gates[0].shape[1]:
        return [torch.cat(dgates, 1)]
    gradient = torch.zeros_like(gates[0])
    for first, dgate in zip(firsts, dgates, strict=True):
        gradient[:, first : first + number] += dgate
    return [gradient]
