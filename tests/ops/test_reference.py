"""The definitions the faster kernels are tested against."""

from __future__ import annotations

import pytest
import torch

from monkeyjump.ops import reference as ops


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_top_k_mask_has_k_entries_and_ties_go_to_the_lower_index(k: int) -> None:
    logits = torch.tensor([[0.5, 0.5, 0.5, 0.5], [0.1, 0.9, 0.9, 0.2], [3.0, 2.0, 1.0, 0.0]])
    mask = ops.top_k_mask(logits, k)
    assert mask.sum(-1).tolist() == [k] * 3
    for row, kept in zip(logits.tolist(), mask, strict=True):
        order = sorted(range(4), key=lambda e: (-row[e], e))[:k]
        assert kept.nonzero().flatten().tolist() == sorted(order)


def test_gates_are_the_softmax_over_all_experts_kept_on_the_best() -> None:
    logits = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    p = torch.softmax(logits / 0.7, -1)
    m = ops.gates(logits, 2, 0.7, renormalize=False)
    kept = m > 0
    assert kept.sum(-1).tolist() == [2] * 5
    torch.testing.assert_close(m[kept], p[kept])
    assert (m.sum(-1) < 1).all()  # not renormalised: the paper's equation
    torch.testing.assert_close(ops.gates(logits, 2, 0.7, renormalize=True).sum(-1), torch.ones(5))


def test_similarities() -> None:
    generator = torch.Generator().manual_seed(0)
    u, c = torch.randn(2, 6, 8, generator=generator), torch.randn(3, 8, generator=generator)
    expected = {
        "cosine": torch.nn.functional.cosine_similarity(u[..., None, :], c, dim=-1),
        "dot": u @ c.T,
        "euclidean": -torch.cdist(u, c.expand(2, 3, 8)),
        "l1": -torch.cdist(u, c.expand(2, 3, 8), p=1),
    }
    for kind, logits in expected.items():
        torch.testing.assert_close(ops.similarity_logits(u, c, kind), logits, rtol=1e-4, atol=1e-5)


def test_features_of_extreme_states_are_finite() -> None:
    """Zero states, sinks with a norm of 1e4 times the rest, and the largest numbers of bf16."""
    h = torch.tensor([[0.0] * 4, [1e-30] * 4, [3e4] * 4, [1.0, -1.0, 2.0, 0.5]])
    u = ops.features(h, None, normalize=True)
    assert torch.isfinite(u).all()
    assert torch.equal(u[0], torch.zeros(4))
    torch.testing.assert_close(u[2].norm(), torch.tensor(1.0))
    logits = ops.similarity_logits(u, torch.randn(3, 4), "cosine")
    assert torch.isfinite(ops.gates(logits, 2, 1.0, renormalize=True)).all()


@pytest.mark.parametrize("space", ["token", "centered"])
def test_routing_does_not_depend_on_the_scale_of_the_states(space: str) -> None:
    generator = torch.Generator().manual_seed(0)
    h, c = torch.randn(7, 16, generator=generator), torch.randn(3, 16, generator=generator)
    mean = 0.3 * torch.randn(16, generator=generator) if space == "centered" else None
    found = [
        ops.gates(ops.similarity_logits(ops.features(scale * h, mean, normalize=True), c, "cosine"), 2, 1.0, False)
        for scale in (1.0, 250.0)
    ]
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)


def test_cluster_sums_against_a_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    u = torch.randn(2, 5, 4, generator=generator)
    members = torch.rand(2, 5, 3, generator=generator) > 0.5
    queries = torch.rand(2, 5, generator=generator) > 0.3
    sums, counts = ops.cluster_sums(u, members, queries)
    for e in range(3):
        chosen = [u[b, t] for b in range(2) for t in range(5) if members[b, t, e] and queries[b, t]]
        assert float(counts[e]) == len(chosen)
        torch.testing.assert_close(sums[e], torch.stack(chosen).sum(0) if chosen else torch.zeros(4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_lora_is_the_written_formula(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 16, generator=generator).to(dtype)
    A, B = torch.randn(3, 16, generator=generator), torch.randn(7, 3, generator=generator)
    gate = torch.rand(2, 5, 1, generator=generator)
    out = ops.gated_lora(x, A, B, gate * 2.5)
    assert out.dtype == dtype
    expected = gate * 2.5 * (x.float() @ A.T @ B.T)
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    assert float((out.float() - expected).abs().max()) < tolerance * float(expected.abs().max())


@pytest.mark.parametrize("dropout", [0.05, 0.5])
@pytest.mark.parametrize("width", [1024, 1536])
def test_a_mask_from_a_seed_looks_random(width: int, dropout: float) -> None:
    """As many as asked for, spread over rows and columns, and no two tokens or two seeds alike."""
    rows, seeds = 256, (12_345, 987_654_321, 2**31 - 1)  # far apart, as seeds are drawn
    masks = [ops.keep_mask(torch.Size((rows, width)), torch.tensor(seed), dropout).double() for seed in seeds]
    deviation = (dropout * (1 - dropout)) ** 0.5
    centred = [(mask - (1 - dropout)) / deviation for mask in masks]
    for z in centred:
        assert abs(float(z.mean())) < 4 / (rows * width) ** 0.5
        for dimension in (0, 1):  # sums over columns and rows vary about as much as of independent entries
            assert 0.7 < float((z.sum(dimension) / z.shape[dimension] ** 0.5).square().mean()) < 1.3
        likeness = z @ z.T / width
        assert float(likeness.fill_diagonal_(0).abs().max()) < 8 / width**0.5
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert abs(float((centred[first] * centred[second]).mean())) < 5 / (rows * width) ** 0.5
