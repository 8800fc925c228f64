"""Triton kernels of the centroid router: tokens to gates, and what the centres will follow.

Two kernels route. Where a program can hold whole rows of h in its registers, it reads them once and works with plain
fp32 sums; wider rows, more experts and very many tokens go through the matrix units tile by tile, and h is read again
for the sums.

Shapes: N tokens, D hidden width, E experts, P row blocks. Each row block writes its own sums; a second
kernel adds them up in a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from monkeyjump.ops.kernels.launch import Launcher
from monkeyjump.ops.kernels.lora import stacked_rows
from monkeyjump.ops.kernels.products import precise_product
from monkeyjump.ops.kernels.tiles import FEW, TILES, Tile, padded, row_blocks
from monkeyjump.ops.settings import Routing

MOST_EXPERTS = 16
MANY = 16_384  # tokens from which row blocks are larger: fewer sums to add up, and still enough blocks
# of whole rows in registers: beyond the first they do not fit, beyond the second the plain sums cost more than the
# matrix units, beyond the third (`MANY`) so many row blocks' sums are a burden of their own
WHOLE_WIDTH, WHOLE_EXPERTS = 1024, 7


@triton.jit
def below(logits, columns, K: tl.constexpr, EP: tl.constexpr):
    """True on the K largest of each row [BN, EP]; ties go to the lower index."""
    mine, other = logits[:, :, None], logits[:, None, :]
    earlier = columns[None, None, :] < columns[None, :, None]
    beaten_by = (other > mine) | ((other == mine) & earlier)
    return tl.sum(beaten_by.to(tl.int32), 2) < K


@triton.jit
def route_kernel(h, centers, queries, gates, parts, numbers, N, D, inverse_temperature,
                 K: tl.constexpr, MEMBER_K: tl.constexpr, RENORMALIZE: tl.constexpr, UNIT: tl.constexpr,
                 NARROW: tl.constexpr, EP: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    E: tl.constexpr = len(centers)
    block = tl.program_id(0)
    rows = block * BN + tl.arange(0, BN)
    experts = tl.arange(0, EP)
    start_of_row = h + rows.to(tl.int64)[:, None] * D
    dots = tl.zeros((BN, EP), tl.float32)
    squares = tl.zeros((BN, BD), tl.float32)
    lengths = tl.zeros((BD, EP), tl.float32)
    for start in range(0, D, BD):
        cols = start + tl.arange(0, BD)
        tile = tl.load(start_of_row + cols[None, :], mask=(rows < N)[:, None] & (cols < D)[None, :], other=0.0)
        center = stacked_rows(centers, experts, cols, D, 1)
        dots += precise_product(tile, center, NARROW)
        squares += tile.to(tl.float32) * tile.to(tl.float32)
        lengths += center * center
    norm = tl.maximum(tl.sqrt(tl.sum(squares, 1)), 1e-12)
    length = tl.maximum(tl.sqrt(tl.sum(lengths, 0)), 1e-12)
    logits = tl.where((experts < E)[None, :], dots / (norm[:, None] * length[None, :]), -1e30)
    exponent = tl.exp((logits - tl.max(logits, 1)[:, None]) * inverse_temperature)
    p = exponent / tl.sum(exponent, 1)[:, None]
    m = tl.where(below(logits, experts, K, EP), p, 0.0)
    if RENORMALIZE:
        m = m / tl.maximum(tl.sum(m, 1), 1e-12)[:, None]
    tl.store(gates + rows[:, None] * E + experts[None, :], m, mask=(rows < N)[:, None] & (experts < E)[None, :])
    if parts is not None:
        counted = rows < N
        if queries is not None:
            counted = counted & (tl.load(queries + rows, mask=rows < N, other=0) != 0)
        members = counted[:, None] & below(logits, experts, MEMBER_K, EP) & (experts < E)[None, :]
        tl.store(numbers + block * E + experts, tl.sum(members.to(tl.float32), 0), mask=experts < E)
        weight = tl.where(members, 1.0 / norm[:, None] if UNIT else 1.0, 0.0)
        for start in range(0, D, BD):  # the tiles of h are read again, out of the cache
            cols = start + tl.arange(0, BD)
            # padding may hold anything, NaN too: a token that does not count is not read
            tile = tl.load(start_of_row + cols[None, :], mask=counted[:, None] & (cols < D)[None, :], other=0.0)
            share = precise_product(tl.trans(tile), weight, NARROW)  # [BD, EP]
            where = (block.to(tl.int64) * E + experts[None, :]) * D + cols[:, None]
            tl.store(parts + where, share, mask=(experts < E)[None, :] & (cols < D)[:, None])


@triton.jit
def handed_over(value, BN: tl.constexpr):
    """The same [BN], held by other threads: each by one, not by all, or by all again.

    A sum over columns leaves every thread of the program with every row's result, and the compiler would go on like
    this through all of the gates; the other way it would make the gates again for every thread that weighs by them.
    """
    return tl.gather(value, tl.arange(0, BN), 0)


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
def store_gates(gates, logits, rows, N, inverse_temperature, K: tl.constexpr, RENORMALIZE: tl.constexpr):
    E: tl.constexpr = len(logits)
    highest = logits[0]
    for e in tl.static_range(1, E):
        highest = tl.maximum(highest, logits[e])
    shares = ()
    total, left = tl.zeros_like(highest), tl.zeros_like(highest)
    for e in tl.static_range(E):
        share = tl.exp((logits[e] - highest) * inverse_temperature)
        total += share
        share = tl.where(kept(logits, e, K), share, 0.0)
        left += share
        shares = shares + (share,)  # type: ignore[assignment]  # noqa: RUF005, no star in Triton
    scale = 1.0 / total
    if RENORMALIZE:
        scale = scale / tl.maximum(left * scale, 1e-12)
    for e in tl.static_range(E):
        tl.store(gates + rows * E + e, shares[e] * scale, mask=rows < N)


@triton.jit
def route_rows_kernel(h, centers, queries, gates, parts, numbers, N, D, inverse_temperature,
                      K: tl.constexpr, MEMBER_K: tl.constexpr, RENORMALIZE: tl.constexpr, UNIT: tl.constexpr,
                      BN: tl.constexpr, DP: tl.constexpr):  # fmt: skip
    """The same from whole rows: with all warps side by side along the row, no sum over tokens crosses a thread."""
    E: tl.constexpr = len(centers)
    block = tl.program_id(0)
    rows, cols = block * BN + tl.arange(0, BN), tl.arange(0, DP)
    inside = cols < D
    tile = tl.load(
        h + rows.to(tl.int64)[:, None] * D + cols[None, :], mask=(rows < N)[:, None] & inside[None, :], other=0.0
    )
    lengths = ()
    for e in tl.static_range(E):  # while the rows are on their way
        center = tl.load(centers[e] + cols, mask=inside, other=0.0)
        lengths = lengths + (tl.maximum(tl.sqrt(tl.sum(center * center, 0)), 1e-12),)  # type: ignore[assignment]  # noqa: RUF005
    tile = tile.to(tl.float32)
    norm = tl.maximum(tl.sqrt(handed_over(tl.sum(tile * tile, 1), BN)), 1e-12)
    logits = ()
    for e in tl.static_range(E):
        center = tl.load(centers[e] + cols, mask=inside, other=0.0)
        dots = handed_over(tl.sum(tile * center[None, :], 1), BN)
        logits = logits + (dots / (norm * lengths[e]),)  # type: ignore[assignment]  # noqa: RUF005
    store_gates(gates, logits, rows, N, inverse_temperature, K, RENORMALIZE)
    if parts is not None:
        counted = rows < N
        if queries is not None:
            counted = counted & (tl.load(queries + rows, mask=rows < N, other=0) != 0)
            # padding may hold anything, NaN too, which a weight of zero would not take out
            tile = tl.where((handed_over(counted.to(tl.int32), BN) != 0)[:, None], tile, 0.0)
        for e in tl.static_range(E):
            members = counted & kept(logits, e, MEMBER_K)
            tl.store(numbers + block * E + e, tl.sum(members.to(tl.float32), 0))
            weight = handed_over(tl.where(members, 1.0 / norm if UNIT else 1.0, 0.0), BN)
            share = tl.sum(tile * weight[:, None], 0)
            tl.store(parts + (block.to(tl.int64) * E + e) * D + cols, share, mask=inside)


@triton.jit
def add_sums_kernel(parts, numbers, sums, counts, P, D,
                    BP: tl.constexpr, ALL: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """The row blocks' sums and counts, added up, each expert's into its own tensor."""
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


def supported(experts: int) -> bool:
    return experts <= MOST_EXPERTS


def in_whole_rows(tokens: int, width: int, experts: int) -> bool:
    return padded(width) <= WHOLE_WIDTH and experts <= WHOLE_EXPERTS and tokens <= MANY


def route(h: torch.Tensor, centers: Sequence[torch.Tensor], routing: Routing) -> torch.Tensor:
    """h [N, D], E centres [D] -> gates [N, E], fp32."""
    gates = torch.empty(h.shape[0], len(centers), device=h.device, dtype=torch.float32)
    _launch(h, centers, None, (gates, None, None), routing)
    return gates


def route_and_sum(
    h: torch.Tensor,
    centers: Sequence[torch.Tensor],
    queries: torch.Tensor | None,
    routing: Routing,
    sums: Sequence[torch.Tensor],
    counts: Sequence[torch.Tensor],
) -> torch.Tensor:
    """gates [N, E]; of the tokens that are queries ([N] bool; None: all) E sums [D] and counts [] are written."""
    N, D = h.shape
    E, P = len(centers), row_blocks(N, _tile(h, len(centers), True).rows)
    gates = torch.empty(N, E, device=h.device, dtype=torch.float32)
    parts = torch.empty(P, E, D, device=h.device, dtype=torch.float32)
    numbers = torch.empty(P, E, device=h.device, dtype=torch.float32)
    _launch(h, centers, queries, (gates, parts, numbers), routing)
    add = TILES["add_sums"]
    _add_sums(
        (E, row_blocks(D, add.width(D))), parts, numbers, tuple(sums), tuple(counts), P, D,
        min(padded(P, 1), add.rows), min(padded(P, 1), 1024), add.width(D), warps=add.warps,
    )  # fmt: skip
    return gates


def _launch(
    h: torch.Tensor,
    centers: Sequence[torch.Tensor],
    queries: torch.Tensor | None,
    outputs: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None],
    routing: Routing,
) -> None:
    (N, D), E = h.shape, len(centers)
    tile = _tile(h, E, outputs[1] is not None)
    how = (1 / routing.temperature, routing.top_k, routing.member_k, routing.renormalize, routing.unit)
    grid, tensors = (row_blocks(N, tile.rows), 1), (h, tuple(centers), queries, *outputs)
    if in_whole_rows(N, D, E):
        _route_rows(grid, *tensors, N, D, *how, tile.rows, padded(D), warps=tile.warps, stages=tile.stages)
        return
    _route(
        grid, *tensors, N, D, *how, h.dtype == torch.bfloat16, padded(E), tile.rows, tile.width(D),
        warps=tile.warps, stages=tile.stages,
    )  # fmt: skip


def _tile(h: torch.Tensor, experts: int, sums: bool) -> Tile:
    N, D = h.shape
    if not in_whole_rows(N, D, experts):
        return TILES["route" if N <= MANY else "route_many"]
    if N <= FEW and not sums:
        return TILES["route_few"]
    tile = TILES["route_rows"]
    # rows of fp32 take twice the registers; 8 columns for each thread of as many warps as that makes, all along the row
    rows = tile.rows if h.element_size() == 2 else tile.rows // 2
    return Tile(rows, tile.columns, max(1, min(tile.warps, padded(D) // 256)), tile.stages)
