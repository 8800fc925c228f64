"""The frozen product and the update of few tokens in one launch; and updates that are written before the product."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.ops.common import TOLERANCE, error, guarded, normal
from tests.ops.lora_cases import Case

kernels = pytest.importorskip("monkeyjump.ops.kernels.linear")
from monkeyjump.ops import grouped  # noqa: E402
from monkeyjump.ops.kernels.tiles import FEW, TILES  # noqa: E402

TILE = TILES["few_linear"]
BF16 = torch.bfloat16
CASES = {
    "one of everything": Case(N=1, D=1, outs=(1,), R=1, dtype=BF16),
    "single token": Case(N=1, D=33, outs=(TILE.rows + 1, 5, 5), R=2, G=1, dtype=BF16),
    "a batch": Case(N=9, D=TILE.columns + 1, outs=(TILE.rows + 3, 12, 7), R=2, G=1, dtype=BF16),
    "exact tiles": Case(N=16, D=TILE.columns, outs=(TILE.rows, TILE.rows), R=2, dtype=BF16),
    "the most tokens": Case(N=FEW, D=40, outs=(9,), R=2, G=1, dtype=BF16),
    "the most ranks": Case(N=3, D=17, outs=(5, 3), R=kernels.MOST_RANKS, G=1, diagonal=True, dtype=BF16),
    "experts on one A": Case(N=5, D=19, outs=(12, 7), R=2, experts=4, G=4, dtype=BF16),
    "odd ranks": Case(N=5, D=19, R=3, experts=2, dtype=BF16),
    "sequence gate": Case(N=9, R=2, G=1, every=3, dtype=BF16),
    "sequence mixture": Case(N=10, outs=(12, 7), R=4, G=2, every=5, diagonal=True, dtype=BF16),
    "fp16": Case(N=9, D=41, outs=(20, 7), R=2, G=1, dtype=torch.float16),
}


def frozen(case: Case, biased: bool) -> grouped.Frozen:
    """Weights that lie together, as a group's do."""
    weight = normal(sum(case.outs), case.D, seed=80, dtype=case.dtype)
    return grouped.Frozen([guarded(weight)], [normal(sum(case.outs), seed=81, dtype=case.dtype) if biased else None])


def expected(case: Case, weights: grouped.Frozen) -> list[torch.Tensor]:
    """z, then every y, in float64."""
    z = (case.x().double() * case.kept()) @ torch.cat(case.downs()).double().T
    found, strengths = [z], case.strengths()
    for m, (weight, bias, B) in enumerate(zip(*weights.apart(case.outs), case.ups(), strict=True)):
        y = case.x().double() @ weight.double().T + case.scaled(z, strengths, m) @ B.double().T
        found.append(y if bias is None else y + bias.double())
    return found


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_one_launch_is_the_formula(name: str, biased: bool) -> None:
    case = CASES[name]
    weights = frozen(case, biased)
    ys, z = kernels.few_linear(case.x(), *weights.apart(case.outs), case.update())
    z64, *ys64 = expected(case, weights)
    assert error(z, z64) < 1e-4  # of A rounded to bf16 it would be some 1e-3
    for y, y64 in zip(ys, ys64, strict=True):
        assert y.dtype == case.dtype
        assert error(y, y64) < TOLERANCE[case.dtype]


@pytest.mark.parametrize(
    ("change", "launches"),
    [
        ({}, True),
        ({"N": FEW + 1}, False),
        ({"R": kernels.MOST_RANKS + 1}, False),
        ({"experts": kernels.MOST_COLUMNS}, False),
        ({"dropout": 0.3}, False),  # the product is of x, the update of what is left of it
        ({"dtype": torch.float32}, False),
    ],
)
@pytest.mark.usefixtures("poison")
def test_a_group_takes_it_where_it_fits(
    change: dict[str, Any], launches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = replace(CASES["a batch"], **change)
    called: list[int] = []
    original = kernels.few_linear

    def spy(*args: Any) -> Any:
        called.append(1)
        return original(*args)

    monkeypatch.setattr(kernels, "few_linear", spy)
    weights = frozen(case, True)
    ys, z = grouped.outputs(case.x(), weights, case.update(), case.dtype)
    assert bool(called) == launches
    assert z.dtype == case.dtype
    for found, true in zip([z, *ys], expected(case, weights), strict=True):
        assert error(found, true) < 2 * TOLERANCE[case.dtype]


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("rank", [2, 8])
def test_an_update_before_the_product(rank: int, dtype: torch.dtype, biased: bool) -> None:
    """Kernels of sums and of matrix units; a mask; outputs that are wide enough for products of their own."""
    wide = grouped.ALONE
    case = Case(N=FEW + 1, D=20, outs=(wide + 3, wide), R=rank, G=1, diagonal=True, dropout=0.3, dtype=dtype)
    weights = frozen(case, biased)
    ys, z = grouped._update_first(case.x(), weights, case.update(), dtype)
    assert z.dtype == dtype
    for found, true in zip([z, *ys], expected(case, weights), strict=True):
        assert error(found, true) < 2 * TOLERANCE[dtype]
    taken, kept = grouped.outputs(case.x(), weights, case.update(), dtype)
    assert all(torch.equal(a, b) for a, b in zip([kept, *taken], [z, *ys], strict=True))
