"""The kernels of k-means against float64: labels, counts, sums and chords, on shapes that fill no tile."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import normalize

from tests.ops.common import error, guarded, normal

kmeans = pytest.importorskip("monkeyjump.ops.kernels.kmeans")

# cosines, and sums relative to their size: bf16 alone would be off by 1e-3, plain tf32 by 2e-4; the interpreter cuts
# weights off to halves where a GPU rounds them
COSINE = {torch.bfloat16: 1e-5, torch.float16: 2e-6, torch.float32: 2e-6}
SUM = {torch.bfloat16: 3e-5, torch.float16: 3e-6, torch.float32: 3e-6}
# blocks, tokens, hidden, restarts, clusters
SHAPES = [
    (1, 1, 5, 1, 1),
    (2, 65, 33, 7, 3),
    (1, 130, 72, 10, 4),
    (2, 20, 17, 3, 2),
    (1, 40, 24, 10, 16),  # more centres than one program has columns
    (1, 70, 16, 2, 64),
]


def tokens(blocks: int, count: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(x, 1 / norm), norms from 0.1 to 10; where there are several, one has norm 0."""
    size = normal(blocks, count, 1, seed=2).exp()
    x = normal(blocks, count, width, seed=1) * size
    if count > 1:
        x[:, count // 2] = 0
    x = guarded(x.to(dtype))
    norms = x.float().norm(dim=-1)
    return x, guarded(torch.where(norms > 0, 1 / norms, 0.0))


def units(*shape: int) -> torch.Tensor:
    return guarded(normalize(normal(*shape, seed=3), dim=-1))


def cosines(x: torch.Tensor, inverse: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """[G, M, N] in float64."""
    return torch.bmm(vectors.double(), x.double().mT) * inverse.double()[:, None]


def onehot(labels: torch.Tensor, clusters: int) -> torch.Tensor:
    """[G, S, K, N]"""
    return labels[:, :, None] == torch.arange(clusters, device=labels.device)[:, None]


def assert_right(x: torch.Tensor, inverse: torch.Tensor, centers: torch.Tensor) -> None:
    """Labels, counts and sums of the kernels against float64."""
    (G, S, K, D), dtype = centers.shape, x.dtype
    labels, counts = kmeans.nearest(x, inverse, centers)
    assert (labels == -1).equal((inverse == 0)[:, None].expand_as(labels))
    cosine = cosines(x, inverse, centers.flatten(1, 2)).view(G, S, K, -1)
    found = cosine.take_along_dim(labels.long().clamp(min=0)[:, :, None], 2).squeeze(2)
    assert float((cosine.amax(2) - found).max()) < COSINE[dtype]
    member = onehot(labels, K)
    assert torch.equal(counts, member.sum(-1))
    unit = x.double() * inverse.double()[..., None]
    expected = torch.bmm(member.flatten(1, 2).double(), unit).view(G, S, K, D)
    assert error(kmeans.sums(x, inverse, labels, K), expected) < SUM[dtype]


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_labels_and_sums(shape: tuple[int, int, int, int, int]) -> None:
    blocks, count, width, restarts, clusters = shape
    x, inverse = tokens(blocks, count, width, torch.bfloat16)
    assert_right(x, inverse, units(blocks, restarts, clusters, width))


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes(dtype: torch.dtype) -> None:
    x, inverse = tokens(2, 65, 80, dtype)
    assert_right(x, inverse, units(2, 4, 5, 80))


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("dtype", list(COSINE), ids=str)
def test_chords(dtype: torch.dtype) -> None:
    """More vectors than a program has columns; the first is the direction of a token."""
    x, inverse = tokens(2, 37, 48, dtype)
    vectors = units(2, 40, 48)
    vectors[:, 0] = x[:, 3].float() * inverse[:, 3, None]
    found = kmeans.chords(x, inverse, vectors, 1e-5)
    expected = 2 - 2 * cosines(x, inverse, vectors)
    assert float((found - expected).abs().max()) < 2 * COSINE[dtype]
    assert found[:, 0, 3].tolist() == [0, 0]
    assert int((found == 0).sum()) == 2


def test_chords_of_some_tokens() -> None:
    """A range of the tokens, as they lie in x."""
    x, inverse = tokens(2, 37, 48, torch.bfloat16)
    vectors = units(2, 3, 48)
    whole = kmeans.chords(x, inverse, vectors, 1e-5)
    some = kmeans.chords(x[:, 5:30], inverse[:, 5:30], vectors, 1e-5)
    # sums of 48 numbers, made in another place of a tile
    torch.testing.assert_close(some, whole[..., 5:30], rtol=0, atol=2e-6)


@pytest.mark.usefixtures("poison")
def test_ranges_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kmeans, "SUMMED_TOGETHER", 64)
    x, inverse = tokens(2, 150, 20, torch.bfloat16)
    assert_right(x, inverse, units(2, 3, 4, 20))


def test_wider_rows() -> None:
    """Tokens that are a part of wider rows, blocks that lie between one another."""
    memory, _ = tokens(60, 2, 40, torch.bfloat16)
    x = memory.transpose(0, 1)[:, :, 5:29]
    assert not x.is_contiguous()
    norms = x.float().norm(dim=-1)
    inverse, centers = torch.where(norms > 0, 1 / norms, 0.0), units(2, 3, 4, 24)
    assert_right(x, inverse, centers)
    labels, _ = kmeans.nearest(x, inverse, centers)
    copied, _ = kmeans.nearest(x.contiguous(), inverse, centers)
    assert torch.equal(labels, copied)


@pytest.mark.parametrize("dtype", list(COSINE), ids=str)
def test_of_equal_centres_the_first(dtype: torch.dtype) -> None:
    """Whole numbers: their products with two equal centres are equal in whatever order they are added up."""
    x = guarded(normal(1, 50, 24, seed=1, scale=4.0).round().to(dtype))
    inverse, centers = guarded(1 / x.float().norm(dim=-1)), guarded(normal(1, 2, 5, 24, seed=3, scale=4.0).round())
    centers[:, :, 3] = centers[:, :, 1]
    labels, counts = kmeans.nearest(x, inverse, centers)
    assert counts[0, :, 3].tolist() == [0, 0]
    assert bool((counts[0, :, 1] > 0).all())
    assert int(labels.max()) == 4


def test_a_block_gives_the_same_bits_alone() -> None:
    x, inverse = tokens(3, 70, 24, torch.bfloat16)
    centers = units(3, 3, 4, 24)
    labels, counts = kmeans.nearest(x, inverse, centers)
    sums = kmeans.sums(x, inverse, labels, 4)
    alone, numbers = kmeans.nearest(x[1:2], inverse[1:2], centers[1:2])
    assert torch.equal(alone, labels[1:2])
    assert torch.equal(numbers, counts[1:2])
    assert torch.equal(kmeans.sums(x[1:2], inverse[1:2], alone, 4), sums[1:2])


def test_what_is_supported() -> None:
    assert [kmeans.supported(clusters) for clusters in (1, 64, 65)] == [True, True, False]
