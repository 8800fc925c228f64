"""Tokens that k-means is tried on, and what must hold of every result."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

from monkeyjump.routing.kmeans import KMeansResult


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def planted(n: int = 900, d: int = 32, k: int = 4, noise: float = 0.1, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens around k random directions, of very different norms; the directions; the true labels."""
    g = rng(seed)
    directions = normalize(torch.randn(k, d, generator=g), dim=-1)
    labels = torch.randint(k, (n,), generator=g)
    tokens = directions[labels] + noise * torch.randn(n, d, generator=g)
    return tokens * torch.rand(n, 1, generator=g).mul(4).exp(), directions, labels


def _anisotropic() -> Tensor:
    """Overlapping clusters of unequal size and spread in a space whose variances fall as 1/rank."""
    g = rng(1)
    scale = 1 / torch.arange(1, 49).float()
    labels = torch.multinomial(torch.tensor([0.6, 0.25, 0.1, 0.05]), 2000, replacement=True, generator=g)
    spread = torch.tensor([0.3, 0.6, 0.9, 0.4])[labels, None]
    return (torch.randn(4, 48, generator=g)[labels] + spread * torch.randn(2000, 48, generator=g)) * scale


def _common_direction_with_sinks() -> Tensor:
    """What hidden states look like: one direction shared by all, small differences, a few huge 'sink' tokens apart."""
    g = rng(2)
    x = 5 * torch.randn(1, 64, generator=g) + planted(2000, 64, 5, noise=0.2, seed=3)[0].clamp(-3, 3)
    x[::400] = 500 * torch.randn(1, 64, generator=g) + torch.randn(5, 64, generator=g)
    return x


DATA = {
    "planted": planted()[0],
    "planted, noisy": planted(noise=0.5)[0],
    "anisotropic": _anisotropic(),
    "common direction and sinks": _common_direction_with_sinks(),
    "uniform sphere": torch.randn(1500, 16, generator=rng(4)),
}


def assert_same(a: KMeansResult, b: KMeansResult) -> None:
    assert torch.equal(a.labels, b.labels)
    assert torch.equal(a.sizes, b.sizes)
    torch.testing.assert_close(a.centers, b.centers, atol=1e-5, rtol=0)
    torch.testing.assert_close(a.mean_norms, b.mean_norms, rtol=1e-5, atol=0)


def inertia(x: Tensor, result: KMeansResult) -> Tensor:
    """Sum of squares of the unit tokens of x [L, N, D] around the mean of their cluster: [L], fp64."""
    unit, total = normalize(x.double(), dim=-1), torch.zeros(len(x), dtype=torch.float64)
    for block, labels in enumerate(result.labels):
        for label in labels[labels >= 0].unique():
            mine = unit[block, labels == label]
            total[block] += (mine - mine.mean(0)).square().sum()
    return total


def assert_consistent(x: Tensor, result: KMeansResult) -> None:
    """What must hold of any result on x [L, N, D], computed again the slow way."""
    torch.testing.assert_close(result.centers.norm(dim=-1), torch.ones(result.sizes.shape), atol=1e-5, rtol=0)
    assert torch.equal(result.sizes, result.sizes.sort(dim=1, descending=True, stable=True).values)
    for block in range(len(x)):
        for cluster, size in enumerate(result.sizes[block].tolist()):
            mine = result.labels[block] == cluster
            assert int(mine.sum()) == size
            if size:
                norm = x[block, mine].double().norm(dim=-1).mean()
                torch.testing.assert_close(result.mean_norms[block, cluster].double(), norm, rtol=1e-5, atol=0)


def assert_mean_directions(x: Tensor, result: KMeansResult) -> None:
    unit = normalize(x, dim=-1)
    means = torch.stack([unit[result.labels[0] == cluster].mean(0) for cluster in range(result.sizes.shape[1])])
    torch.testing.assert_close(result.centers[0], normalize(means, dim=-1), atol=2e-5, rtol=0)


def stack() -> Tensor:
    return torch.stack([planted(noise=noise, seed=seed)[0] for seed, noise in enumerate((0.1, 0.2, 0.3))])
