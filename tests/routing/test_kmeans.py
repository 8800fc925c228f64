"""Spherical k-means: quality against scikit-learn, invariances, and what must not change a result."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from sklearn.cluster import KMeans
from torch import Tensor
from torch.nn.functional import normalize

from monkeyjump.routing import kmeans, kmeans_tokens
from monkeyjump.routing.kmeans import KMeansResult, spherical_kmeans
from monkeyjump.routing.kmeans_tokens import Tokens
from tests.routing.kmeans_data import (
    DATA,
    assert_consistent,
    assert_mean_directions,
    assert_same,
    inertia,
    planted,
    rng,
    stack,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def _sklearn_inertia(x: Tensor, k: int, seed: int) -> float:
    return float(KMeans(k, n_init=10, random_state=seed).fit(normalize(x, dim=-1).numpy()).inertia_)


@pytest.mark.parametrize("k", [2, 3, 8])
@pytest.mark.parametrize("name", DATA)
def test_inertia_within_one_percent_of_sklearn(name: str, k: int) -> None:
    x = DATA[name]
    result = spherical_kmeans(x, k)
    assert float(inertia(x[None], result)) <= 1.01 * _sklearn_inertia(x, k, seed=0)
    assert_consistent(x[None], result)


def test_a_few_sinks_get_their_cluster() -> None:
    """0.2 % of the tokens, far from all others: k-means++ alone seldom seeds there, though it ends better."""
    g = rng(8)
    scale = 3 * torch.arange(1, 65).float().rsqrt()
    x = torch.randn(4, 1, 64, generator=g) * 2 + torch.randn(4, 3000, 64, generator=g) * scale * 0.7
    x[:, ::500] = 100 * torch.randn(4, 1, 64, generator=g) + torch.randn(4, 6, 64, generator=g)
    result = spherical_kmeans(x, 3)
    for block in range(4):
        best = min(_sklearn_inertia(x[block], 3, seed) for seed in range(3))
        assert float(inertia(x, result)[block]) <= 1.001 * best


def test_recovers_planted_clusters() -> None:
    x, directions, labels = planted(noise=0.1)
    result = spherical_kmeans(x, 4)
    match = (result.centers[0] @ directions.T).max(dim=1)
    assert sorted(match.indices.tolist()) == [0, 1, 2, 3]
    # a mean of ~225 tokens with noise 0.1 in 32 dimensions is off by about 0.1 * sqrt(32 / 225) = 0.04 rad
    assert float(match.values.clamp(max=1).acos().max()) < 0.08
    assert float((match.indices[result.labels[0]] == labels).float().mean()) > 0.99


def test_labels_are_nearest_centres() -> None:
    x = DATA["anisotropic"]
    result = spherical_kmeans(x, 5)
    assert torch.equal(result.labels[0], (normalize(x, dim=-1) @ result.centers[0].T).argmax(1))


def test_centres_are_mean_directions_when_converged(iterations: list[int]) -> None:
    x = DATA["anisotropic"]
    result = spherical_kmeans(x, 5, tol=0.0)
    assert_mean_directions(x, result)
    assert 1 < len(iterations) < 100


def test_deterministic_and_apart_from_the_global_rng() -> None:
    x = DATA["uniform sphere"]
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = spherical_kmeans(x, 6, seed=7, restarts=2)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    again = spherical_kmeans(x, 6, seed=7, restarts=2)
    for field in vars(first):
        assert torch.equal(getattr(first, field), getattr(again, field)), field
    # a sphere without clusters has many optima: another seed must find another one
    assert not torch.equal(first.labels, spherical_kmeans(x, 6, seed=8, restarts=2).labels)


def test_more_restarts_do_not_hurt() -> None:
    x = DATA["uniform sphere"]
    one, ten = (inertia(x[None], spherical_kmeans(x, 8, restarts=s)) for s in (1, 10))
    assert float(ten) <= float(one) * 1.0001


def test_batch_equals_each_block_alone() -> None:
    x = stack()
    together = spherical_kmeans(x, 4)
    assert len({tuple(sizes) for sizes in together.sizes.tolist()}) == 3  # the blocks do differ
    for block in range(3):
        alone = spherical_kmeans(x[block], 4)
        assert_same(alone, KMeansResult(*(field[block : block + 1] for field in vars(together).values())))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    x = stack().to(dtype)
    whole = spherical_kmeans(x, 4)
    seen: list[tuple[int, ...]] = []
    original = kmeans_tokens._chunks

    def spy(*args: Any, **how: Any) -> Iterator[tuple[slice, Tensor]]:
        for where, chunk in original(*args, **how):
            seen.append(tuple(chunk.shape))
            yield where, chunk

    monkeypatch.setattr(kmeans_tokens, "_chunks", spy)
    # one block's state is 4 * 10 * (3 + 4) * 900 = 252,000 bytes of half the scratch: groups of 2 blocks
    monkeypatch.setattr(kmeans_tokens, "SCRATCH_BYTES", 1_100_000)
    calls: list[tuple[int, int]] = []
    chunked = spherical_kmeans(x, 4, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(2, 3), (3, 3)]
    assert len({n for blocks, n, _ in seen if blocks == 2}) > 2  # chunks, the last one shorter
    assert_same(whole, chunked)


def test_smallest_possible_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    x = planted(60)[0]
    whole = spherical_kmeans(x, 3)
    monkeypatch.setattr(kmeans_tokens, "SCRATCH_BYTES", 1)
    assert_same(whole, spherical_kmeans(x, 3))


@pytest.mark.parametrize("spoiled", ["one seed repeated", "seeds opposite to the data"])
@pytest.mark.parametrize("max_iter", [1, 100])
def test_empty_clusters_are_reseeded(
    monkeypatch: pytest.MonkeyPatch, iterations: list[int], spoiled: str, max_iter: int
) -> None:
    x = planted(noise=0.05)[0]
    seed = kmeans._seed

    def bad_seed(tokens: Tokens, draws: Tensor) -> Tensor:
        centers = seed(tokens, draws)
        centers[:, :, 1:] = centers[:, :, :1] if spoiled == "one seed repeated" else -centers[:, :, :1]
        return centers

    monkeypatch.setattr(kmeans, "_seed", bad_seed)
    result = spherical_kmeans(x, 4, max_iter=max_iter, tol=0.0)
    assert int(result.sizes.min()) > 0
    assert_consistent(x[None], result)
    if max_iter > 1:  # and Lloyd went on from the reseeded centres until they were the means of their clusters
        assert 1 < len(iterations) < 100
        assert_mean_directions(x, result)


def test_reseeding_takes_the_worst_served_token() -> None:
    angle = torch.tensor([0.0, 0.1, 0.2, 1.0, 2.0])
    x = torch.stack([angle.cos(), angle.sin()], 1)[None] * 3
    tokens = Tokens(x, x.norm(dim=-1))
    centers = torch.tensor([[1.0, 0.0], [0.0, -1.0], [0.0, -1.0]]).view(1, 1, 3, 2)
    fixed, moved = kmeans._reseed_empty(tokens, centers, torch.tensor([[[False, True, True]]]))
    assert moved.tolist() == [[True]]
    # 2 rad is farthest from 0; then 1 rad is 1 away from both, all others nearer
    torch.testing.assert_close(fixed[0, 0], torch.stack([x[0, 0], x[0, 4], x[0, 3]]) / 3)


def test_finished_restarts_and_blocks_are_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clear clusters are done at once; a sphere without any goes on, alone and with ever fewer restarts."""
    x = torch.stack([planted(1500, 16, noise=0.02)[0], DATA["uniform sphere"]])
    together = spherical_kmeans(x, 4)
    read: list[tuple[float, int]] = []
    accumulate = Tokens.accumulate

    def spy(tokens: Tokens, centers: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor]:
        read.append((float(tokens.x[0, 0, 0]), centers.shape[1]))
        return accumulate(tokens, centers, labels)

    monkeypatch.setattr(Tokens, "accumulate", spy)
    monkeypatch.setattr(kmeans_tokens, "GROUP_TOKENS", 1500)  # each block its own group
    assert_same(together, spherical_kmeans(x, 4))
    restarts = [[s for first, s in read if first == float(block[0, 0])] for block in x]
    assert len(restarts[0]) < len(restarts[1]) / 2
    lloyd = restarts[1][:-2]  # the best restart is read twice more
    assert lloyd == sorted(lloyd, reverse=True)
    assert lloyd[0] == 10
    assert 1 <= lloyd[-1] < 10
