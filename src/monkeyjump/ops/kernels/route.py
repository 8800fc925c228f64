"""Triton kernels of the centroid router: tokens to gates, and what the centres will follow, in one pass over h.

Shapes: N tokens, D hidden width, E experts, P programs. Each program walks over its row blocks and keeps the sums of
its tokens in registers; a second kernel adds the programs' sums in a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from monkeyjump.ops.kernels.launch import Launcher
from monkeyjump.ops.kernels.tiles import padded, processors, row_blocks

MOST_EXPERTS = 16
WIDEST = 8192  # a row of h is one tile
WARPS, PER = 0, 1
MOST_SUMS = 16_384  # entries of [E, D] that one program keeps in registers


@dataclass(frozen=True)
class Routing:
    """How similarities become gates and members; the fields of `MonkeyJumpConfig` that say so."""

    top_k: int
    temperature: float
    renormalize: bool
    member_k: int  # experts whose centre a token moves
    unit: bool  # whether the centres follow unit tokens or raw ones


@triton.jit
def below(logits, columns, K: tl.constexpr, EP: tl.constexpr):
    """True on the K largest of each row [BN, EP]; ties go to the lower index."""
    mine, other = logits[:, :, None], logits[:, None, :]
    earlier = columns[None, None, :] < columns[None, :, None]
    beaten_by = (other > mine) | ((other == mine) & earlier)
    return tl.sum(beaten_by.to(tl.int32), 2) < K


@triton.jit
def route_kernel(h, centers, queries, gates, sums, counts, N, D, inverse_temperature,
                 K: tl.constexpr, MEMBER_K: tl.constexpr, RENORMALIZE: tl.constexpr, UNIT: tl.constexpr,
                 EP: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    E: tl.constexpr = len(centers)
    program = tl.program_id(0)
    experts = tl.arange(0, EP)
    cols = tl.arange(0, BD)
    width = cols < D
    total = tl.zeros((EP, BD), tl.float32) if sums is not None else None
    number = tl.zeros((EP,), tl.float32)
    for start in range(program * BN, N, tl.num_programs(0) * BN):
        rows = start + tl.arange(0, BN)
        real = rows < N
        tile = tl.load(
            h + rows.to(tl.int64)[:, None] * D + cols[None, :], mask=real[:, None] & width[None, :], other=0.0
        )
        tile = tile.to(tl.float32)
        norm = tl.maximum(tl.sqrt(tl.sum(tile * tile, 1)), 1e-12)
        logits = tl.full((BN, EP), -1e30, tl.float32)
        for e in tl.static_range(E):
            center = tl.load(centers[e] + cols, mask=width, other=0.0)
            length = tl.maximum(tl.sqrt(tl.sum(center * center, 0)), 1e-12)
            cosine = tl.sum(tile * (center / length)[None, :], 1) / norm
            logits = tl.where((experts == e)[None, :], cosine[:, None], logits)
        exponent = tl.exp((logits - tl.max(logits, 1)[:, None]) * inverse_temperature)
        p = exponent / tl.sum(exponent, 1)[:, None]
        m = tl.where(below(logits, experts, K, EP), p, 0.0)
        if RENORMALIZE:
            m = m / tl.maximum(tl.sum(m, 1), 1e-12)[:, None]
        tl.store(gates + rows[:, None] * E + experts[None, :], m, mask=real[:, None] & (experts < E)[None, :])
        if sums is not None:
            counted = real
            if queries is not None:
                counted = counted & (tl.load(queries + rows, mask=real, other=0) != 0)
                tile = tl.where(counted[:, None], tile, 0.0)  # padding may hold anything, NaN too
            weight = tl.where(counted[:, None] & below(logits, experts, MEMBER_K, EP), 1.0, 0.0)
            number += tl.sum(weight, 0)
            if UNIT:
                weight = tl.where(counted, 1 / norm, 0.0)[:, None] * weight
            for e in tl.static_range(E):
                own = tl.sum(tl.where((experts == e)[None, :], weight, 0.0), 1)
                share = tl.sum(tile * own[:, None], 0)
                total = tl.where((experts == e)[:, None], total + share[None, :], total)
    if sums is not None:
        where = (program * E + experts[:, None]) * D + cols[None, :]
        tl.store(sums + where, total, mask=(experts < E)[:, None] & width[None, :])
        tl.store(counts + program * E + experts, number, mask=experts < E)


@triton.jit
def add_sums_kernel(parts, numbers, sums, counts, P, D,
                    BP: tl.constexpr, ALL: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """The programs' sums and counts, added up, each expert's into its own tensor."""
    E: tl.constexpr = len(sums)
    cols = tl.program_id(1) * BD + tl.arange(0, BD)
    every = tl.arange(0, ALL)
    for e in tl.static_range(E):
        if tl.program_id(0) == e:
            acc = tl.zeros((BP, BD), tl.float32)
            for start in range(0, P, BP):
                programs = start + tl.arange(0, BP)
                mask = (programs < P)[:, None] & (cols < D)[None, :]
                acc += tl.load(parts + (programs[:, None] * E + e) * D + cols[None, :], mask=mask, other=0.0)
            tl.store(sums[e] + cols, tl.sum(acc, 0), mask=cols < D)
            if tl.program_id(1) == 0:
                tl.store(counts[e], tl.sum(tl.load(numbers + every * E + e, mask=every < P, other=0.0), 0))


_route, _add_sums = Launcher(route_kernel), Launcher(add_sums_kernel)


def supported(experts: int, width: int) -> bool:
    return experts <= MOST_EXPERTS and width <= WIDEST and padded(experts, 1) * padded(width) <= MOST_SUMS


def route(h: torch.Tensor, centers: Sequence[torch.Tensor], routing: Routing) -> torch.Tensor:
    """h [N, D], E centres [D] -> gates [N, E], fp32."""
    N, D = h.shape
    gates = torch.empty(N, len(centers), device=h.device, dtype=torch.float32)
    _launch(row_blocks(N, _rows(D)), h, centers, None, (gates, None, None), routing)
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
    E, P = len(centers), min(row_blocks(N, _rows(D)), PER * processors(h.device))
    gates = torch.empty(N, E, device=h.device, dtype=torch.float32)
    parts = torch.empty(P, E, D, device=h.device, dtype=torch.float32)
    numbers = torch.empty(P, E, device=h.device, dtype=torch.float32)
    _launch(P, h, centers, queries, (gates, parts, numbers), routing)
    _add_sums(
        (E, row_blocks(D, 128)), parts, numbers, tuple(sums), tuple(counts), P, D,
        min(padded(P, 1), 64), padded(P, 1), 128,
    )  # fmt: skip
    return gates


def _launch(
    programs: int,
    h: torch.Tensor,
    centers: Sequence[torch.Tensor],
    queries: torch.Tensor | None,
    outputs: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None],
    routing: Routing,
) -> None:
    N, D = h.shape
    _route((programs, 1),
        h, tuple(centers), queries, *outputs, N, D, 1 / routing.temperature,
        routing.top_k, routing.member_k, routing.renormalize, routing.unit,
        padded(len(centers), 2), _rows(D), padded(D), warps=WARPS or (8 if D > 1024 else 4),
    )  # fmt: skip


def _rows(width: int) -> int:
    """Rows of a tile: 8192 entries, or one row."""
    return max(1, 8192 // padded(width))
