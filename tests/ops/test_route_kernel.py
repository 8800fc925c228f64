"""The routing kernel: gates, sums and counts against the formula in float64, and where it steps aside for torch."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from monkeyjump.ops import reference
from tests.ops.common import DEVICE, error, gates_and_sums, guarded, normal

kernels = pytest.importorskip("monkeyjump.ops.kernels.route")
from monkeyjump.ops import routing  # noqa: E402
from monkeyjump.ops.kernels.tiles import FEW_TOKENS, TILES  # noqa: E402

Found = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def settings(**changes: Any) -> Any:
    given = {"top_k": 2, "temperature": 1.0, "renormalize": False, "member_k": 2, "unit": True, **changes}
    return routing.Routing(**given)


def centers(experts: int, width: int, seed: int = 3) -> list[torch.Tensor]:
    return [normal(width, seed=seed + e) for e in range(experts)]


def expected(
    h: torch.Tensor, centers: list[torch.Tensor], queries: torch.Tensor | None, how: Any, mean: torch.Tensor | None
) -> Found:
    """The equations in float64: h [N, D]."""
    wide, c = h.double(), torch.stack(centers).double()
    if mean is not None:
        wide = wide - wide.norm(dim=-1, keepdim=True) * mean.double()
    length = wide.norm(dim=-1, keepdim=True).clamp_min(reference.EPS)
    logits = (wide / length) @ (c / c.norm(dim=-1, keepdim=True).clamp_min(reference.EPS)).T
    gates = how.strength * reference.gates(logits, how.top_k, how.temperature, how.renormalize)
    members = reference.top_k_mask(logits, how.member_k)
    u = wide / length if how.unit else wide
    counted = torch.ones(h.shape[0], dtype=torch.bool, device=h.device) if queries is None else queries
    sums = torch.stack([u[counted & members[:, e]].sum(0) for e in range(len(centers))])
    return gates, sums, (members & counted[:, None]).sum(0)


def compare(
    h: torch.Tensor, c: list[torch.Tensor], queries: torch.Tensor | None, how: Any, mean: torch.Tensor | None = None
) -> Found:
    """The kernels on the tokens h [N, D]; rows that are no query may hold anything, also in their gates."""
    in_tiles = len(c) + (mean is not None) > kernels.BY_SUMS
    gates, sums, counts = gates_and_sums(h, c, queries, how, mean)
    assert gates.dtype == sums.dtype == counts.dtype == torch.float32
    alone = routing.fused_gates(h, c, how, mean=mean)
    if in_tiles or h.shape[0] > FEW_TOKENS:  # few tokens are other programs, with sums in another order
        assert torch.equal(alone.nan_to_num(), gates.nan_to_num())
    gates64, sums64, counts64 = expected(h, c, queries, how, mean)
    real = slice(None) if queries is None else queries
    # in tiles, products with bf16 keep 16 bits of the centres and of the norms; a temperature enlarges what is lost
    lost = 2e-5 if h.dtype == torch.bfloat16 and in_tiles else 1e-6
    lost *= 1 if mean is None else 10  # what tokens have in common is taken off again, with its digits
    off = lost * max(1.0, 1 / how.temperature)
    for found in (gates, alone):
        torch.testing.assert_close(found[real].double(), gates64[real], rtol=off, atol=off)
        assert torch.equal(found[real] > 0, gates64[real] > 0)
    assert torch.equal(counts.long(), counts64)
    assert error(sums, sums64) < 2 * lost
    return gates, sums, counts


EVERY_K = [(E, K) for E in range(1, 4) for K in range(1, E + 1)]
SOME_K = [(E, 1 + E // 3) for E in (4, 5, 6, 7, 8, 11, 15)]
THE_ENDS = [(7, 7), (8, 8), (16, 1), (16, 16)]


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(("experts", "top_k"), [*EVERY_K, *SOME_K, *THE_ENDS])
def test_every_number_of_experts(experts: int, top_k: int) -> None:
    """Every K of E; the centres follow the best of them, or all that the gates keep."""
    h, c = normal(11, 19, seed=1), centers(experts, 19)
    how = settings(top_k=top_k, member_k=top_k if top_k % 2 else 1, temperature=0.5)
    gates, _, _ = compare(h, c, None, how)
    assert (gates > 0).sum(-1).eq(top_k).all()


ACROSS = 128 * TILES["route_rows"].warps  # columns whose sums over rows are made at a time
SHAPES = {
    # one token, one entry, one expert
    "one of everything": (1, 1, 1),
    # one token, as in generation
    "single token": (1, 40, 3),
    # an odd width below the smallest tile
    "narrow": (50, 7, 3),
    # a width one past a power of two: nearly half of the tile is empty
    "past a tile": (11, 257, 5),
    # several row blocks, the last with one row
    "many rows": (3 * TILES["route_rows"].rows + 1, 17, 3),
    # the most tokens that are few, and one more
    "few": (FEW_TOKENS, 17, 3),
    "more than few": (FEW_TOKENS + 1, 17, 3),
    # nothing masked
    "exact rows": (2 * TILES["route_rows"].rows, 256, 7),
    # as wide as the columns of a program, a little wider, and twice that
    "as wide as the threads": (3, ACROSS, 2),
    "wider than the threads": (3, ACROSS + 1, 2),
    "wide": (2, 2 * ACROSS, 2),
    # the same through the matrix units
    "many rows in tiles": (3 * TILES["route"].rows + 1, 17, 9),
    "exact tiles": (2 * TILES["route"].rows, 2 * TILES["route"].columns, 16),
    "single token in tiles": (1, 40, 8),
    "wide in tiles": (2, 3 * TILES["route"].columns, 8),
}


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape: str) -> None:
    tokens, width, experts = SHAPES[shape]
    _, _, counts = compare(normal(tokens, width, seed=1), centers(experts, width), None, settings(top_k=1, member_k=1))
    assert int(counts.sum()) == tokens


@pytest.mark.usefixtures("poison")
def test_more_row_blocks_than_are_added_up_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TILES, "add_sums", replace(TILES["add_sums"], rows=2))
    compare(normal(6 * TILES["route_rows"].rows + 1, 9, seed=1), centers(2, 9), None, settings())


def test_very_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "MANY", 20)
    compare(normal(2 * TILES["route_many"].rows + 1, 40, seed=1), centers(8, 40), None, settings())


SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.05, "renormalize": False, "unit": True},
    {"temperature": 0.05, "renormalize": True, "unit": False},
    {"temperature": 20.0, "renormalize": True, "unit": True},
]


@pytest.fixture(params=["sums", "matrix units"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test with this runs on both kernels, whatever the shape of its tokens."""
    monkeypatch.setattr(kernels, "BY_SUMS", kernels.MOST_EXPERTS if request.param == "sums" else 0)


@pytest.mark.usefixtures("poison", "kernel")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("changes", SETTINGS, ids=str)
def test_dtypes_and_settings(dtype: torch.dtype, changes: dict[str, Any]) -> None:
    """Computed in fp32 from h as it is: no dtype of h costs more than its own rounding, which both sides see."""
    compare(normal(20, 33, seed=1, dtype=dtype, scale=3.0), centers(3, 33), None, settings(**changes))


@pytest.mark.usefixtures("poison", "kernel")
@pytest.mark.parametrize("unit", [True, False])
@pytest.mark.parametrize("filler", [math.nan, -math.inf, 3e38])
def test_padding_may_hold_anything(filler: float, unit: bool) -> None:
    h, c = normal(20, 21, seed=1), centers(3, 21)
    queries = torch.arange(20, device=DEVICE) % 3 > 0
    h[~queries] = filler
    compare(h, c, queries, settings(unit=unit))


@pytest.mark.usefixtures("poison", "kernel")
def test_no_query_at_all() -> None:
    h, c = torch.full((9, 21), math.nan, device=DEVICE), centers(3, 21)
    _, sums, counts = gates_and_sums(h, c, torch.zeros(9, dtype=torch.bool, device=DEVICE), settings())
    assert sums.eq(0).all()
    assert counts.eq(0).all()


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_ties_go_to_the_lower_index(top_k: int) -> None:
    """Equal centres, behind a worse one and a better one: exactly K are kept, the first of the equal ones first.

    All norms are 4 and all entries whole: products and sums are exact, in whatever order a machine makes them.
    """
    of_norm_4 = [[4], [2] * 4, [1] * 16, [3, 2, 1, 1, 1], [3] + [1] * 7, [2, 2] + [1] * 8]
    order = torch.Generator().manual_seed(1)
    rows = [torch.tensor(some + [0] * (16 - len(some)))[torch.randperm(16, generator=order)] for some in of_norm_4 * 4]
    h = guarded(torch.stack(rows[:20]).float())
    tied, worse, better = h[3], -h[3], torch.ones(16, device=DEVICE)
    how = settings(top_k=top_k, member_k=top_k)
    gates, _, counts = gates_and_sums(h, [tied] * 5, None, how)
    assert (gates > 0).nonzero()[:, 1].view(20, top_k).eq(torch.arange(top_k, device=DEVICE)).all()
    assert counts.tolist() == [20.0] * top_k + [0.0] * (5 - top_k)
    mixed = [worse, tied, better, tied, tied]
    gates, _, _ = gates_and_sums(h, mixed, None, how)
    logits = reference.similarity_logits(reference.features(h, None, True), torch.stack(mixed), "cosine")
    assert torch.equal(gates > 0, reference.gates(logits, top_k, 1.0, False) > 0)


@pytest.mark.usefixtures("poison", "kernel")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("renormalize", [True, False])
def test_a_token_of_zeros(renormalize: bool, dtype: torch.dtype) -> None:
    """No direction: every expert is as good as another, and no centre is pulled."""
    h = torch.zeros(3, 16, device=DEVICE, dtype=dtype)
    gates, sums, counts = compare(h, centers(4, 16), None, settings(renormalize=renormalize))
    assert gates.tolist() == [[0.5 if renormalize else 0.25] * 2 + [0.0] * 2] * 3
    assert counts.tolist() == [3.0, 3.0, 0.0, 0.0]
    assert sums.eq(0).all()


@pytest.mark.usefixtures("poison", "kernel")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("unit", [True, False])
@pytest.mark.parametrize("experts", [1, 3, 6])
def test_the_centred_space(experts: int, unit: bool, dtype: torch.dtype) -> None:
    """Tokens that share a direction, as those of models do, among them one of zeros and one that is a sink."""
    common = normal(33, seed=2)
    h = (normal(40, 33, seed=1) + common).to(dtype)
    h[3], h[5] = 0.0, 1e4 * h[5]
    mean = torch.nn.functional.normalize(h.float(), dim=-1).mean(0)
    how = settings(top_k=min(2, experts), member_k=1, temperature=0.2, renormalize=True, unit=unit, strength=experts)
    gates, _, _ = compare(guarded(h), centers(experts, 33), None, how, guarded(mean))
    torch.testing.assert_close(gates.mean(-1), torch.ones(40, device=DEVICE))


@pytest.mark.usefixtures("poison", "kernel")
def test_padding_may_hold_anything_in_the_centred_space() -> None:
    h, mean = normal(20, 21, seed=1), guarded(0.2 * normal(21, seed=4))
    queries = torch.arange(20, device=DEVICE) % 3 > 0
    h[~queries] = math.nan
    compare(h, centers(3, 21), queries, settings(), mean)


@pytest.mark.usefixtures("poison", "kernel")
def test_a_center_of_zeros() -> None:
    compare(normal(9, 16, seed=1), [torch.zeros(16, device=DEVICE), *centers(2, 16)], None, settings())


@pytest.mark.usefixtures("poison", "kernel")
@pytest.mark.parametrize(("dtype", "scale"), [(torch.float16, 1e-4), (torch.float16, 1e4), (torch.bfloat16, 1e-9)])
def test_sums_of_unit_tokens_of_any_length(dtype: torch.dtype, scale: float) -> None:
    """One over the norm is no number of fp16 for the smallest tokens, and a poor one for the largest."""
    h = normal(24, 16, seed=1, dtype=dtype)
    h[::2] *= scale
    compare(h, centers(3, 16), None, settings())


@pytest.mark.usefixtures("poison", "kernel")
@pytest.mark.parametrize("scale", [1e-9, 1e4, 1e15])
def test_directions_alone_decide(scale: float) -> None:
    """Sinks with norms of 1e4 and more beside ordinary tokens, and centres of any length."""
    h, c = normal(24, 16, seed=1), centers(3, 16)
    plain, _, _ = gates_and_sums(h, c, None, settings())
    h[::2] *= scale
    scaled = [c[0] * scale, *c[1:]]
    gates, _, _ = compare(h, scaled, None, settings())
    torch.testing.assert_close(gates, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("poison", "kernel")
def test_all_tokens_to_one_expert() -> None:
    h = normal(70, 16, seed=1).abs()
    c = [-h.mean(0), h.mean(0), -2 * h.mean(0)]
    _, sums, counts = compare(h, c, None, settings(top_k=1, member_k=1))
    assert counts.tolist() == [0.0, 70.0, 0.0]
    assert sums[[0, 2]].eq(0).all()


@pytest.mark.usefixtures("kernel")
def test_two_runs_give_the_same_bits() -> None:
    h, c = normal(150, 40, seed=1, dtype=torch.bfloat16), centers(2, 40)
    for first, second in zip(*(gates_and_sums(h, c, None, settings()) for _ in range(2)), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("layout", ["columns", "transposed", "every other token"])
def test_states_that_are_not_contiguous(layout: str) -> None:
    """Through the op that the router calls, for [B, T, D]; the queries of a whole batch as one row."""
    h, c = normal(1, 12, 20, seed=1), centers(3, 20)
    strange = {
        "columns": torch.cat([h, h.flip(-1)], -1)[..., :20],
        "transposed": h.movedim(-1, 0).contiguous().movedim(0, -1),
        "every other token": h.repeat_interleave(2, 1)[:, ::2],
    }[layout]
    assert torch.equal(strange, h)
    queries = (torch.arange(24, device=DEVICE) % 3 > 0)[None, ::2]
    gates, sums, counts = gates_and_sums(strange, c, queries, settings())
    gates64, sums64, counts64 = expected(h[0], c, queries[0], settings(), None)
    assert gates.shape == (1, 12, 3)
    for found in (gates, routing.fused_gates(strange, c, settings())):
        assert error(found[0], gates64) < 1e-6
    assert error(sums, sums64) < 2e-6
    assert torch.equal(counts.long(), counts64)


def test_one_mask_for_all_rows_of_a_batch() -> None:
    h, c = normal(4, 6, 20, seed=1), centers(3, 20)
    queries = torch.tensor([[True], [False], [True], [True]], device=DEVICE)
    _, sums, counts = gates_and_sums(h, c, queries, settings())
    _, sums64, counts64 = expected(h.flatten(0, 1), c, queries.expand(4, 6).flatten(), settings(), None)
    assert error(sums, sums64) < 2e-6
    assert torch.equal(counts.long(), counts64)


def test_guards_and_settings_are_what_they_seem() -> None:
    """A test of the tests: the reference above tells settings apart."""
    h, c = guarded(normal(23, 19, seed=1)), centers(4, 19)
    one = expected(h, c, None, settings(), None)
    others = [expected(h, c, None, settings(), 0.2 * normal(19, seed=9))]
    for changes in ({"top_k": 1}, {"temperature": 0.5}, {"renormalize": True}, {"member_k": 1}, {"unit": False}):
        others.append(expected(h, c, None, replace(settings(), **changes), None))
    others.append(expected(h, c, None, settings(strength=3.0), None))
    for other in others:
        assert any(error(a, b.double()) > 1e-2 for a, b in zip(one, other, strict=True))
