"""Triton kernels of spherical k-means: which centre is nearest, the sums of what is nearest to each, and chords.

Raw tokens are read as they are and nothing of the size of x is written. All products are made by the matrix units: bf16
tokens with the two bf16 halves of the other side, 16 bits of mantissa, wider tokens by halves of both sides in tf32.
Those units cut off what fp32 would round, so a product is of one tile alone and added to the others in fp32.

Shapes: G blocks, N tokens, D hidden, S restarts, K clusters, M vectors; x [G, N, D] has rows of any stride. A program
works on few columns of S * K or M at a time; where there are more, several programs read the same tokens.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from monkeyjump.ops.kernels.dot import halves, product
from monkeyjump.ops.kernels.launch import Launcher
from monkeyjump.ops.kernels.tiles import TILES, Tile, padded, row_blocks

# Centres of a program, in one variant for any number of restarts: fewer columns would not read the tokens any faster,
# and to compile a variant takes longer than to cluster.
COLUMNS = 64
TRIALS = 32  # vectors of a program that writes their chords
# Tokens that one program sums up: there are enough programs to fill a GPU, and few sums beside the tokens. The number
# does not depend on the GPU or on the other blocks, so that the same tokens give the same bits.
SUMMED_TOGETHER = 2048


@triton.jit
def wide_product(a, b):
    """a b for both fp32, of 11-bit halves without the product of both errors; the compiler adds it up in fp32."""
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def dots(x, vectors, rows, index, known, M, N, D, block_stride, row_stride,
         BN: tl.constexpr, MP: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """[BN, MP] of the tokens and the vectors at `index`, 0 for those not `known`: [G, M, D], or [G, 2, M, D] halves."""
    NARROW: tl.constexpr = x.dtype.element_ty == tl.bfloat16
    g = tl.program_id(1).to(tl.int64)
    tokens = x + g * block_stride + rows.to(tl.int64)[:, None] * row_stride
    high = vectors + ((2 * g if NARROW else g) * M + index)[None, :] * D
    acc = tl.zeros((BN, MP), tl.float32)
    for start in range(0, D, BD):
        cols = start + tl.arange(0, BD)
        tile = tl.load(tokens + cols[None, :], mask=(rows < N)[:, None] & (cols < D)[None, :], other=0.0)
        within = (cols < D)[:, None] & known[None, :]
        value = tl.load(high + cols[:, None], mask=within, other=0.0)
        if NARROW:
            rest = tl.load(high + M * D + cols[:, None], mask=within, other=0.0)
            acc += product(tile, value) + product(tile, rest)
        else:
            acc += wide_product(tile.to(tl.float32), value)
    return acc


@triton.jit
def nearest_kernel(x, inverse, centers, labels, counts, S, K, N, D, block_stride, row_stride, label_stride,
                   KP: tl.constexpr, BN: tl.constexpr, MP: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """Labels [BN] of some restarts, and how many tokens of the row block have which."""
    TOGETHER: tl.constexpr = MP // KP
    apart = tl.cdiv(S, TOGETHER)
    block, g = tl.program_id(0) // apart, tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) % apart * TOGETHER
    rows, columns = block * BN + tl.arange(0, BN), tl.arange(0, MP)
    restart, cluster = first + columns // KP, columns % KP
    known = (restart < S) & (cluster < K)
    cosines = dots(
        x, centers, rows, restart * K + cluster, known, S * K, N, D, block_stride, row_stride, BN, MP, BD
    )  # fmt: skip
    cosines = tl.where(known[None, :], cosines, float("-inf"))
    best = tl.argmax(tl.reshape(cosines, (BN, TOGETHER, KP)), 2)  # the first of equals
    usable = tl.load(inverse + g * N + rows, mask=rows < N, other=0.0) > 0
    label = tl.where(usable[:, None], best, -1)
    restarts, clusters = first + tl.arange(0, TOGETHER), tl.arange(0, KP)
    where = labels + (g * S + restarts)[None, :] * label_stride + rows[:, None]
    tl.store(where, label.to(tl.int8), mask=(rows < N)[:, None] & (restarts < S)[None, :])
    number = tl.sum((label[:, :, None] == clusters[None, None, :]).to(tl.int32), 0)
    of_block = (g * tl.cdiv(N, BN) + block) * S
    mask = (restarts < S)[:, None] & (clusters < K)[None, :]
    tl.store(counts + (of_block + restarts)[:, None] * K + clusters[None, :], number, mask=mask)


@triton.jit
def chords_kernel(x, inverse, vectors, chords, same, M, N, D, block_stride, row_stride, inverse_stride,
                  BN: tl.constexpr, MP: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    apart = tl.cdiv(M, MP)
    block, g = tl.program_id(0) // apart, tl.program_id(1).to(tl.int64)
    rows, index = block * BN + tl.arange(0, BN), tl.program_id(0) % apart * MP + tl.arange(0, MP)
    cosines = dots(x, vectors, rows, index, index < M, M, N, D, block_stride, row_stride, BN, MP, BD)
    chord = 2 - 2 * cosines * tl.load(inverse + g * inverse_stride + rows, mask=rows < N, other=0.0)[:, None]
    mask = (rows < N)[:, None] & (index < M)[None, :]
    tl.store(chords + (g * M + index)[None, :] * N + rows[:, None], tl.where(chord < same, 0.0, chord), mask=mask)


@triton.jit
def sums_kernel(x, inverse, labels, parts, S, K, N, D, block_stride, row_stride, label_stride,
                RANGE: tl.constexpr, MP: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """Sums [MP, BD] of the unit tokens of a range by cluster, some columns of them."""
    tiles, apart = tl.cdiv(D, BD), tl.cdiv(S * K, MP)
    program, g = tl.program_id(0), tl.program_id(1).to(tl.int64)
    cols = program % tiles * BD + tl.arange(0, BD)
    index = program // tiles % apart * MP + tl.arange(0, MP)
    part = program // (tiles * apart)
    mine, known = (index % K).to(tl.int8)[:, None], (index < S * K)[:, None]
    of_restart = labels + (g * S + index // K)[:, None] * label_stride
    acc = tl.zeros((MP, BD), tl.float32)
    for start in range(part * RANGE, tl.minimum(N, (part + 1) * RANGE), BN):
        rows = start + tl.arange(0, BN)
        member = tl.load(of_restart + rows[None, :], mask=known & (rows < N)[None, :], other=-1) == mine
        weight = tl.load(inverse + g * N + rows, mask=rows < N, other=0.0)
        inside = (rows < N)[:, None] & (cols < D)[None, :]
        where = g * block_stride + rows.to(tl.int64)[:, None] * row_stride + cols[None, :]
        tile = tl.load(x + where, mask=inside, other=0.0)
        chosen = tl.where(member, weight[None, :], 0.0)
        if tile.dtype == tl.bfloat16:
            high, low = halves(chosen, tl.bfloat16)
            acc += product(high, tile) + product(low, tile)
        else:
            acc += wide_product(chosen, tile.to(tl.float32))
    into = ((g * tl.cdiv(N, RANGE) + part) * S * K + index)[:, None] * D + cols[None, :]
    tl.store(parts + into, acc, mask=known & (cols < D)[None, :])


_nearest, _chords, _sums = Launcher(nearest_kernel), Launcher(chords_kernel), Launcher(sums_kernel)


def supported(clusters: int) -> bool:
    return clusters <= COLUMNS


def nearest(x: Tensor, inverse: Tensor, centers: Tensor) -> tuple[Tensor, Tensor]:
    """Labels [G, S, N] int8 and counts [G, S, K] of centres [G, S, K, D]; -1 where `inverse` [G, N], 1 / norm, is 0."""
    (G, N, D), (S, K) = x.shape, centers.shape[1:3]
    tile, few = _tile("nearest", x), padded(K, 2)
    blocks = row_blocks(N, tile.rows)
    # Rows are padded to a multiple of 16 bytes, which are read at once.
    labels = torch.empty(G, S, row_blocks(N, 16) * 16, device=x.device, dtype=torch.int8)
    counts = torch.empty(G, blocks, S, K, device=x.device, dtype=torch.int32)
    _nearest(
        (blocks * row_blocks(S, COLUMNS // few), G), x, inverse, _operand(centers.flatten(1, 2), x), labels, counts,
        S, K, N, D, x.stride(0), x.stride(1), labels.stride(1), few, tile.rows, COLUMNS, tile.columns,
        warps=tile.warps, stages=tile.stages,
    )  # fmt: skip
    return labels[..., :N], counts.sum(1)


def sums(x: Tensor, inverse: Tensor, labels: Tensor, clusters: int) -> Tensor:
    """Sums [G, S, K, D] of the unit tokens by the labels of `nearest`."""
    (G, N, D), S, tile = x.shape, labels.shape[1], _tile("sums", x)
    ranges, apart = row_blocks(N, SUMMED_TOGETHER), row_blocks(S * clusters, COLUMNS)
    parts = torch.empty(G, ranges, S, clusters, D, device=x.device, dtype=torch.float32)
    _sums(
        (row_blocks(D, tile.columns) * apart * ranges, G), x, inverse, labels, parts, S, clusters, N, D,
        x.stride(0), x.stride(1), labels.stride(1), SUMMED_TOGETHER, COLUMNS, tile.rows, tile.columns,
        warps=tile.warps, stages=tile.stages,
    )  # fmt: skip
    return parts.sum(1)


def chords(x: Tensor, inverse: Tensor, vectors: Tensor, same: float) -> Tensor:
    """Squared chords [G, M, N] from unit vectors [G, M, D] to the tokens, 0 where below `same`."""
    (G, N, D), M, tile = x.shape, vectors.shape[1], _tile("nearest", x)
    found = torch.empty(G, M, N, device=x.device, dtype=torch.float32)
    _chords(
        (row_blocks(N, tile.rows) * row_blocks(M, TRIALS), G), x, inverse, _operand(vectors, x), found, same, M, N, D,
        x.stride(0), x.stride(1), inverse.stride(0), tile.rows, TRIALS, tile.columns,
        warps=tile.warps, stages=tile.stages,
    )  # fmt: skip
    return found


def _tile(name: str, x: Tensor) -> Tile:
    """Tiles are half as wide for tokens that are multiplied in fp32, whose halves are in registers."""
    tile, width = TILES[name], padded(x.shape[2])
    columns = tile.columns if x.dtype == torch.bfloat16 else tile.columns // 2
    return replace(tile, columns=min(width, columns))


def _operand(vectors: Tensor, x: Tensor) -> Tensor:
    """[G, M, D] as it is multiplied with x: for bf16 its halves [G, 2, M, D], read straight into the matrix units."""
    if x.dtype != torch.bfloat16:
        return vectors.contiguous()
    high = vectors.bfloat16()
    return torch.stack([high, (vectors - high).bfloat16()], 1)
