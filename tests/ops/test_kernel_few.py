"""The update of few tokens in one launch: the formula in float64, the two kernels, and gradients through both."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.ops.common import DEVICE, TOLERANCE, error, guarded, normal, uniform
from tests.ops.lora_cases import PRODUCTS as MATRIX_UNITS
from tests.ops.lora_cases import Case, take

kernels = pytest.importorskip("monkeyjump.ops.kernels.lora_few_tokens")
from monkeyjump.ops import gated_lora  # noqa: E402
from monkeyjump.ops.kernels import lora, lora_sums  # noqa: E402
from monkeyjump.ops.kernels.tiles import FEW_TOKENS, TILES  # noqa: E402

SUMS, PRODUCTS = TILES["few_sums"], TILES["few_products"]
WIDE = PRODUCTS.columns
LONG = 256 * SUMS.warps * kernels.EARLY + 1  # entries of a row: one more than is loaded early
CASES = {
    # nothing to add up: every tile is padding but for one entry
    "one of everything": Case(N=1, D=1, outs=(1,), R=1),
    # a step of generation, and of a batch that fills no row block
    "single token": Case(N=1, D=33, outs=(17, 5, 5), R=2, G=1),
    "a batch": Case(N=SUMS.rows + 1, D=41, outs=(SUMS.columns + 3, 12, 7), R=2, G=1),
    # nothing masked
    "exact tiles": Case(N=SUMS.rows, D=256, outs=(SUMS.columns, SUMS.columns), R=2),
    # what is loaded early, and what is not
    "long rows": Case(N=2, D=LONG, outs=(5,), R=2, G=1),
    # the most ranks that are sums, of narrow outputs, each with strengths of its own
    "three with strengths": Case(N=3, D=17, outs=(5, 3, 4), R=kernels.SUMS_RANKS, G=1, diagonal=True),
    # experts on one A: column c reads z[:, c % R]
    "shared A": Case(N=5, D=19, outs=(12, 7), R=2, experts=4, G=4),
    "shared A, no gate": Case(N=5, D=19, R=3, experts=2),
    # one gate for the tokens of a sequence, across row blocks and within one
    "sequence gate": Case(N=9, R=2, G=1, every=3),
    "sequence mixture": Case(N=10, outs=(12, 7), R=4, G=2, every=5, diagonal=True),
    # the mask is of the position in x, not in the tile
    "dropout": Case(N=5, D=300, outs=(9, 4), R=1, G=1, dropout=0.3),
    # through the matrix units: more ranks, more columns, more entries of an A than plain sums are for
    "rank 8": Case(N=PRODUCTS.rows + 1, D=WIDE + 1, outs=(WIDE + 3, 9), R=8, G=1),
    "rank 64": Case(N=3, D=40, outs=(24,), R=64, G=1, diagonal=True),
    "mixture": Case(N=6, outs=(12, 7), R=8, G=4, every=2),
    "many columns": Case(N=5, D=19, outs=(12, 7), R=3, experts=4, G=4),
    "very long rows": Case(N=2, D=kernels.SUMS_ENTRIES // 2 + 1, outs=(5,), R=2),
    "dropout in products": Case(N=PRODUCTS.rows + 2, D=WIDE + 5, outs=(9, 4), R=5, dropout=0.3),
}
IN_LOW_PRECISION = ("a batch", "long rows", "shared A", "dropout", "rank 8", "dropout in products")
EVERY = [pytest.param(case, id=name) for name, case in CASES.items()] + [
    pytest.param(replace(CASES[name], dtype=dtype), id=f"{name}, {dtype}")
    for name in IN_LOW_PRECISION
    for dtype in (torch.float16, torch.bfloat16)
]
Found = tuple[torch.Tensor, list[torch.Tensor]]


def at_once(case: Case) -> Found:
    """(z, ys) in one launch."""
    bases = case.bases()
    ys = [torch.empty_like(base) for base in bases]
    return kernels.at_once(case.x(), case.update(), bases, ys), ys


def by_sums(case: Case) -> bool:
    few_columns = case.R <= kernels.SUMS_RANKS and case.columns <= kernels.SUMS_COLUMNS
    return few_columns and case.R * case.D <= kernels.SUMS_ENTRIES


def in_two(case: Case, patch: pytest.MonkeyPatch) -> Found:
    """(z, ys) in two launches, both of the kind that the one is."""
    if by_sums(case):
        patch.setattr(lora_sums, "MOST_COLUMNS", len(case.outs) * case.R)
        patch.setattr(lora_sums, "COLUMNS_OF_B", (case.columns,))
    else:
        take(MATRIX_UNITS, patch)
    bases, z = case.bases(), lora.down(case.x(), case.downs(), case.mask())
    lora.up(bases, z, case.ups(), case.strengths(), bases)
    return z, bases


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("case", EVERY)
def test_one_launch_is_two_and_the_formula(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two kernels that round alike, what is left are sums in another order, and what they tip over in rounding."""
    (z, ys), (z_in_two, ys_in_two), strengths = at_once(case), in_two(case, monkeypatch), case.strengths()
    assert z.dtype == torch.float32
    z64 = (case.x().double() * case.kept()) @ torch.cat(case.downs()).double().T
    long = 2.0**-24 * case.D**0.5  # the roundings of a sum of D numbers, one after the other: a random walk
    close = max(3e-6 if DEVICE.type == "cuda" else 1e-6, long)  # matrix units cut off where others round
    assert error(z, z64) < (max(1e-6, long) if by_sums(case) else max(close, TOLERANCE[case.dtype]))
    assert error(z, z_in_two) < close
    for m, (y, base, B) in enumerate(zip(ys, case.bases(), case.ups(), strict=True)):
        assert y.dtype == case.dtype
        y64 = base.double() + case.scaled(z64, strengths, m) @ B.double().T
        assert error(y, y64) < max(long, TOLERANCE[case.dtype])
        assert error(y, ys_in_two[m]) < max(5e-7, long, TOLERANCE[case.dtype] / 5)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("rank", [2, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_wider_tensors(rank: int, dtype: torch.dtype) -> None:
    """Base outputs that lie side by side in one tensor, as one frozen product leaves them; also into themselves."""
    case = Case(N=SUMS.rows + 1, outs=(SUMS.columns + 3, 12, 7), R=rank, G=1, dtype=dtype)
    wide = guarded(torch.cat([normal(case.N, 3, dtype=dtype), *case.bases()], 1)).split([3, *case.outs], 1)[1:]
    z, apart = at_once(case)
    together = [torch.empty_like(base) for base in case.bases()]
    for ys in (together, wide):  # the second last: it is read
        assert torch.equal(kernels.at_once(case.x(), case.update(), wide, ys), z)
        assert all(torch.equal(a, b) for a, b in zip(ys, apart, strict=True))


def test_two_runs_give_the_same_bits() -> None:
    for name in ("a batch", "rank 8"):
        (z, ys), (other_z, other_ys) = at_once(CASES[name]), at_once(CASES[name])
        assert torch.equal(z, other_z)
        assert all(torch.equal(a, b) for a, b in zip(ys, other_ys, strict=True))


@pytest.mark.parametrize(
    ("tokens", "rank", "launches"),
    [
        (FEW_TOKENS, 2, ["at_once"]),
        (FEW_TOKENS + 1, 2, ["down", "up"]),
        (3, kernels.MOST_COLUMNS, ["at_once"]),
        (3, kernels.MOST_COLUMNS + 1, ["down", "up"]),
    ],
)
def test_which_kernels(tokens: int, rank: int, launches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    for module, name in ((kernels, "at_once"), (lora, "down"), (lora, "up")):
        original = getattr(module, name)

        def spy(*args: Any, _name: str = name, _original: Any = original, **options: Any) -> Any:
            called.append(_name)
            return _original(*args, **options)

        monkeypatch.setattr(module, name, spy)
    case = Case(N=tokens, R=rank, G=1)
    bases, strengths = case.bases(), case.strengths()
    z = lora.down_up(case.x(), case.update(), bases, bases)
    assert called == launches
    z64 = case.x().double() @ case.downs()[0].double().T
    assert error(z, z64) < 1e-6
    assert error(bases[0], case.bases()[0].double() + case.scaled(z64, strengths, 0) @ case.ups()[0].double().T) < 1e-6


GROUPS: dict[str, dict[str, Any]] = {
    "gated": {"G": 1},
    "gated, dropout": {"G": 1, "dropout": 0.3},
    "diagonal": {"diagonal": True},
    "experts on one A": {"experts": 4, "G": 4},
    "rank 8": {"R": 8, "G": 2, "every": 3},
}


def group(case: Case) -> dict[str, torch.Tensor]:
    """Outputs and all gradients of a group that the case describes, by name."""
    strengths, mask = case.strengths(), case.mask()
    found: dict[str, torch.Tensor] = {}
    projections = []
    for m, (A, B) in enumerate(zip(case.downs(), case.ups(), strict=True)):
        own = {"A": A, "B": B, "gate": strengths.gates[m], "diagonal": strengths.diagonals[m]}
        leaves: dict[str, Any] = {
            name: None if value is None else value.detach().requires_grad_() for name, value in own.items()
        }
        weight = normal(B.shape[0], case.D, seed=80 + m, dtype=case.dtype)
        projections.append(gated_lora.Projection(weight=weight, bias=None, **leaves))
        found |= {f"{name}{m}": value for name, value in leaves.items() if value is not None}
    x = case.x().requires_grad_()
    ys = gated_lora.grouped_lora(x, projections, 0.7, case.dropout, None if mask is None else mask.seed)
    grads = torch.autograd.grad(ys, [x, *found.values()], [normal(*y.shape, seed=90, dtype=case.dtype) for y in ys])
    return dict(zip(["x", *found], grads, strict=True)) | {f"y{m}": y for m, y in enumerate(ys)}


@pytest.mark.parametrize("name", GROUPS)
def test_gradients_are_those_of_two_launches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(**{"N": 9, "D": 21, "outs": (13, 6), "R": 3, **GROUPS[name]})
    found = group(case)
    monkeypatch.setattr(lora, "FEW_TOKENS", 0)
    expected = group(case)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert error(found[key], value) < 2e-6, key


@pytest.mark.parametrize("gate", [None, (2, 3, 1), (2, 1, 4)])
def test_one_projection_without_a_gradient(gate: tuple[int, ...] | None) -> None:
    """Leading shapes, gates of sequences, an input that is not contiguous; the same as with a graph."""
    x = normal(2, 21, 3, seed=1).transpose(1, 2)
    base, A, B, diagonal = normal(2, 3, 13, seed=2), normal(4, 21, seed=3), normal(13, 8, seed=4), normal(8, seed=5)
    given = (base, x, A, B, 0.7, None if gate is None else uniform(*gate, seed=6), diagonal)
    expected = gated_lora.gated_lora(*given)
    with torch.no_grad():
        found = gated_lora.gated_lora(*given)
    assert found.shape == expected.shape
    assert error(found, expected) < 1e-6
