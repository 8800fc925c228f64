"""The products of a group of projections that read one input: the frozen ones, the updates, and their gradients.

Every function exists twice under one definition: as a plain function, which eager mode calls, and as a registered op,
which torch.compile sees as one node. A registered op cannot take a dataclass, so all arguments are tensors, numbers and
lists of them.

Shapes: N tokens, D input width, M projections of widths O, R rank, C columns of B, G gates of a token, P row blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from monkeyjump.ops.kernels import lora
from monkeyjump.ops.kernels.partial_sums import total
from monkeyjump.ops.kernels.tiles import FEW_TOKENS
from monkeyjump.ops.lowrank import Dropout, Frozen, Strengths, Update, new_seed
from monkeyjump.ops.registration import registered, shapes_of

# The functions make rows dense themselves, so a compiler need not copy inputs to the layout they were traced with.
ANY_LAYOUT = (torch.Tag.flexible_layout,)
# The tokens that share a row of gates, G, and the first column of every projection in its tensor of gates.
Places = list[int]
WIDE_OUTPUT = 1024  # columns of every output from which each has a frozen product of its own, added to its update
NARROW_GRADIENT = 256  # columns of gradients that are worth a copy to make two products one (k and v of some models)


def strengths_of(scale: float, gates: Sequence[Tensor], diagonals: Sequence[Tensor], places: Places) -> Strengths:
    """The factors of every projection, whose gates are columns of the one tensor of gates, or of its own."""
    every, number, *firsts = places
    none = (None,) * len(firsts)
    if len(gates) == 1:
        gates = list(gates) * len(firsts)
        if number < gates[0].shape[1]:  # a view costs the host as much as a new tensor
            gates = [gate.narrow(1, first, number) for gate, first in zip(gates, firsts, strict=True)]
    elif any(gate.stride(0) != gates[0].stride(0) for gate in gates[1:]):  # the kernels take one row stride
        gates = [gate.contiguous() for gate in gates]
    return Strengths(scale, tuple(gates) or none, tuple(diagonals) or none, every)


def kept_dtype(x: Tensor, gated: bool) -> torch.dtype:
    """The dtype in which z is kept for backward: that of x, but fp32 where gates have a gradient, which z makes."""
    return torch.float32 if gated else x.dtype


def forward(
    x: Tensor, base: Tensor | None, weights: list[Tensor], biases: list[Tensor | None], As: list[Tensor],
    Bs: list[Tensor], gates: list[Tensor], diagonals: list[Tensor], seed: Tensor | None, p: float, scale: float,
    places: Places, gated: bool,
) -> list[Tensor]:  # fmt: skip
    """M of y [N, O], then z [N, M * R]; with a base [N, O] y is that and the update. `gated`: gates have a gradient."""
    strengths = strengths_of(scale, gates, diagonals, places)
    update = Update([A.contiguous() for A in As], [B.contiguous() for B in Bs], strengths, Dropout.of(seed, p))
    if base is None:
        ys, z = outputs(x.contiguous(), Frozen(weights, biases), update, kept_dtype(x, gated))
        return [*ys, z]
    y = torch.empty_like(base, memory_format=torch.contiguous_format)
    return [y, lora.down_up(x.contiguous(), update, [base.contiguous()], [y], kept_dtype(x, gated))]


forward_op = registered("grouped_lora_forward", tags=ANY_LAYOUT)(forward)


@shapes_of(forward_op)
def _(x, base, weights, biases, As, Bs, gates, diagonals, seed, p, scale, places, gated):
    z = x.new_empty(x.shape[0], len(As) * As[0].shape[0], dtype=kept_dtype(x, gated))
    return [*(x.new_empty(x.shape[0], B.shape[0]) for B in Bs), z]


def outputs(x: Tensor, frozen: Frozen, update: Update, keep: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """(y of every projection, [N, O]; z [N, M * R] in the dtype `keep`) for x [N, D]."""
    if x.shape[0] > FEW_TOKENS and min(update.widths) >= WIDE_OUTPUT:
        return _update_first(x, frozen, update, keep)
    bases = [F.linear(x, weight, bias) for weight, bias in zip(frozen.weights, frozen.biases, strict=True)]
    ys = bases
    if len(bases) < len(update.Bs):
        # Adding the updates copies each out of the common tensor: one that backward keeps must not keep the others.
        bases = list(bases[0].split_with_sizes(update.widths, 1))
        ys = [base.new_empty(base.shape) for base in bases]
    return ys, lora.down_up(x, update, bases, ys, keep)


def _update_first(x: Tensor, frozen: Frozen, update: Update, keep: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """`outputs` in the other order: the kernel writes the updates, and the products add to them, which saves a read."""
    weights, biases = frozen.by_projection(update.widths)
    ys = [x.new_empty(x.shape[0], width) for width in update.widths]
    z, kept = lora.down_kept(x, update, keep)
    lora.up([None] * len(ys), z, update.Bs, update.strengths, ys, biases)
    for y, weight in zip(ys, weights, strict=True):
        y.addmm_(x, weight.t())
    return ys, kept


def backward(
    dys: list[Tensor], x: Tensor | None, z: Tensor, weights: list[Tensor], As: list[Tensor], Bs: list[Tensor],
    gates: list[Tensor], diagonals: list[Tensor], seed: Tensor | None, p: float, scale: float, places: Places,
    with_dx: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(dx [N, D], empty without `with_dx`; all dB, for diagonals of ones, and with x all dA, one after the other)."""
    dys, Bs = [dy.contiguous() for dy in dys], [B.contiguous() for B in Bs]
    dz, partial = lora.up_backward(dys, z, Bs, strengths_of(scale, gates, diagonals, places), True)
    return down_gradients(dys, x, dz, partial, weights, As, Dropout.of(seed, p), with_dx)


backward_op = registered("grouped_lora_backward", tags=ANY_LAYOUT)(backward)


@shapes_of(backward_op)
def _(dys, x, z, weights, As, Bs, gates, diagonals, seed, p, scale, places, with_dx):
    return _new_gradients(dys, x, z, sum(B.numel() for B in Bs), As, with_dx)


def up_backward(
    dys: list[Tensor], z: Tensor, Bs: list[Tensor], gates: list[Tensor], diagonals: list[Tensor], scale: float,
    places: Places,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(t = dy B [N, M * C]; the partial sums [P, W] of all dB, for diagonals of ones)."""
    dys, Bs = [dy.contiguous() for dy in dys], [B.contiguous() for B in Bs]
    return lora.up_backward(dys, z, Bs, strengths_of(scale, gates, diagonals, places), False)


up_backward_op = registered("grouped_lora_up_backward", tags=ANY_LAYOUT)(up_backward)


@shapes_of(up_backward_op)
def _(dys, z, Bs, gates, diagonals, scale, places):
    t = z.new_empty(z.shape[0], len(Bs) * Bs[0].shape[1], dtype=torch.float32)
    return t, t.new_empty(lora.up_backward_blocks(z.shape[0], Bs), sum(B.numel() for B in Bs))


def down_backward(
    dys: list[Tensor], x: Tensor | None, dz: Tensor, partial: Tensor, weights: list[Tensor], As: list[Tensor],
    seed: Tensor | None, p: float, with_dx: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(dx [N, D], empty without `with_dx`; all dB, added up of their partial sums, and with x all dA)."""
    dys = [dy.contiguous() for dy in dys]
    return down_gradients(dys, x, dz.contiguous(), partial, weights, As, Dropout.of(seed, p), with_dx)


down_backward_op = registered("grouped_lora_down_backward", tags=ANY_LAYOUT)(down_backward)


@shapes_of(down_backward_op)
def _(dys, x, dz, partial, weights, As, seed, p, with_dx):
    return _new_gradients(dys, x, dz, partial.shape[1], As, with_dx)


def _new_gradients(dys, x, z, ups, As, with_dx: bool) -> tuple[Tensor, Tensor]:
    dx = dys[0].new_empty(dys[0].shape[0], As[0].shape[1]) if with_dx else z.new_empty(0, dtype=torch.float32)
    sums = ups + (0 if x is None else sum(A.numel() for A in As))
    return dx, z.new_empty(sums, dtype=torch.float32)


def down_gradients(dys, x, dz, partial, weights, As, dropout, with_dx: bool) -> tuple[Tensor, Tensor]:
    """(dx [N, D] by the ranks and by the weights; all dB, added up of their partial sums, and with x all dA).

    The ranks come first: a product adds to what is there while it writes, which a kernel would have to read first.
    """
    x, As = None if x is None else x.contiguous(), [A.contiguous() for A in As]
    dx = torch.empty(dz.shape[0], As[0].shape[1], dtype=dys[0].dtype, device=dz.device) if with_dx else None
    parts = lora.down_backward(x, dz, As, dropout, dx)
    if dx is not None and weights:
        if len(weights) < len(dys):
            dys = _joined_where_narrow(dys)
            weights = weights[0].split_with_sizes([dy.shape[1] for dy in dys])
        for dy, weight in zip(dys, weights, strict=True):
            dx.addmm_(dy, weight)
    return dz.new_empty(0) if dx is None else dx, total([partial, *parts])


def _joined_where_narrow(dys: Sequence[Tensor]) -> list[Tensor]:
    """The gradients, with narrow neighbours joined into one."""
    groups: list[list[Tensor]] = []
    for dy in dys:
        if groups and dy.shape[1] <= NARROW_GRADIENT and groups[-1][-1].shape[1] <= NARROW_GRADIENT:
            groups[-1].append(dy)
        else:
            groups.append([dy])
    return [group[0] if len(group) == 1 else torch.cat(group, 1) for group in groups]


class Products(NamedTuple):
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    up_backward: Callable[..., Any]
    down_backward: Callable[..., Any]


DIRECT = Products(forward, backward, up_backward, down_backward)
REGISTERED = Products(forward_op, backward_op, up_backward_op, down_backward_op)


@registered("drawn_seed", tags=(torch.Tag.nondeterministic_seeded,))
def drawn_seed(like: Tensor) -> Tensor:
    """A seed for the mask of `like`, on its device.

    The compiler merges two calls with the same tensor. If `like` were a weight, a block that runs twice in one graph
    would use the same mask twice.
    """
    return new_seed(like.device)


@shapes_of(drawn_seed)
def _(like):
    return like.new_empty((), dtype=torch.int64)
