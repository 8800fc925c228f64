"""What breaks a naive spherical k-means: dtypes, strides, duplicates, tokens without a direction, bad arguments."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from monkeyjump.errors import ConfigError
from monkeyjump.routing.kmeans import spherical_kmeans
from tests.routing.kmeans_data import DATA, assert_consistent, assert_same, inertia, planted, rng, stack

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    x = DATA["common direction and sinks"].to(dtype)
    result = spherical_kmeans(x, 4)
    assert result.centers.dtype == torch.float32
    assert_same(result, spherical_kmeans(x.float(), 4))


def test_autocast_does_not_lower_the_precision() -> None:
    x = DATA["anisotropic"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = spherical_kmeans(x, 4)
    assert_same(spherical_kmeans(x, 4), result)


def test_norms_do_not_matter() -> None:
    x = DATA["planted, noisy"]
    a, b = spherical_kmeans(x, 4), spherical_kmeans(normalize(x, dim=-1), 4)
    assert torch.equal(a.labels, b.labels)
    torch.testing.assert_close(b.mean_norms, torch.ones(1, 4))


def test_non_contiguous_and_requires_grad() -> None:
    x = stack()
    strided = x.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    result = spherical_kmeans(strided, 3)
    assert not result.centers.requires_grad
    assert_same(spherical_kmeans(x, 3), result)


def test_one_cluster() -> None:
    x = DATA["anisotropic"]
    unit = normalize(x, dim=-1)
    result = spherical_kmeans(x, 1)
    torch.testing.assert_close(result.centers[0, 0], normalize(unit.mean(0), dim=0), atol=1e-5, rtol=0)


def test_as_many_clusters_as_tokens() -> None:
    x = torch.randn(2, 12, 6, generator=rng(5))
    result = spherical_kmeans(x, 12)
    assert result.sizes.tolist() == [[1] * 12] * 2
    assert float(inertia(x, result).max()) < 1e-9
    assert_consistent(x, result)


def test_opposite_tokens_cancel_without_nan() -> None:
    x = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    result = spherical_kmeans(x, 1)
    assert_consistent(x[None], result)


def test_duplicates() -> None:
    distinct = torch.randn(5, 8, generator=rng(6))
    x = distinct.repeat_interleave(torch.tensor([50, 40, 30, 20, 10]), 0)
    x = x * torch.rand(150, 1, generator=rng(7)).add(0.5)
    result = spherical_kmeans(x, 5)
    assert result.sizes.tolist() == [[50, 40, 30, 20, 10]]
    assert float(inertia(x[None], result)) < 1e-6


def test_fewer_directions_than_clusters(iterations: list[int]) -> None:
    x = torch.eye(4)[:2].repeat(20, 1) * 7
    result = spherical_kmeans(x, 4)
    assert result.sizes.tolist() == [[20, 20, 0, 0]]
    assert len(iterations) < 100  # the clusters that must stay empty do not keep it going
    assert_consistent(x[None], result)


@pytest.mark.parametrize("where", ["first", "last", "spread"])
def test_zero_tokens_are_left_out(where: str) -> None:
    x = planted(noise=0.3)[0]
    at = {"first": torch.arange(30), "last": torch.arange(870, 900), "spread": torch.arange(0, 900, 30)}[where]
    x[at] = 0
    rest = torch.ones(900, dtype=torch.bool).index_fill(0, at, False)
    result = spherical_kmeans(x, 4)
    assert result.labels[0, at].unique().tolist() == [-1]
    alone = spherical_kmeans(x[rest], 4)
    assert torch.equal(result.labels[:, rest], alone.labels)
    assert torch.equal(result.sizes, alone.sizes)
    torch.testing.assert_close(result.centers, alone.centers, atol=1e-5, rtol=0)
    assert_consistent(x[None], result)


def test_nan_and_inf_are_named() -> None:
    x = stack()
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
