"""Triton kernels of the centroid router: they turn tokens into gates and sum up what the centres will follow.

Two kernels route: one by plain fp32 sums for few experts, one by the matrix units for more.

In the centred space a token is u = h / |h| - mean. The mean is one more vector to multiply with, behind the centres, as
u c = h c / |h| - mean c and |u|^2 = 1 - 2 h mean / |h| + |mean|^2: h is read as it is.

Shapes: N tokens, D hidden width, E experts, P row blocks. Each row block writes its own sums; a second
kernel adds them up in a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from monkeyjump.ops.kernels.dot import precise_product
from monkeyjump.ops.kernels.launch import Launcher
from monkeyjump.ops.kernels.tiles import (
    FEW_TOKENS,
    TILES,
    Tile,
    columns_of,
    first_tiles,
    lane_sums,
    next_tiles,
    padded,
    row_blocks,
    stacked_rows,
    tiles_at_once,
)

MOST_EXPERTS = 16
MANY = 16_384  # from this many tokens on row blocks are larger: fewer sums are added, and there are still enough blocks
BY_SUMS = 7  # experts up to which plain sums are faster; each is two instructions for every entry of h
V = tl.constexpr(4)  # columns of a thread: those of h and of the centres, which are fp32, are the same


@dataclass(frozen=True)
class Routing:
    """How similarities become gates and members; the fields of `MonkeyJumpConfig` that say so."""

    top_k: int
    temperature: float
    renormalize: bool
    member_k: int  # experts whose centre a token moves
    unit: bool  # whether the centres follow unit tokens or raw ones
    strength: float = 1.0  # what gates are multiplied by in the end


@triton.jit
def remaining(along, square):
    """|u| of unit tokens less their mean, from their products with it and its square."""
    return tl.maximum(tl.sqrt(tl.maximum(1.0 - 2.0 * along + square, 0.0)), 1e-12)


@triton.jit
def far_of(norm, left, CENTERED: tl.constexpr):
    """How long a token is where centres follow it: |h|, or |h| |u| where `left` is |u|."""
    far = norm
    if CENTERED:
        far = norm * left
    return far


@triton.jit
def below(logits, columns, K: tl.constexpr, EP: tl.constexpr):
    """True on the K largest of each row [BN, EP]; ties go to the lower index."""
    mine, other = logits[:, :, None], logits[:, None, :]
    earlier = columns[None, None, :] < columns[None, :, None]
    beaten_by = (other > mine) | ((other == mine) & earlier)
    return tl.sum(beaten_by.to(tl.int32), 2) < K


@triton.jit
def route_kernel(h, vectors, queries, gates, parts, numbers, N, D, inverse_temperature, strength,
                 CENTERED: tl.constexpr, K: tl.constexpr, MEMBER_K: tl.constexpr, RENORMALIZE: tl.constexpr,
                 UNIT: tl.constexpr, NARROW: tl.constexpr, EP: tl.constexpr, BN: tl.constexpr,
                 BD: tl.constexpr):  # fmt: skip
    E: tl.constexpr = len(vectors) - CENTERED
    block, experts = tl.program_id(0), tl.arange(0, EP)
    rows = block * BN + tl.arange(0, BN)
    start_of_row = h + rows.to(tl.int64)[:, None] * D
    dots, squares = tl.zeros((BN, EP), tl.float32), tl.zeros((BN, BD), tl.float32)
    lengths, crossed = tl.zeros((BD, EP), tl.float32), tl.zeros((BD, EP), tl.float32)
    for start in range(0, D, BD):
        cols = start + tl.arange(0, BD)
        tile = tl.load(start_of_row + cols[None, :], mask=(rows < N)[:, None] & (cols < D)[None, :], other=0.0)
        center = stacked_rows(vectors, experts, cols, D, 1)
        dots += precise_product(tile, center, NARROW)
        squares += tile.to(tl.float32) * tile.to(tl.float32)
        lengths += center * center
        if CENTERED:
            mean = tl.load(vectors[E] + cols, mask=cols < D, other=0.0)
            crossed += center * mean[:, None]
    norm, square = tl.maximum(tl.sqrt(tl.sum(squares, 1)), 1e-12), tl.sum(lengths, 0)
    length = tl.maximum(tl.sqrt(square), 1e-12)
    left, there = norm, norm  # of a token less its mean, over |h|; and 1, or 0 for a token of zeros, which has no mean
    if CENTERED:
        there = tl.where(norm > 1e-12, 1.0, 0.0)
        along = tl.sum(tl.where((experts == E)[None, :], dots, 0.0), 1) / norm
        left = remaining(along, tl.sum(tl.where(experts == E, square, 0.0), 0))
        dots = dots / norm[:, None] - there[:, None] * tl.sum(crossed, 0)[None, :]
    logits = tl.where((experts < E)[None, :], dots / (left[:, None] * length[None, :]), -1e30)
    exponent = tl.exp((logits - tl.max(logits, 1)[:, None]) * inverse_temperature)
    p = exponent / tl.sum(exponent, 1)[:, None]
    m = tl.where(below(logits, experts, K, EP), p, 0.0)
    if RENORMALIZE:
        m = m / tl.maximum(tl.sum(m, 1), 1e-12)[:, None]
    inside = (rows < N)[:, None] & (experts < E)[None, :]
    tl.store(gates + rows[:, None] * E + experts[None, :], m * strength, mask=inside)
    if parts is not None:
        counted = rows < N
        if queries is not None:
            counted = counted & (tl.load(queries + rows, mask=rows < N, other=0) != 0)
        members = counted[:, None] & below(logits, experts, MEMBER_K, EP) & (experts < E)[None, :]
        tl.store(numbers + block * E + experts, tl.sum(members.to(tl.float32), 0), mask=experts < E)
        far = far_of(norm, left, CENTERED)
        weight = tl.where(members, 1.0 / far[:, None] if UNIT else 1.0, 0.0)
        share_of_mean = tl.zeros((EP,), tl.float32)
        if CENTERED:
            share_of_mean = tl.sum(tl.where(members, (there * norm)[:, None] * weight, 0.0), 0)
        for start in range(0, D, BD):  # the tiles of h are read again, out of the cache
            cols = start + tl.arange(0, BD)
            # padding may hold anything, NaN too: a token that does not count is not read
            tile = tl.load(start_of_row + cols[None, :], mask=counted[:, None] & (cols < D)[None, :], other=0.0)
            share = precise_product(tl.trans(tile), weight, NARROW)  # [BD, EP]
            if CENTERED:
                mean = tl.load(vectors[E] + cols, mask=cols < D, other=0.0)
                share -= mean[:, None] * share_of_mean[None, :]
            where = (block.to(tl.int64) * E + experts[None, :]) * D + cols[:, None]
            tl.store(parts + where, share, mask=(experts < E)[None, :] & (cols < D)[:, None])


@triton.jit
def kept(logits, e: tl.constexpr, K: tl.constexpr):
    """Where expert e is one of the K largest of E times [BN]; ties go to the lower index."""
    beaten = tl.zeros_like(logits[e]).to(tl.int32)
    for other in tl.static_range(len(logits)):
        if other < e:
            beaten += (logits[other] >= logits[e]).to(tl.int32)
        if other > e:
            beaten += (logits[other] > logits[e]).to(tl.int32)
    return beaten < K


@triton.jit
def gate_columns(logits, inverse_temperature, strength, K: tl.constexpr, RENORMALIZE: tl.constexpr, EP: tl.constexpr):
    """The gates [BN, EP] of E times [BN], zero beyond E."""
    E: tl.constexpr = len(logits)
    experts = tl.arange(0, EP)
    highest = logits[0]
    for e in tl.static_range(1, E):
        highest = tl.maximum(highest, logits[e])
    total, left = tl.zeros_like(highest), tl.zeros_like(highest)
    shares = tl.zeros((highest.shape[0], EP), tl.float32)
    for e in tl.static_range(E):
        share = tl.exp((logits[e] - highest) * inverse_temperature)
        total += share
        share = tl.where(kept(logits, e, K), share, 0.0)
        left += share
        shares = tl.where((experts == e)[None, :], share[:, None], shares)
    scale = 1.0 / total
    if RENORMALIZE:
        scale = scale / tl.maximum(left * scale, 1e-12)
    return shares * (scale * strength)[:, None]


@triton.jit
def product_of(a, b, D, BW: tl.constexpr):
    """a b of two vectors."""
    products = tl.zeros((BW,), tl.float32)
    for start in range(0, D, BW):
        cols = start + tl.arange(0, BW)
        products += tl.load(a + cols, mask=cols < D, other=0.0) * tl.load(b + cols, mask=cols < D, other=0.0)
    return tl.sum(products, 0)


@triton.jit
def center_length(center, D, BW: tl.constexpr):
    return tl.maximum(tl.sqrt(product_of(center, center, D, BW)), 1e-12)


@triton.jit
def row_products(h, vectors, rows, N, D,
                 BN: tl.constexpr, BD: tl.constexpr, DEPTH: tl.constexpr, MORE: tl.constexpr):  # fmt: skip
    """(norms, products with each vector), [BN] each. With MORE, the next tiles are loaded while these are added up."""
    row_starts = h + rows.to(tl.int64)[:, None] * D
    squares, dots = tl.zeros((BN, BD // V), tl.float32), ()
    for _ in tl.static_range(len(vectors)):
        dots = dots + (tl.zeros((BN, BD // V), tl.float32),)  # type: ignore[assignment]  # noqa: RUF005, no star in Triton
    ahead = first_tiles(row_starts, rows < N, D, BD, DEPTH, V, MORE)
    for start in range(0, D, BD * DEPTH):
        tiles, ahead = next_tiles(ahead, row_starts, rows < N, start, D, BD, DEPTH, V, MORE)
        for step in tl.static_range(DEPTH):
            cols = columns_of(start + step * BD, BD, V)
            tile = tiles[step].to(tl.float32)
            squares += lane_sums(tile * tile, BN, BD, V)
            more = ()
            for e in tl.static_range(len(vectors)):
                vector = tl.load(vectors[e] + cols, mask=cols < D, other=0.0)
                more = more + (dots[e] + lane_sums(tile * vector[None, :], BN, BD, V),)  # type: ignore[assignment]  # noqa: RUF005
            dots = more
    found = ()
    for e in tl.static_range(len(vectors)):
        found = found + (tl.sum(dots[e], 1),)  # type: ignore[assignment]  # noqa: RUF005
    return tl.maximum(tl.sqrt(tl.sum(squares, 1)), 1e-12), found


@triton.jit
def route_rows_kernel(h, vectors, queries, gates, parts, numbers, N, D, inverse_temperature, strength,
                      CENTERED: tl.constexpr, K: tl.constexpr, MEMBER_K: tl.constexpr, RENORMALIZE: tl.constexpr,
                      UNIT: tl.constexpr, EP: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, DEPTH: tl.constexpr,
                      MORE: tl.constexpr, BW: tl.constexpr):  # fmt: skip
    """Does what `route_kernel` does, by plain sums for few experts.

    The rows are read twice, the second time out of the cache: sums along a row want it in the threads of one warp,
    sums over rows want the same columns of all of them in one thread.
    """
    E: tl.constexpr = len(vectors) - CENTERED
    block, experts = tl.program_id(0), tl.arange(0, EP)
    rows = block * BN + tl.arange(0, BN)
    norm, dots = row_products(h, vectors, rows, N, D, BN, BD, DEPTH, MORE)
    left, there = norm, norm  # of a token less its mean, over |h|; and 1, or 0 for a token of zeros, which has no mean
    if CENTERED:
        there = tl.where(norm > 1e-12, 1.0, 0.0)
        left = remaining(dots[E] / norm, product_of(vectors[E], vectors[E], D, BW))
    logits = ()
    for e in tl.static_range(E):
        along = dots[e]
        if CENTERED:
            along = along / norm - there * product_of(vectors[e], vectors[E], D, BW)
        logits = logits + (along / (left * center_length(vectors[e], D, BW)),)  # type: ignore[assignment]  # noqa: RUF005
    found = gate_columns(logits, inverse_temperature, strength, K, RENORMALIZE, EP)
    tl.store(gates + rows[:, None] * E + experts[None, :], found, mask=(rows < N)[:, None] & (experts < E)[None, :])
    if parts is not None:
        counted = rows < N
        if queries is not None:
            counted = counted & (tl.load(queries + rows, mask=rows < N, other=0) != 0)
        far = far_of(norm, left, CENTERED)
        weights, of_mean, members = (), (), tl.zeros((BN, EP), tl.float32)
        for e in tl.static_range(E):
            member = counted & kept(logits, e, MEMBER_K)
            members = tl.where((experts == e)[None, :] & member[:, None], 1.0, members)
            weight = tl.where(member, 1.0 / far if UNIT else 1.0, 0.0)
            weights = weights + (weight,)  # type: ignore[assignment]  # noqa: RUF005
            if CENTERED:
                of_mean = of_mean + (tl.sum(tl.where(member, there * norm * weight, 0.0), 0),)  # type: ignore[assignment]  # noqa: RUF005
        tl.store(numbers + block * E + experts, tl.sum(members, 0), mask=experts < E)
        for start in range(0, D, BW):
            cols = columns_of(start, BW, V)
            # padding may hold anything, NaN too: a token that does not count is not read
            inside = counted[:, None] & (cols < D)[None, :]
            tile = tl.load(h + rows.to(tl.int64)[:, None] * D + cols[None, :], mask=inside, other=0.0).to(tl.float32)
            for e in tl.static_range(E):
                share = tl.sum(tile * weights[e][:, None], 0)
                if CENTERED:
                    share -= of_mean[e] * tl.load(vectors[E] + cols, mask=cols < D, other=0.0)
                tl.store(parts + (block.to(tl.int64) * E + e) * D + cols, share, mask=cols < D)


@triton.jit
def add_sums_kernel(parts, numbers, sums, counts, P, D,
                    BP: tl.constexpr, ALL: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """Adds up the row blocks' sums and counts, each expert's into its own tensor."""
    E: tl.constexpr = len(sums)
    cols = tl.program_id(1) * BD + tl.arange(0, BD)
    every = tl.arange(0, ALL)
    for e in tl.static_range(E):
        if tl.program_id(0) == e:
            acc = tl.zeros((BP, BD), tl.float32)
            for start in range(0, P, BP):
                programs = start + tl.arange(0, BP)
                mask = (programs < P)[:, None] & (cols < D)[None, :]
                acc += tl.load(
                    parts + (programs.to(tl.int64)[:, None] * E + e) * D + cols[None, :], mask=mask, other=0.0
                )
            tl.store(sums[e] + cols, tl.sum(acc, 0), mask=cols < D)
            if tl.program_id(1) == 0:
                number = tl.zeros((ALL,), tl.float32)
                for start in range(0, P, ALL):
                    number += tl.load(numbers + (start + every) * E + e, mask=start + every < P, other=0.0)
                tl.store(counts[e], tl.sum(number, 0))


_route, _route_rows, _add_sums = Launcher(route_kernel), Launcher(route_rows_kernel), Launcher(add_sums_kernel)


def supported(vectors: int) -> bool:
    """Centres, and a mean."""
    return vectors <= MOST_EXPERTS


def token_gates(
    h: Tensor,
    centers: Sequence[Tensor],
    routing: Routing,
    queries: Tensor | None = None,
    sums: Sequence[Tensor] | None = None,
    counts: Sequence[Tensor] = (),
    mean: Tensor | None = None,
) -> Tensor:
    """h [N, D], E centres [D] -> gates [N, E], fp32; with a mean [D] of the tokens in the centred space.

    With `sums`, E sums [D] and counts [] of the tokens that are queries ([N] bool; None: all) are written, too.
    """
    (N, D), E, new = h.shape, len(centers), partial(torch.empty, device=h.device, dtype=torch.float32)
    tile = _tile(N, E if mean is None else E + 1, sums is not None)
    P, width = row_blocks(N, tile.rows), tile.width(D)
    gates, parts, numbers = new(N, E), None, None
    if sums is not None:
        parts, numbers = new(P, E, D), new(P, E)
    vectors = (*centers,) if mean is None else (*centers, mean)
    operands = (
        h, vectors, queries, gates, parts, numbers, N, D, 1 / routing.temperature, routing.strength,
        int(mean is not None), routing.top_k, routing.member_k, routing.renormalize, routing.unit,
    )  # fmt: skip
    if len(vectors) <= BY_SUMS:
        across = min(padded(D), 128 * tile.warps)  # 4 columns for each thread
        ahead = tiles_at_once(D, width, tile.stages)
        _route_rows(
            (P, 1), *operands, padded(E, 1), tile.rows, width, ahead, ahead * width < D, across, warps=tile.warps
        )
    else:
        narrow = h.dtype == torch.bfloat16
        _route((P, 1), *operands, narrow, padded(len(vectors)), tile.rows, width, warps=tile.warps, stages=tile.stages)
    if sums is not None:
        add = TILES["add_sums"]
        _add_sums(
            (E, row_blocks(D, add.width(D))), parts, numbers, tuple(sums), tuple(counts), P, D,
            min(padded(P, 1), add.rows), min(padded(P, 1), 1024), add.width(D), warps=add.warps,
        )  # fmt: skip
    return gates


def _tile(tokens: int, vectors: int, sums: bool) -> Tile:
    if vectors > BY_SUMS:
        return TILES["route" if tokens <= MANY else "route_many"]
    return TILES["route_few" if tokens <= FEW_TOKENS and not sums else "route_rows"]
