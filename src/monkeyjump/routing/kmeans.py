"""Spherical k-means over many blocks at once: a pure function of tokens and a seed.

Shapes: L blocks (G of them in a group), N tokens, D hidden, K clusters, S restarts, T trials of one seeding step.

The direction of a token is all that counts: assignment is by cosine and centres have norm 1. A token's norm does not
change which centre is nearest, so raw tokens go straight into `C @ x^T` and the norm enters once, as the weight 1/|x|
in `onehot @ x`: no normalised copy of x exists. A token whose fp32 norm is 0 has no direction: it is label -1 and takes
part in nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from monkeyjump.routing.kmeans_checks import check_arguments, check_tokens
from monkeyjump.routing.products import add_sums, dots, halves, multiplies_narrow

# Scratch memory of one fit: half for per-token state of a group of blocks, up to half for one chunk of tokens. A single
# block is never split, so 4 * S * (T + 4) bytes per token is the floor.
SCRATCH_BYTES = 256 * 2**20
# Tokens of a group. On a GPU an iteration of 50,000 tokens is shorter than the host takes to launch it, so many blocks
# go together, though all are then read until the slowest is done, in as much more memory.
GROUP_TOKENS = 2**16
ON_GPU = 8  # times as many, and as much scratch
# Iterations between two looks at the result from the host; each look waits for the device.
CHECK_EVERY = 4
# Squared chords under this are rounding (a few fp32 ulp of a cosine near 1): the two directions are the same.
SAME_DIRECTION = 5e-7


@dataclass(frozen=True)
class KMeansResult:
    """Clusters of each block, largest first."""

    centers: Tensor  # [L, K, D] fp32, norm 1
    labels: Tensor  # [L, N] int64, -1 for tokens of norm 0
    sizes: Tensor  # [L, K] int64; 0 only where a block has fewer than K distinct directions
    inertia: Tensor  # [L] fp64, sum of squares of the normalised tokens around the mean of their cluster
    iterations: Tensor  # [L] int64, of the restart that was kept
    mean_norms: Tensor  # [L, K] fp32, mean norm of the raw tokens of a cluster


@torch.no_grad()
def spherical_kmeans(
    x: Tensor,
    k: int,
    *,
    seed: int = 0,
    restarts: int = 10,
    max_iter: int = 100,
    tol: float = 1e-4,
    progress: Callable[[int, int], None] | None = None,
) -> KMeansResult:
    """Cluster the tokens x [L, N, D] of each block by direction; [N, D] is one block (the result keeps L = 1).

    The best of `restarts` greedy k-means++ starts is kept, by the sum of cosines to the centres. A restart has
    converged when no centre moves by more than `tol`. All blocks use the same random draws, so that a block gives the
    same clusters alone and in a batch; the global random state is neither read nor changed.
    `progress(blocks_done, blocks)` is called after each group of blocks.
    """
    check_arguments(x, k, restarts, max_iter, tol)
    x = x if x.dim() == 3 else x[None]
    trials = 2 + int(math.log(k))  # scikit-learn's number
    generator = torch.Generator().manual_seed(seed)  # on the CPU whatever the device of x, so that devices agree
    draws = torch.rand(k, restarts, trials, generator=generator, dtype=torch.float64).to(x.device)
    blocks, n_tokens, _ = x.shape
    more = ON_GPU if x.is_cuda else 1
    room = more * SCRATCH_BYTES // 2 // (4 * restarts * (trials + 4))
    group = max(1, min(room, more * GROUP_TOKENS) // n_tokens)
    parts = []
    with torch.autocast(x.device.type, enabled=False):
        norms = _token_norms(x)
        check_tokens(norms, k)
        for start in range(0, blocks, group):
            tokens = _Tokens(x[start : start + group], norms[start : start + group])
            fits = _lloyd(tokens, _seed(tokens, draws), max_iter, tol)
            parts.append(_describe(tokens, *_best_restart(tokens, fits)))
            if progress is not None:
                progress(min(start + group, blocks), blocks)
    return KMeansResult(*(torch.cat(field) for field in zip(*parts, strict=True)))


class _Tokens:
    """The raw tokens of a group of blocks and what normalises them."""

    def __init__(self, x_GND: Tensor, norms_GN: Tensor) -> None:
        self.x, self.norms = x_GND, norms_GN
        self.valid = norms_GN > 0
        self.inverse = torch.where(self.valid, 1 / norms_GN, 0.0)
        narrow = multiplies_narrow(x_GND)
        self.weight = halves(self.inverse, 1) if narrow else self.inverse  # [G, 2, N] or [G, N]
        # Matrix units cut off what fp32 would round, once in 16 entries of D, and bf16 halves lack the last 8 bits.
        self.same_direction = max(4e-6, x_GND.shape[2] * 2.0**-27) if narrow else SAME_DIRECTION

    def directions(self, index_GM: Tensor) -> Tensor:
        """Unit vectors [G, M, D] of the tokens at index_GM."""
        picked = self.x.take_along_dim(index_GM[..., None], 1).float()
        return picked * self.inverse.gather(1, index_GM)[..., None]


def _chunks(x: Tensor, bytes_per_token: int) -> Iterator[tuple[slice, Tensor]]:
    """(where, tokens [G, n, D] as they are multiplied); copy and `bytes_per_token` fill the chunk's scratch."""
    as_it_is = x.dtype == torch.float32 or multiplies_narrow(x)
    copy = 0 if as_it_is else 4 * x.shape[2]
    # A GPU wants few launches. On the CPU 16 MB chunks are reused by malloc, larger ones are mapped anew each time: a
    # bf16 fit of 4 x 20000 x 576, 12 iterations, took 2.5 s of one core instead of 3.9.
    scratch = ON_GPU * SCRATCH_BYTES // 2 if x.is_cuda else SCRATCH_BYTES // 16
    size = max(1, scratch // (x.shape[0] * (copy + bytes_per_token)))
    for start in range(0, x.shape[1], size):
        where = slice(start, min(start + size, x.shape[1]))
        yield where, x[:, where] if as_it_is else x[:, where].float()


def _seed(tokens: _Tokens, draws_KST: Tensor) -> Tensor:
    """Greedy k-means++: of T tokens drawn by squared chord to the seeds so far, keep the one that helps most.

    Of several restarts, the first takes the farthest token each time: a few tokens far from all others (attention
    sinks) are drawn rarely and lose to the middle of a crowd, though their own cluster can be the better end.
    """
    (G, N, D), (K, S, T) = tokens.x.shape, draws_KST.shape
    closest = 4.0 * tokens.valid[:, None].float().expand(G, S, N)  # 4: the largest chord, so a uniform first draw
    trial = closest.new_empty(G, S, T, N)
    seeds = []
    for step in range(K):
        t = 1 if step == 0 else T
        index = _draw(closest, draws_KST[step, :, :t], tokens.valid)
        if step > 0 and S > 1:
            chord, farthest = closest[:, 0].max(-1, keepdim=True)
            index[:, 0] = torch.where(chord > 0, farthest, index[:, 0])  # all T trials the same
        candidates = tokens.directions(index.flatten(1))
        for where, chunk in _chunks(tokens.x, 12 * S * T):
            cosine = dots(candidates, chunk).mul_(tokens.inverse[:, None, where])
            chord = cosine.mul_(-2).add_(2).view(G, S, t, -1)
            chord.masked_fill_(chord < tokens.same_direction, 0)
            torch.minimum(chord, closest[:, :, None, where], out=trial[:, :, :t, where])
        best = trial[:, :, :t].sum(-1, dtype=torch.float64).argmin(-1)[..., None, None]
        closest = trial.take_along_dim(best, 2).squeeze(2)
        seeds.append(candidates.view(G, S, t, D).take_along_dim(best, 2).squeeze(2))
    return torch.stack(seeds, 2)


def _draw(weight_GSN: Tensor, draws_ST: Tensor, valid_GN: Tensor) -> Tensor:
    """Token indices [G, S, T] in proportion to the weights; uniform where every weight is 0 (all served exactly)."""
    exact = weight_GSN.sum(-1, keepdim=True) == 0
    cumulative = torch.where(exact, valid_GN[:, None].float(), weight_GSN).cumsum(-1, dtype=torch.float64)
    # right=True finds the first token whose cumulative weight exceeds the draw, never one of weight 0
    picks = torch.searchsorted(cumulative, draws_ST * cumulative[..., -1:], right=True)
    return picks.clamp_(max=weight_GSN.shape[-1] - 1)


@dataclass
class _Fits:
    """Restarts under way."""

    centers: Tensor  # [G, S, K, D]
    gain: Tensor  # [G, S] sum of cosines
    iterations: Tensor  # [G, S]
    done: Tensor  # [G, S]

    def pick(self, which_GR: Tensor) -> _Fits:
        numbers = (self.gain, self.iterations, self.done)
        centers = self.centers.take_along_dim(which_GR[..., None, None], 1)
        return _Fits(centers, *(number.gather(1, which_GR) for number in numbers))

    def put(self, which_GR: Tensor, picked: _Fits) -> None:
        self.centers.scatter_(1, which_GR[..., None, None].expand_as(picked.centers), picked.centers)
        for name in ("gain", "iterations", "done"):
            getattr(self, name).scatter_(1, which_GR, getattr(picked, name))


def _lloyd(tokens: _Tokens, centers_GSKD: Tensor, max_iter: int, tol: float) -> _Fits:
    """Every restart until it has converged; those that have are left out from the next look at the device on."""
    done = torch.zeros(centers_GSKD.shape[:2], dtype=torch.bool, device=centers_GSKD.device)
    fits = _Fits(centers_GSKD, centers_GSKD.new_zeros(done.shape), torch.zeros_like(done, dtype=torch.int64), done)
    active = done.shape[1]
    for start in range(0, max_iter, CHECK_EVERY):
        # as many of each block as the slowest block has left
        which = fits.done.int().argsort(dim=1, stable=True)[:, :active]
        some = fits.pick(which)
        for _ in range(min(CHECK_EVERY, max_iter - start)):
            counts = _iterate(tokens, some, tol)
        active, some_empty = torch.stack([(~some.done).sum(1).max(), (counts == 0).any().long()]).tolist()
        if some_empty:
            some.centers, reseeded = _reseed_empty(tokens, some.centers, counts == 0)
            some.done = some.done & ~reseeded
            active = int((~some.done).sum(1).max())
        fits.put(which, some)
        if not active:
            break
    return fits


def _iterate(tokens: _Tokens, fits: _Fits, tol: float) -> Tensor:
    """Move the centres of what is not done, in place; the tokens [G, S, K] that each had before."""
    sums, counts = _accumulate(tokens, fits.centers)
    length = sums.norm(dim=-1)
    # An empty cluster keeps its centre, and so does one whose tokens cancel out: neither has a direction.
    keep = (length <= 1e-6 * counts) | fits.done[..., None]
    moved = torch.where(keep[..., None], fits.centers, sums / length[..., None])
    fits.gain = torch.where(fits.done, fits.gain, length.sum(-1))
    fits.iterations = fits.iterations + ~fits.done
    # covers "no label changed": the same labels give the same sums, so a shift of exactly 0
    fits.done = fits.done | ((moved - fits.centers).norm(dim=-1).amax(-1) <= tol)
    fits.centers = moved
    return counts


def _accumulate(tokens: _Tokens, centers: Tensor, labels_GSN: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """One reading of x: sums of unit tokens [G, S, K, D] and counts [G, S, K] per nearest centre; labels if wanted."""
    G, S, K, D = centers.shape
    sums = centers.new_zeros(G, S * K, D)
    counts = torch.zeros(G, S, K, dtype=torch.int64, device=centers.device)
    clusters = torch.arange(K, device=centers.device)[:, None]
    for where, chunk in _chunks(tokens.x, 14 * S * K + 8 * S):
        scores = dots(centers.flatten(1, 2), chunk).view(G, S, K, -1)
        nearest = scores.max(2, keepdim=True).indices  # the CPU's argmax over this axis is 10 times slower
        onehot = (nearest == clusters) & tokens.valid[:, None, None, where]
        counts += onehot.sum(-1)
        add_sums(sums, onehot.flatten(1, 2), tokens.weight[..., where], chunk)
        if labels_GSN is not None:
            labels_GSN[:, :, where] = nearest.squeeze(2)
    return sums.view(G, S, K, D), counts


def _reseed_empty(tokens: _Tokens, centers: Tensor, empty_GSK: Tensor) -> tuple[Tensor, Tensor]:
    """Move each empty centre onto the token worst served by the others, one after the other; also which restarts moved.

    Where every token is served exactly there is nothing to move to, and the cluster stays empty.
    """
    reseeded = torch.zeros_like(empty_GSK[..., 0])
    slots = torch.arange(empty_GSK.shape[2], device=centers.device)
    for _ in range(int(empty_GSK.sum(-1).max())):
        chord, index = _worst_served(tokens, centers, empty_GSK)
        fix = empty_GSK.any(-1) & (chord > tokens.same_direction)
        slot = (slots == empty_GSK.int().argmax(-1, keepdim=True)) & fix[..., None]
        centers = torch.where(slot[..., None], tokens.directions(index)[:, :, None], centers)
        empty_GSK = empty_GSK & ~slot
        reseeded |= fix
    return centers, reseeded


def _worst_served(tokens: _Tokens, centers: Tensor, empty_GSK: Tensor) -> tuple[Tensor, Tensor]:
    """Largest squared chord [G, S] from a token to its nearest non-empty centre, and that token's index [G, S]."""
    G, S, K, _ = centers.shape
    chord = centers.new_full((G, S), -1.0)
    index = torch.zeros_like(chord, dtype=torch.int64)
    for where, chunk in _chunks(tokens.x, 12 * S * K + 8 * S):
        scores = dots(centers.flatten(1, 2), chunk).view(G, S, K, -1)
        cosine = scores.masked_fill_(empty_GSK[..., None], -math.inf).amax(2) * tokens.inverse[:, None, where]
        far, at = (2 - 2 * cosine).masked_fill_(~tokens.valid[:, None, where], -1.0).max(-1)
        index = torch.where(far > chord, at + where.start, index)
        chord = torch.maximum(chord, far)
    return chord, index


def _best_restart(tokens: _Tokens, fits: _Fits) -> tuple[Tensor, Tensor]:
    """Centres [G, 1, K, D] of the restart with the largest sum of cosines, without an empty cluster; its iterations."""
    # the first of those that differ by rounding alone: many restarts find the same clusters
    best = (fits.gain >= fits.gain.amax(1, keepdim=True) * (1 - 1e-6)).int().argmax(1, keepdim=True)
    centers = fits.pick(best).centers
    # A reseeded centre can take the last tokens of another cluster; each serves some token better and none worse.
    for _ in range(centers.shape[2]):
        _, counts = _accumulate(tokens, centers)
        if not bool((counts == 0).any()):
            break
        centers, _ = _reseed_empty(tokens, centers, counts == 0)
    return centers, fits.iterations.gather(1, best).squeeze(1)


def _describe(tokens: _Tokens, centers_G1KD: Tensor, iterations_G: Tensor) -> tuple[Tensor, ...]:
    """The fields of KMeansResult for a group, clusters sorted by size."""
    labels = torch.empty_like(tokens.norms, dtype=torch.int64)
    sums, counts = _accumulate(tokens, centers_G1KD, labels[:, None])
    order = counts.squeeze(1).argsort(dim=1, descending=True, stable=True)
    centers = centers_G1KD.squeeze(1).take_along_dim(order[..., None], 1)
    sizes = counts.squeeze(1).gather(1, order)
    means = sums.squeeze(1).take_along_dim(order[..., None], 1) / sizes.clamp(min=1)[..., None]
    labels = order.argsort(1).gather(1, labels)

    inertia = torch.zeros(len(labels), dtype=torch.float64, device=labels.device)
    for where, chunk in _chunks(tokens.x, 12 * means.shape[2]):
        # the difference itself, not 1 - |mean|^2, which cancels in fp32 when clusters are tight
        spread = (chunk * tokens.inverse[:, where, None]).sub_(means.take_along_dim(labels[:, where, None], 1))
        inertia += (spread.square_().sum(-1) * tokens.valid[:, where]).sum(-1, dtype=torch.float64)
    labels = labels.masked_fill(~tokens.valid, -1)
    totals = [(tokens.norms * (labels == cluster)).sum(-1, dtype=torch.float64) for cluster in range(means.shape[1])]
    mean_norms = (torch.stack(totals, 1) / sizes.clamp(min=1)).float()
    return centers, labels, sizes, inertia, iterations_G, mean_norms


def _token_norms(x: Tensor) -> Tensor:
    """Norms [L, N] of the raw tokens in fp32, one block at a time."""
    norms = torch.empty(x.shape[:2], device=x.device)
    for block, out in zip(x, norms, strict=True):
        for where, chunk in _chunks(block[None], 4 * x.shape[2]):
            out[where] = torch.linalg.vector_norm(chunk[0], dim=-1, dtype=torch.float32)
    return norms
