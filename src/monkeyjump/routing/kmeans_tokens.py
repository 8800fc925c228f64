"""The tokens that k-means clusters and the functions that read them, in chunks by torch or at once by Triton kernels.

Shapes: L blocks (G of them in a group), N tokens (n of them in a chunk), D hidden, K clusters, S restarts, M vectors.

A token's norm does not change which centre is nearest, so raw tokens go straight into `C @ x^T` and the norm enters
once, as the weight 1/|x| in `onehot @ x`: no normalised copy of x exists. A token whose fp32 norm is 0 has no
direction: it is in no sum and no count.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from monkeyjump.ops import dispatch

# Scratch memory of one fit: half for per-token state of a group of blocks, up to half for one chunk of tokens. A single
# block is never split, so 4 * S * (T + 4) bytes per token is the floor.
SCRATCH_BYTES = 256 * 2**20
# Tokens of a group. On a GPU an iteration of 50,000 tokens is shorter than the host takes to launch it, so many blocks
# go together, though all are then read until the slowest is done, in as much more memory.
GROUP_TOKENS = 2**16
ON_GPU = 8  # a GPU gets this many times the tokens and the scratch memory
# Squared chords under this are rounding (a few fp32 ulp of a cosine near 1): the two directions are the same.
SAME_DIRECTION = 5e-7


def by_kernels(x: Tensor, clusters: int) -> bool:
    if not dispatch.uses_kernels(x):
        return False
    from monkeyjump.ops.kernels import kmeans

    return kmeans.supported(clusters)


def blocks_together(x: Tensor, restarts: int, trials: int, kernels: bool) -> int:
    """How many blocks form a group. Kernels take few launches whatever the size, so memory alone limits them."""
    more = ON_GPU if x.is_cuda else 1
    room = more * SCRATCH_BYTES // 2 // (4 * restarts * (trials + 4))
    return max(1, (room if kernels else min(room, more * GROUP_TOKENS)) // x.shape[1])


class Tokens:
    """The raw tokens of a group of blocks and what normalises them."""

    def __init__(self, x_GND: Tensor, norms_GN: Tensor, kernels: bool = False) -> None:
        self.x, self.norms, self.kernels = x_GND, norms_GN, kernels
        self.valid = norms_GN > 0
        self.inverse = torch.where(self.valid, 1 / norms_GN, 0.0)
        # Matrix units cut off what fp32 would round, and bf16 halves lack the last 8 bits: chords are less exact.
        self.same_direction = max(4e-6, 3e-5 * x_GND.shape[2] ** -0.5) if kernels else SAME_DIRECTION
        if kernels and x_GND.stride(2) != 1:
            self.x = x_GND.contiguous()

    def directions(self, index_GM: Tensor) -> Tensor:
        """Unit vectors [G, M, D] of the tokens at index_GM."""
        picked = self.x.take_along_dim(index_GM[..., None], 1).float()
        return picked * self.inverse.gather(1, index_GM)[..., None]

    def chunks(self, bytes_per_token: int) -> Iterator[tuple[slice, Tensor]]:
        """(where, tokens [G, n, D], in fp32 for torch); the copy and `bytes_per_token` fill the scratch."""
        return _chunks(self.x, bytes_per_token, as_it_is=self.kernels)

    def chords(self, vectors_GMD: Tensor, bytes_per_token: int) -> Iterator[tuple[slice, Tensor]]:
        """(where, squared chords [G, M, n] of unit vectors and the unit tokens there, 0 for the same direction)."""
        for where, chunk in self.chunks(bytes_per_token):
            if self.kernels:
                from monkeyjump.ops.kernels import kmeans

                yield where, kmeans.chords(chunk, self.inverse[:, where], vectors_GMD, self.same_direction)
            else:
                chord = torch.bmm(vectors_GMD, chunk.mT).mul_(self.inverse[:, None, where]).mul_(-2).add_(2)
                yield where, chord.masked_fill_(chord < self.same_direction, 0)

    def accumulate(self, centers: Tensor, labels_GSN: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Sums of unit tokens [G, S, K, D] and counts [G, S, K] per nearest centre; labels if wanted.

        A token without a direction may get any label.
        """
        if self.kernels:
            from monkeyjump.ops.kernels import kmeans

            labels, counts = kmeans.nearest(self.x, self.inverse, centers)
            if labels_GSN is not None:
                labels_GSN.copy_(labels).clamp_(min=0)
            return kmeans.sums(self.x, self.inverse, labels, centers.shape[2]), counts
        G, S, K, D = centers.shape
        sums = centers.new_zeros(G, S * K, D)
        counts = torch.zeros(G, S, K, dtype=torch.int64, device=centers.device)
        clusters = torch.arange(K, device=centers.device)[:, None]
        for where, chunk in self.chunks(14 * S * K + 8 * S):
            scores = torch.bmm(centers.flatten(1, 2), chunk.mT).view(G, S, K, -1)
            nearest = scores.max(2, keepdim=True).indices  # the CPU's argmax over this axis is 10 times slower
            onehot = (nearest == clusters) & self.valid[:, None, None, where]
            counts += onehot.sum(-1)
            sums.baddbmm_(onehot.flatten(1, 2) * self.inverse[:, None, where], chunk)
            if labels_GSN is not None:
                labels_GSN[:, :, where] = nearest.squeeze(2)
        return sums.view(G, S, K, D), counts

    def worst_served(self, centers: Tensor, empty_GSK: Tensor) -> tuple[Tensor, Tensor]:
        """Largest squared chord [G, S] from a token to its nearest non-empty centre, and that token's index [G, S]."""
        G, S, K, _ = centers.shape
        chord = centers.new_full((G, S), -1.0)
        index = torch.zeros_like(chord, dtype=torch.int64)
        for where, chords in self.chords(centers.flatten(1, 2), 12 * S * K + 8 * S):
            near = chords.view(G, S, K, -1).masked_fill_(empty_GSK[..., None], math.inf).amin(2)
            far, at = near.masked_fill_(~self.valid[:, None, where], -1.0).max(-1)
            index = torch.where(far > chord, at + where.start, index)
            chord = torch.maximum(chord, far)
        return chord, index


def _chunks(x: Tensor, bytes_per_token: int, as_it_is: bool = False) -> Iterator[tuple[slice, Tensor]]:
    as_it_is = as_it_is or x.dtype == torch.float32
    copy = 0 if as_it_is else 4 * x.shape[2]
    # A GPU wants few launches. On the CPU 16 MB chunks are reused by malloc, larger ones are mapped anew each time: a
    # bf16 fit of 4 x 20000 x 576, 12 iterations, took 2.5 s of one core instead of 3.9.
    scratch = ON_GPU * SCRATCH_BYTES // 2 if x.is_cuda else SCRATCH_BYTES // 16
    size = max(1, scratch // (x.shape[0] * (copy + bytes_per_token)))
    for start in range(0, x.shape[1], size):
        where = slice(start, min(start + size, x.shape[1]))
        yield where, x[:, where] if as_it_is else x[:, where].float()


def token_norms(x: Tensor) -> Tensor:
    """Norms [L, N] of the raw tokens in fp32."""
    if x.is_cuda and x.dtype != torch.float64:  # a GPU reads x as it is, the CPU would make a copy
        return torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).contiguous()
    norms = torch.empty(x.shape[:2], device=x.device)
    for block, out in zip(x, norms, strict=True):
        for where, chunk in _chunks(block[None], 4 * x.shape[2]):
            out[where] = torch.linalg.vector_norm(chunk[0], dim=-1, dtype=torch.float32)
    return norms
