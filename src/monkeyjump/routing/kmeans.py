"""Spherical k-means over many blocks at once: a pure function of tokens and a seed.

Shapes: L blocks (G of them in a group), N tokens, D hidden, K clusters, S restarts, T trials of one seeding step.

The direction of a token is all that counts: assignment is by cosine and centres have norm 1. A token whose fp32 norm
is 0 has no direction: it is label -1 and takes part in nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from monkeyjump.errors import ConfigError
from monkeyjump.routing.kmeans_tokens import Tokens, blocks_together, by_kernels, token_norms

# Iterations between two looks at the result from the host; each look waits for the device.
CHECK_EVERY = 4


@dataclass(frozen=True)
class KMeansResult:
    """Clusters of each block, largest first."""

    centers: Tensor  # [L, K, D] fp32, norm 1
    labels: Tensor  # [L, N] int64, -1 for tokens of norm 0
    sizes: Tensor  # [L, K] int64; 0 only where a block has fewer than K distinct directions
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
    _check_arguments(x, k, restarts, max_iter, tol)
    x = x if x.dim() == 3 else x[None]
    trials = 2 + int(math.log(k))  # scikit-learn's number
    generator = torch.Generator().manual_seed(seed)  # on the CPU whatever the device of x, so that devices agree
    draws = torch.rand(k, restarts, trials, generator=generator, dtype=torch.float64).to(x.device)
    blocks, parts = len(x), []
    with torch.autocast(x.device.type, enabled=False):
        kernels = by_kernels(x, k)
        group = blocks_together(x, restarts, trials, kernels)
        norms = token_norms(x)
        _check_tokens(norms, k)
        for start in range(0, blocks, group):
            tokens = Tokens(x[start : start + group], norms[start : start + group], kernels)
            fits = _lloyd(tokens, _seed(tokens, draws), max_iter, tol)
            parts.append(_describe(tokens, _best_restart(tokens, fits)))
            if progress is not None:
                progress(min(start + group, blocks), blocks)
    return KMeansResult(*(torch.cat(field) for field in zip(*parts, strict=True)))


def _seed(tokens: Tokens, draws_KST: Tensor) -> Tensor:
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
        for where, chord in tokens.chords(candidates, 12 * S * T):
            torch.minimum(chord.view(G, S, t, -1), closest[:, :, None, where], out=trial[:, :, :t, where])
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
    """The state of all restarts, some of which have converged."""

    centers: Tensor  # [G, S, K, D]
    gain: Tensor  # [G, S] sum of cosines
    done: Tensor  # [G, S]

    def pick(self, which_GR: Tensor) -> _Fits:
        centers = self.centers.take_along_dim(which_GR[..., None, None], 1)
        return _Fits(centers, self.gain.gather(1, which_GR), self.done.gather(1, which_GR))

    def put(self, which_GR: Tensor, picked: _Fits) -> None:
        self.centers.scatter_(1, which_GR[..., None, None].expand_as(picked.centers), picked.centers)
        self.gain.scatter_(1, which_GR, picked.gain)
        self.done.scatter_(1, which_GR, picked.done)


def _lloyd(tokens: Tokens, centers_GSKD: Tensor, max_iter: int, tol: float) -> _Fits:
    """Run every restart until it has converged; the next look at the device leaves out those that have."""
    done = torch.zeros(centers_GSKD.shape[:2], dtype=torch.bool, device=centers_GSKD.device)
    fits = _Fits(centers_GSKD, centers_GSKD.new_zeros(done.shape), done)
    active = done.shape[1]
    for start in range(0, max_iter, CHECK_EVERY):
        # every block works on as many restarts as the slowest block has left
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


def _iterate(tokens: Tokens, fits: _Fits, tol: float) -> Tensor:
    """Move the centres of restarts that have not converged; return how many tokens [G, S, K] each centre had."""
    sums, counts = tokens.accumulate(fits.centers)
    length = sums.norm(dim=-1)
    # An empty cluster keeps its centre, and so does one whose tokens cancel out: neither has a direction.
    keep = (length <= 1e-6 * counts) | fits.done[..., None]
    moved = torch.where(keep[..., None], fits.centers, sums / length[..., None])
    fits.gain = torch.where(fits.done, fits.gain, length.sum(-1))
    # This also ends a restart whose labels did not change: the same labels give the same sums, so a shift of exactly 0.
    fits.done = fits.done | ((moved - fits.centers).norm(dim=-1).amax(-1) <= tol)
    fits.centers = moved
    return counts


def _reseed_empty(tokens: Tokens, centers: Tensor, empty_GSK: Tensor) -> tuple[Tensor, Tensor]:
    """Move each empty centre onto the token worst served by the others, one after the other; also which restarts moved.

    Where every token is served exactly there is nothing to move to, and the cluster stays empty.
    """
    reseeded = torch.zeros_like(empty_GSK[..., 0])
    slots = torch.arange(empty_GSK.shape[2], device=centers.device)
    for _ in range(int(empty_GSK.sum(-1).max())):
        chord, index = tokens.worst_served(centers, empty_GSK)
        fix = empty_GSK.any(-1) & (chord > tokens.same_direction)
        slot = (slots == empty_GSK.int().argmax(-1, keepdim=True)) & fix[..., None]
        centers = torch.where(slot[..., None], tokens.directions(index)[:, :, None], centers)
        empty_GSK = empty_GSK & ~slot
        reseeded |= fix
    return centers, reseeded


def _best_restart(tokens: Tokens, fits: _Fits) -> Tensor:
    """Centres [G, 1, K, D] of the restart with the largest sum of cosines, without an empty cluster."""
    # the first of those that differ by rounding alone: many restarts find the same clusters
    best = (fits.gain >= fits.gain.amax(1, keepdim=True) * (1 - 1e-6)).int().argmax(1, keepdim=True)
    centers = fits.pick(best).centers
    # A reseeded centre can take the last tokens of another cluster; each serves some token better and none worse.
    for _ in range(centers.shape[2]):
        _, counts = tokens.accumulate(centers)
        if not bool((counts == 0).any()):
            break
        centers, _ = _reseed_empty(tokens, centers, counts == 0)
    return centers


def _describe(tokens: Tokens, centers_G1KD: Tensor) -> tuple[Tensor, ...]:
    """The fields of KMeansResult for a group, clusters sorted by size."""
    labels = torch.empty_like(tokens.norms, dtype=torch.int64)
    _, counts = tokens.accumulate(centers_G1KD, labels[:, None])
    order = counts.squeeze(1).argsort(dim=1, descending=True, stable=True)
    centers = centers_G1KD.squeeze(1).take_along_dim(order[..., None], 1)
    sizes = counts.squeeze(1).gather(1, order)
    labels = order.argsort(1).gather(1, labels).masked_fill(~tokens.valid, -1)
    totals = [(tokens.norms * (labels == cluster)).sum(-1, dtype=torch.float64) for cluster in range(sizes.shape[1])]
    mean_norms = (torch.stack(totals, 1) / sizes.clamp(min=1)).float()
    return centers, labels, sizes, mean_norms


def _check_arguments(x: Tensor, k: int, restarts: int, max_iter: int, tol: float) -> None:
    problems = [
        f"{name} is {value}; it must be at least 1."
        for name, value in (("k", k), ("restarts", restarts), ("max_iter", max_iter))
        if value < 1
    ]
    if not tol >= 0:
        problems.append(f"tol is {tol}; it must be 0 or more.")
    if x.dim() not in (2, 3) or 0 in x.shape:
        problems.append(f"x has shape {list(x.shape)}; expected [blocks, tokens, hidden] or [tokens, hidden].")
    elif x.shape[-2] < k:
        problems.append(f"x has {x.shape[-2]} tokens for {k} clusters; collect more tokens or lower k.")
    if not x.is_floating_point():
        problems.append(f"x is {x.dtype}; expected floating-point hidden states.")
    if problems:
        raise ConfigError(problems, title="cannot cluster these tokens")


def _check_tokens(norms_LN: Tensor, k: int) -> None:
    """Refuse NaN, inf and blocks with too few tokens to cluster; waits for the device once."""
    n_tokens = norms_LN.shape[1]
    bad, usable = torch.stack([(~norms_LN.isfinite()).sum(1), (norms_LN > 0).sum(1)]).tolist()
    problems = []
    for block, (n_bad, n_usable) in enumerate(zip(bad, usable, strict=True)):
        if n_bad:
            problems.append(
                f"block {block}: {n_bad} of {n_tokens} tokens hold NaN or inf, or a norm beyond fp32; "
                "the likely cause is fp16 overflow, run the model in bf16 or fp32."
            )
        elif n_usable < k:
            problems.append(
                f"block {block}: {n_usable} of {n_tokens} tokens have a norm above 0, too few for {k} clusters; "
                "collect more tokens or lower k."
            )
    if problems:
        raise ConfigError(problems, title="cannot cluster these tokens")
