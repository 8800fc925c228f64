"""Spherical k-means by Triton kernels: the same clusters as by torch, which steps in where the kernels do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from monkeyjump.ops.dispatch import implementation
from monkeyjump.routing import kmeans_tokens
from monkeyjump.routing.kmeans import KMeansResult, spherical_kmeans
from monkeyjump.routing.kmeans_tokens import Tokens, blocks_together, by_kernels, token_norms
from tests.ops.common import DEVICE
from tests.routing.kmeans_data import DATA, assert_same, inertia, planted, rng, stack

pytestmark = pytest.mark.usefixtures("one_thread")


def cluster(by: str, x: Tensor, k: int, **how: Any) -> KMeansResult:
    with implementation(by):
        found = spherical_kmeans(x.to(DEVICE), k, **how)
    return KMeansResult(*(field.cpu() for field in vars(found).values()))


def assert_as_good(x: Tensor, found: KMeansResult, expected: KMeansResult) -> None:
    """Tokens between two centres may go to either, and centres follow them."""
    cosine = normalize(x.float(), dim=-1) @ expected.centers.mT
    best, second = cosine.topk(2, dim=-1).values.unbind(-1)
    assert not bool(((found.labels != expected.labels) & (best - second > 1e-4)).any())
    torch.testing.assert_close(found.centers, expected.centers, atol=1e-3, rtol=0)
    torch.testing.assert_close(inertia(x, found), inertia(x, expected), rtol=1e-4, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_same_clusters_as_by_torch(dtype: torch.dtype) -> None:
    """Several blocks, a token of norm 0, clusters of clear and less clear bounds."""
    x = torch.stack([planted(140, 24, 3, noise=noise, seed=seed)[0] for seed, noise in enumerate((0.05, 0.1))])
    x[:, 11] = 0
    x = x.to(dtype)
    found = cluster("triton", x, 3, restarts=4)
    assert found.labels[:, 11].tolist() == [-1, -1]
    assert_same(found, cluster("torch", x, 3, restarts=4))


def test_less_clear_clusters() -> None:
    x = DATA["anisotropic"][None, ::8].bfloat16()
    assert_as_good(x, cluster("triton", x, 4, restarts=3), cluster("torch", x, 4, restarts=3))


def test_a_token_with_strides() -> None:
    x = stack()[:2, :60].bfloat16()
    across = x.transpose(1, 2).contiguous().transpose(1, 2)
    assert across.stride(2) != 1
    whole = cluster("triton", x, 4, restarts=1)
    assert_same(whole, cluster("triton", across, 4, restarts=1))


def test_chunks_and_groups_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.stack([planted(80, 24, 2, seed=seed)[0] for seed in range(2)]).bfloat16()
    whole = cluster("triton", x, 2, restarts=2)
    # one block's state is 4 * 2 * (2 + 4) * 80 = 3,840 bytes of half the scratch: groups of 1 block
    monkeypatch.setattr(kmeans_tokens, "SCRATCH_BYTES", 12_000 if DEVICE.type == "cpu" else 1_500)
    calls: list[tuple[int, int]] = []
    parts = cluster("triton", x, 2, restarts=2, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(1, 2), (2, 2)]
    assert_same(whole, parts)


def test_fewer_directions_than_clusters(iterations: list[int]) -> None:
    """Of norm 4 and whole: sums, means and products are exact, and so are the ties of two centres in one place."""
    x = torch.zeros(2, 48)
    x[0, :16], x[1, 12:16] = 1, 2
    x = x.repeat(20, 1).bfloat16()
    found = cluster("triton", x, 4, restarts=3)
    assert found.sizes.tolist() == [[20, 20, 0, 0]]
    assert len(iterations) < 100


def test_the_worst_served_token() -> None:
    x = planted(70, 16, 4, noise=0.3)[0][None].bfloat16().to(DEVICE)
    centers = normalize(torch.randn(1, 3, 4, 16, generator=rng(5)), dim=-1).to(DEVICE)
    empty = torch.tensor([[[False, True, True, False], [False] * 4, [True, False, False, False]]], device=DEVICE)
    norms = token_norms(x)
    (chord, index), (expected, at) = (Tokens(x, norms, by).worst_served(centers, empty) for by in (True, False))
    torch.testing.assert_close(chord, expected, atol=1e-5, rtol=0)
    assert torch.equal(index, at)


def test_what_the_kernels_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(3, 4, 8, device=DEVICE)
    with implementation("triton"):
        assert by_kernels(x, 64)
        assert not by_kernels(x, 65)
        assert not by_kernels(x.double(), 4)
        refused = spherical_kmeans(torch.randn(1, 70, 4, generator=rng(1)).to(DEVICE), 65, restarts=1)
    assert int(refused.sizes.sum()) == 70
    with implementation("torch"):
        assert not by_kernels(x, 4)
    # as many blocks at a time as memory allows, where torch takes few
    monkeypatch.setattr(kmeans_tokens, "GROUP_TOKENS", 1)
    assert blocks_together(x, 10, 3, kernels=True) > 3
    assert blocks_together(x, 10, 3, kernels=False) in (1, 2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("name", DATA)
def test_cuda_reads_bf16_as_it_is(name: str) -> None:
    x = DATA[name].bfloat16()
    here, there = spherical_kmeans(x, 4), cluster("triton", x, 4)
    torch.testing.assert_close(inertia(x[None], here), inertia(x[None], there), rtol=1e-3, atol=0)
    if name != "uniform sphere":  # without clusters rounding can lead to another optimum, as good
        assert float((here.labels != there.labels).float().mean()) < 2e-3
        torch.testing.assert_close(here.centers, there.centers, atol=1e-3, rtol=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_equals_cpu() -> None:
    x = stack()
    assert_same(spherical_kmeans(x, 4), cluster("triton", x, 4))
