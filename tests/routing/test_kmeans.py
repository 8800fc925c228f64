"""Spherical k-means: quality against scikit-learn, invariances, and the inputs that break a naive one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from sklearn.cluster import KMeans
from threadpoolctl import threadpool_limits
from torch import Tensor
from torch.nn.functional import normalize

from monkeyjump.errors import ConfigError
from monkeyjump.routing import kmeans, products
from monkeyjump.routing.kmeans import KMeansResult, spherical_kmeans


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Thousands of tiny operations: on busy cores the threads of each wait for one another, 10 to 20 times slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with threadpool_limits(1):
        yield
    torch.set_num_threads(threads)


def _rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _planted(n: int = 900, d: int = 32, k: int = 4, noise: float = 0.1, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens around k random directions, of very different norms; the directions; the true labels."""
    g = _rng(seed)
    directions = normalize(torch.randn(k, d, generator=g), dim=-1)
    labels = torch.randint(k, (n,), generator=g)
    tokens = directions[labels] + noise * torch.randn(n, d, generator=g)
    return tokens * torch.rand(n, 1, generator=g).mul(4).exp(), directions, labels


def _anisotropic() -> Tensor:
    """Overlapping clusters of unequal size and spread in a space whose variances fall as 1/rank."""
    g = _rng(1)
    scale = 1 / torch.arange(1, 49).float()
    labels = torch.multinomial(torch.tensor([0.6, 0.25, 0.1, 0.05]), 2000, replacement=True, generator=g)
    spread = torch.tensor([0.3, 0.6, 0.9, 0.4])[labels, None]
    return (torch.randn(4, 48, generator=g)[labels] + spread * torch.randn(2000, 48, generator=g)) * scale


def _common_direction_with_sinks() -> Tensor:
    """What hidden states look like: one direction shared by all, small differences, a few huge 'sink' tokens apart."""
    g = _rng(2)
    x = 5 * torch.randn(1, 64, generator=g) + _planted(2000, 64, 5, noise=0.2, seed=3)[0].clamp(-3, 3)
    x[::400] = 500 * torch.randn(1, 64, generator=g) + torch.randn(5, 64, generator=g)
    return x


DATA = {
    "planted": _planted()[0],
    "planted, noisy": _planted(noise=0.5)[0],
    "anisotropic": _anisotropic(),
    "common direction and sinks": _common_direction_with_sinks(),
    "uniform sphere": torch.randn(1500, 16, generator=_rng(4)),
}


def _sklearn_inertia(x: Tensor, k: int, seed: int) -> float:
    return float(KMeans(k, n_init=10, random_state=seed).fit(normalize(x, dim=-1).numpy()).inertia_)


def _assert_same(a: KMeansResult, b: KMeansResult) -> None:
    assert torch.equal(a.labels, b.labels)
    assert torch.equal(a.sizes, b.sizes)
    torch.testing.assert_close(a.centers, b.centers, atol=1e-5, rtol=0)
    torch.testing.assert_close(a.inertia, b.inertia, rtol=1e-5, atol=0)
    torch.testing.assert_close(a.mean_norms, b.mean_norms, rtol=1e-5, atol=0)


def _assert_consistent(x: Tensor, result: KMeansResult) -> None:
    """What must hold of any result on x [L, N, D], computed again the slow way."""
    unit = normalize(x.double(), dim=-1)
    torch.testing.assert_close(result.centers.norm(dim=-1), torch.ones(result.sizes.shape), atol=1e-5, rtol=0)
    assert torch.equal(result.sizes, result.sizes.sort(dim=1, descending=True, stable=True).values)
    for block in range(len(x)):
        inertia = 0.0
        for cluster, size in enumerate(result.sizes[block].tolist()):
            mine = result.labels[block] == cluster
            assert int(mine.sum()) == size
            if size:
                inertia += float((unit[block, mine] - unit[block, mine].mean(0)).square().sum())
                norm = x[block, mine].double().norm(dim=-1).mean()
                torch.testing.assert_close(result.mean_norms[block, cluster].double(), norm, rtol=1e-5, atol=0)
        assert float(result.inertia[block]) == pytest.approx(inertia, rel=1e-5, abs=1e-9)


def _assert_mean_directions(x: Tensor, result: KMeansResult) -> None:
    unit = normalize(x, dim=-1)
    means = torch.stack([unit[result.labels[0] == cluster].mean(0) for cluster in range(result.sizes.shape[1])])
    torch.testing.assert_close(result.centers[0], normalize(means, dim=-1), atol=2e-5, rtol=0)


@pytest.mark.parametrize("k", [2, 3, 8])
@pytest.mark.parametrize("name", DATA)
def test_inertia_within_one_percent_of_sklearn(name: str, k: int) -> None:
    x = DATA[name]
    result = spherical_kmeans(x, k)
    assert float(result.inertia) <= 1.01 * _sklearn_inertia(x, k, seed=0)
    _assert_consistent(x[None], result)


def test_a_few_sinks_get_their_cluster() -> None:
    """0.2 % of the tokens, far from all others: k-means++ alone seldom seeds there, though it ends better."""
    g = _rng(8)
    scale = 3 * torch.arange(1, 65).float().rsqrt()
    x = torch.randn(4, 1, 64, generator=g) * 2 + torch.randn(4, 3000, 64, generator=g) * scale * 0.7
    x[:, ::500] = 100 * torch.randn(4, 1, 64, generator=g) + torch.randn(4, 6, 64, generator=g)
    result = spherical_kmeans(x, 3)
    for block in range(4):
        best = min(_sklearn_inertia(x[block], 3, seed) for seed in range(3))
        assert float(result.inertia[block]) <= 1.001 * best


def test_recovers_planted_clusters() -> None:
    x, directions, labels = _planted(noise=0.1)
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


def test_centres_are_mean_directions_when_converged() -> None:
    x = DATA["anisotropic"]
    result = spherical_kmeans(x, 5, tol=0.0)
    _assert_mean_directions(x, result)
    assert 1 < int(result.iterations) < 100


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
    one, ten = (spherical_kmeans(DATA["uniform sphere"], 8, restarts=s).inertia for s in (1, 10))
    assert float(ten) <= float(one) * 1.0001


def _stack() -> Tensor:
    return torch.stack([_planted(noise=noise, seed=seed)[0] for seed, noise in enumerate((0.1, 0.2, 0.3))])


def test_batch_equals_each_block_alone() -> None:
    x = _stack()
    together = spherical_kmeans(x, 4)
    assert len({tuple(sizes) for sizes in together.sizes.tolist()}) == 3  # the blocks do differ
    for block in range(3):
        alone = spherical_kmeans(x[block], 4)
        _assert_same(alone, KMeansResult(*(field[block : block + 1] for field in vars(together).values())))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    x = _stack().to(dtype)
    whole = spherical_kmeans(x, 4)
    seen: list[tuple[int, ...]] = []
    original = kmeans._chunks

    def spy(x: Tensor, bytes_per_token: int) -> Iterator[tuple[slice, Tensor]]:
        for where, chunk in original(x, bytes_per_token):
            seen.append(tuple(chunk.shape))
            yield where, chunk

    monkeypatch.setattr(kmeans, "_chunks", spy)
    # one block's state is 4 * 10 * (3 + 4) * 900 = 252,000 bytes of half the scratch: groups of 2 blocks
    monkeypatch.setattr(kmeans, "SCRATCH_BYTES", 1_100_000)
    calls: list[tuple[int, int]] = []
    chunked = spherical_kmeans(x, 4, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(2, 3), (3, 3)]
    assert len({n for blocks, n, _ in seen if blocks == 2}) > 2  # chunks, the last one shorter
    _assert_same(whole, chunked)


def test_smallest_possible_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    x = _planted(60)[0]
    whole = spherical_kmeans(x, 3)
    monkeypatch.setattr(kmeans, "SCRATCH_BYTES", 1)
    _assert_same(whole, spherical_kmeans(x, 3))


@pytest.mark.parametrize("spoiled", ["one seed repeated", "seeds opposite to the data"])
@pytest.mark.parametrize("max_iter", [1, 100])
def test_empty_clusters_are_reseeded(monkeypatch: pytest.MonkeyPatch, spoiled: str, max_iter: int) -> None:
    x = _planted(noise=0.05)[0]
    seed = kmeans._seed

    def bad_seed(tokens: kmeans._Tokens, draws: Tensor) -> Tensor:
        centers = seed(tokens, draws)
        centers[:, :, 1:] = centers[:, :, :1] if spoiled == "one seed repeated" else -centers[:, :, :1]
        return centers

    monkeypatch.setattr(kmeans, "_seed", bad_seed)
    result = spherical_kmeans(x, 4, max_iter=max_iter, tol=0.0)
    assert int(result.sizes.min()) > 0
    _assert_consistent(x[None], result)
    if max_iter > 1:  # and Lloyd went on from the reseeded centres until they were the means of their clusters
        assert 4 < int(result.iterations) < 100
        _assert_mean_directions(x, result)


def test_reseeding_takes_the_worst_served_token() -> None:
    angle = torch.tensor([0.0, 0.1, 0.2, 1.0, 2.0])
    x = torch.stack([angle.cos(), angle.sin()], 1)[None] * 3
    tokens = kmeans._Tokens(x, x.norm(dim=-1))
    centers = torch.tensor([[1.0, 0.0], [0.0, -1.0], [0.0, -1.0]]).view(1, 1, 3, 2)
    fixed, moved = kmeans._reseed_empty(tokens, centers, torch.tensor([[[False, True, True]]]))
    assert moved.tolist() == [[True]]
    # 2 rad is farthest from 0; then 1 rad is 1 away from both, all others nearer
    torch.testing.assert_close(fixed[0, 0], torch.stack([x[0, 0], x[0, 4], x[0, 3]]) / 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    x = DATA["common direction and sinks"].to(dtype)
    result = spherical_kmeans(x, 4)
    assert result.centers.dtype == torch.float32
    _assert_same(result, spherical_kmeans(x.float(), 4))


def test_autocast_does_not_lower_the_precision() -> None:
    x = DATA["anisotropic"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = spherical_kmeans(x, 4)
    _assert_same(spherical_kmeans(x, 4), result)


def test_norms_do_not_matter() -> None:
    x = DATA["planted, noisy"]
    a, b = spherical_kmeans(x, 4), spherical_kmeans(normalize(x, dim=-1), 4)
    assert torch.equal(a.labels, b.labels)
    torch.testing.assert_close(b.mean_norms, torch.ones(1, 4))


def test_non_contiguous_and_requires_grad() -> None:
    x = _stack()
    strided = x.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    result = spherical_kmeans(strided, 3)
    assert not result.centers.requires_grad
    _assert_same(spherical_kmeans(x, 3), result)


def test_one_cluster() -> None:
    x = DATA["anisotropic"]
    unit = normalize(x, dim=-1)
    result = spherical_kmeans(x, 1)
    torch.testing.assert_close(result.centers[0, 0], normalize(unit.mean(0), dim=0), atol=1e-5, rtol=0)
    assert float(result.inertia) == pytest.approx(float((unit - unit.mean(0)).square().sum()), rel=1e-5)


def test_as_many_clusters_as_tokens() -> None:
    x = torch.randn(2, 12, 6, generator=_rng(5))
    result = spherical_kmeans(x, 12)
    assert result.sizes.tolist() == [[1] * 12] * 2
    assert float(result.inertia.max()) < 1e-9
    _assert_consistent(x, result)


def test_opposite_tokens_cancel_without_nan() -> None:
    x = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    result = spherical_kmeans(x, 1)
    assert float(result.inertia) == pytest.approx(2.0)
    _assert_consistent(x[None], result)


def test_duplicates() -> None:
    distinct = torch.randn(5, 8, generator=_rng(6))
    x = distinct.repeat_interleave(torch.tensor([50, 40, 30, 20, 10]), 0)
    x = x * torch.rand(150, 1, generator=_rng(7)).add(0.5)
    result = spherical_kmeans(x, 5)
    assert result.sizes.tolist() == [[50, 40, 30, 20, 10]]
    assert float(result.inertia) < 1e-6


def test_fewer_directions_than_clusters() -> None:
    x = torch.eye(4)[:2].repeat(20, 1) * 7
    result = spherical_kmeans(x, 4)
    assert result.sizes.tolist() == [[20, 20, 0, 0]]
    assert int(result.iterations) < 100  # the clusters that must stay empty do not keep it going
    _assert_consistent(x[None], result)


@pytest.mark.parametrize("where", ["first", "last", "spread"])
def test_zero_tokens_are_left_out(where: str) -> None:
    x = _planted(noise=0.3)[0]
    at = {"first": torch.arange(30), "last": torch.arange(870, 900), "spread": torch.arange(0, 900, 30)}[where]
    x[at] = 0
    rest = torch.ones(900, dtype=torch.bool).index_fill(0, at, False)
    result = spherical_kmeans(x, 4)
    assert result.labels[0, at].unique().tolist() == [-1]
    alone = spherical_kmeans(x[rest], 4)
    assert torch.equal(result.labels[:, rest], alone.labels)
    assert torch.equal(result.sizes, alone.sizes)
    torch.testing.assert_close(result.centers, alone.centers, atol=1e-5, rtol=0)
    _assert_consistent(x[None], result)


def test_nan_and_inf_are_named() -> None:
    x = _stack()
    x[0, 5, 3] = torch.nan
    x[2, :7, 0] = torch.inf
    with pytest.raises(ConfigError, match="fp16 overflow") as error:
        spherical_kmeans(x, 3)
    assert [p.split(" tokens")[0] for p in error.value.problems] == ["block 0: 1 of 900", "block 2: 7 of 900"]


@pytest.mark.parametrize(
    ("x", "arguments", "message"),
    [
        (torch.ones(5, 3), {"k": 6}, "5 tokens for 6 clusters"),
        (torch.cat([torch.ones(2, 3), torch.zeros(8, 3)]), {"k": 3}, "block 0: 2 of 10 tokens have a norm above 0"),
        (torch.ones(5, 3), {"k": 0}, "k is 0; it must be at least 1"),
        (torch.ones(5, 3), {"k": 2, "restarts": 0}, "restarts is 0"),
        (torch.ones(5, 3), {"k": 2, "max_iter": 0}, "max_iter is 0"),
        (torch.ones(5, 3), {"k": 2, "tol": float("nan")}, "tol is nan"),
        (torch.ones(5), {"k": 1}, r"shape \[5\]"),
        (torch.ones(2, 0, 3), {"k": 1}, r"shape \[2, 0, 3\]"),
        (torch.ones(5, 3, dtype=torch.int64), {"k": 1}, "x is torch.int64"),
    ],
)
def test_errors(x: Tensor, arguments: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        spherical_kmeans(x, **arguments)


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16 tokens are multiplied by halves on the CPU too, as on a GPU."""
    for module in (kmeans, products):
        monkeypatch.setattr(module, "multiplies_narrow", lambda x: x.dtype == torch.bfloat16)


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("name", DATA)
def test_narrow_products_find_the_same(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    x = DATA[name].bfloat16()
    found = spherical_kmeans(x, 4)
    monkeypatch.setattr(kmeans, "multiplies_narrow", lambda _: False)
    wide = spherical_kmeans(x, 4)
    if name == "planted":
        assert torch.equal(found.labels, wide.labels)
    cosine = normalize(x.float(), dim=-1) @ wide.centers[0].T
    best, second = cosine.topk(2, dim=-1).values.unbind(-1)
    assert not bool(((found.labels != wide.labels)[0] & (best - second > 1e-4)).any())
    torch.testing.assert_close(found.centers, wide.centers, atol=1e-3, rtol=0)
    torch.testing.assert_close(found.inertia, wide.inertia, rtol=1e-4, atol=0)


@pytest.mark.usefixtures("narrow")
def test_narrow_chunks_and_groups_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x = _stack().bfloat16()
    whole = spherical_kmeans(x, 4)
    monkeypatch.setattr(kmeans, "SCRATCH_BYTES", 800_000)
    monkeypatch.setattr(products, "SUMMED_TOGETHER", 13)
    _assert_same(whole, spherical_kmeans(x, 4))
    for block in range(3):
        alone = spherical_kmeans(x[block], 4)
        _assert_same(alone, KMeansResult(*(field[block : block + 1] for field in vars(whole).values())))


@pytest.mark.usefixtures("narrow")
def test_narrow_with_fewer_directions_than_clusters() -> None:
    x = torch.randn(2, 48, generator=_rng(9)).repeat(20, 1).bfloat16()
    result = spherical_kmeans(x, 4)
    assert result.sizes.tolist() == [[20, 20, 0, 0]]
    assert int(result.iterations) < 100


@pytest.mark.parametrize("tokens", [5, 1024, 3000])
def test_narrow_products_equal_fp32(tokens: int) -> None:
    x = torch.randn(2, tokens, 24, generator=_rng(10)).bfloat16()
    vectors = torch.randn(2, 6, 24, generator=_rng(11))
    wide = torch.bmm(vectors, x.float().mT)
    torch.testing.assert_close(products.dots(vectors, x), wide, atol=2e-4, rtol=0)  # bf16 alone is off by 0.05
    member = torch.rand(2, 6, tokens, generator=_rng(12)) < 0.5
    weight = torch.rand(2, tokens, generator=_rng(13))
    sums = torch.ones(2, 6, 24)
    products.add_sums(sums, member, products.halves(weight, 1), x)
    torch.testing.assert_close(sums, 1 + torch.bmm(member * weight[:, None], x.float()), atol=1e-3, rtol=0)


def test_finished_restarts_and_blocks_are_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clear clusters are done at once; a sphere without any goes on, alone and with ever fewer restarts."""
    x = torch.stack([_planted(1500, 16, noise=0.02)[0], DATA["uniform sphere"]])
    together = spherical_kmeans(x, 4)
    read: list[tuple[float, int]] = []
    accumulate = kmeans._accumulate

    def spy(tokens: kmeans._Tokens, centers: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor]:
        read.append((float(tokens.x[0, 0, 0]), centers.shape[1]))
        return accumulate(tokens, centers, labels)

    monkeypatch.setattr(kmeans, "_accumulate", spy)
    monkeypatch.setattr(kmeans, "GROUP_TOKENS", 1500)  # each block its own group
    _assert_same(together, spherical_kmeans(x, 4))
    restarts = [[s for first, s in read if first == float(block[0, 0])] for block in x]
    assert len(restarts[0]) < len(restarts[1]) / 2
    lloyd = restarts[1][:-2]  # the best restart is read twice more
    assert lloyd == sorted(lloyd, reverse=True)
    assert lloyd[0] == 10
    assert 1 <= lloyd[-1] < 10


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("name", DATA)
def test_cuda_reads_bf16_as_it_is(name: str) -> None:
    x = DATA[name].bfloat16()
    here, there = spherical_kmeans(x, 4), spherical_kmeans(x.cuda(), 4)
    torch.testing.assert_close(here.inertia, there.inertia.cpu(), rtol=1e-3, atol=0)
    if name != "uniform sphere":  # without clusters rounding can lead to another optimum, as good
        assert float((here.labels != there.labels.cpu()).float().mean()) < 2e-3
        torch.testing.assert_close(here.centers, there.centers.cpu(), atol=1e-3, rtol=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_equals_cpu() -> None:
    x = _stack()
    there = spherical_kmeans(x.cuda(), 4)
    _assert_same(spherical_kmeans(x, 4), KMeansResult(*(field.cpu() for field in vars(there).values())))
