"""The kernels of the low-rank update against their formulas in float64, with NaN wherever nothing should be read."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from monkeyjump.ops import reference
from monkeyjump.ops.strength import Dropout, Strength
from tests.ops.common import DEVICE, TOLERANCE, error, guarded, normal, uniform

kernels = pytest.importorskip("monkeyjump.ops.kernels.lora")
from monkeyjump.ops.kernels.tiles import TILES  # noqa: E402

pytestmark = pytest.mark.usefixtures("poison")
TALL = max(tile.rows for tile in TILES.values())
WIDE = max(tile.columns for tile in TILES.values())


@dataclass(frozen=True)
class Case:
    """N tokens, D and `out` widths, M projections that share x, R rank of one A, `experts` B's on it, G gates."""

    N: int = 9
    D: int = 20
    out: int = 12
    R: int = 2
    M: int = 1
    experts: int = 1
    G: int = 0  # 0: no gate
    every: int = 1
    diagonal: bool = False
    dropout: float = 0.0
    dtype: torch.dtype = torch.float32

    @property
    def columns(self) -> int:
        return self.R * self.experts

    def x(self) -> torch.Tensor:
        return normal(self.N, self.D, seed=1, dtype=self.dtype)

    def downs(self) -> list[torch.Tensor]:
        return [normal(self.R, self.D, seed=2 + m, scale=0.5) for m in range(self.M)]

    def up(self) -> torch.Tensor:
        return normal(self.out, self.columns, seed=20, scale=0.5)

    def base(self) -> torch.Tensor:
        return normal(self.N, self.out, seed=21, dtype=self.dtype)

    def z(self) -> torch.Tensor:
        return normal(self.N, self.R, seed=22)

    def dzs(self) -> list[torch.Tensor]:
        return [normal(self.N, self.R, seed=30 + m) for m in range(self.M)]

    def mask(self) -> Dropout | None:
        return Dropout(torch.tensor(2**31 - 7, device=DEVICE), self.dropout) if self.dropout else None

    def strength(self) -> Strength:
        gate = uniform(self.N // self.every, self.G, seed=23) if self.G else None
        diagonal = normal(self.columns, seed=24) if self.diagonal else None
        return Strength(0.7, gate, diagonal, self.every)

    def kept(self) -> torch.Tensor:
        """What dropout multiplies x by, [N, D] float64."""
        shape = torch.Size((self.N, self.D))
        mask = self.mask()
        if mask is None:
            return torch.ones(shape, dtype=torch.float64, device=DEVICE)
        return reference.keep_mask(shape, mask.seed, mask.p).double() / (1 - mask.p)

    def s(self, strength: Strength) -> torch.Tensor:
        """scale * diagonal[c] * gate[n // every, c // (C / G)], [N, C] float64."""
        s = torch.full((self.N, self.columns), strength.scale, dtype=torch.float64, device=DEVICE)
        n, c = torch.arange(self.N, device=DEVICE)[:, None], torch.arange(self.columns, device=DEVICE)
        if strength.diagonal is not None:
            s = s * strength.diagonal[c]
        if strength.gate is not None:
            s = s * strength.gate[n // self.every, c // (self.columns // self.G)]
        return s


CASES = {
    # nothing to add up: every tile is padding but for one entry
    "one of everything": Case(N=1, D=1, out=1, R=1),
    # a single token, as in generation
    "single token": Case(N=1, D=33, out=17, R=2, M=3, G=1),
    # odd widths below one tile, fewer ranks than a matrix instruction takes
    "odd and narrow": Case(N=13, D=7, out=5, R=3, G=1),
    # two tiles in every direction, the second of them nearly empty
    "past every tile": Case(N=TALL + 1, D=WIDE + 1, out=WIDE + 3, R=4, G=1),
    # no masked entry at all
    "exact tiles": Case(N=TALL, D=WIDE, out=WIDE, R=16, G=1),
    # the second of three projections begins at no power of two
    "three share x": Case(N=TALL + 6, D=41, R=3, M=3),
    # columns padded from 33 to 64, and from 66 to 128 where two share x
    "rank 33": Case(R=33, M=2, diagonal=True, G=1),
    # a large rank, which fills its columns
    "rank 64": Case(N=TALL + 2, D=40, out=24, R=64, G=1, diagonal=True),
    # HydraLoRA: four B's on one A
    "shared A": Case(N=21, R=3, experts=4, G=4),
    # HydraLoRA with more columns than a matrix instruction, and no gate
    "shared A, no gate": Case(N=21, R=5, experts=7),
    # a mixture of four experts of rank 2 as one adapter of rank 8
    "mixture": Case(N=TALL + 3, R=8, G=4),
    # one gate for all tokens of a sequence, a sequence across two row blocks
    "sequence gate": Case(N=3 * (TALL // 2 + 3), R=2, G=1, every=TALL // 2 + 3),
    # the same for a mixture, sequences shorter than a block
    "sequence mixture": Case(N=35, R=6, G=3, every=5, diagonal=True),
    # AdaLoRA without a gate
    "diagonal": Case(N=13, R=4, diagonal=True),
    # the mask is of the position in x, not in the tile
    "dropout": Case(N=TALL + 6, D=WIDE + 44, R=1, M=3, G=1, dropout=0.3),
    # almost nothing is left
    "high dropout": Case(N=13, D=41, R=1, dropout=0.9),
}
LOW = ("single token", "past every tile", "shared A", "dropout")
ALL = [pytest.param(case, id=name) for name, case in CASES.items()] + [
    pytest.param(replace(CASES[name], dtype=dtype), id=f"{name}, {str(dtype).removeprefix('torch.')}")
    for name in LOW
    for dtype in (torch.float16, torch.bfloat16)
]


@pytest.mark.parametrize("case", ALL)
def test_down(case: Case) -> None:
    x, As = case.x(), case.downs()
    z = kernels.down(x, As, case.mask())
    assert z.dtype == torch.float32
    assert error(z, (x.double() * case.kept()) @ torch.cat(As).double().T) < TOLERANCE[case.dtype]


@pytest.mark.parametrize("case", ALL)
def test_up(case: Case) -> None:
    base, z, B, strength = case.base(), case.z(), case.up(), case.strength()
    y = kernels.up(base, z, B, strength)
    assert y.dtype == case.dtype
    delta = (z.double().repeat(1, case.experts) * case.s(strength)) @ B.double().T
    assert error(y, base.double() + delta) < TOLERANCE[case.dtype]


@pytest.mark.parametrize("case", ALL)
def test_up_backward(case: Case) -> None:
    dy, z, B, strength = case.base(), case.z(), case.up(), case.strength()
    s = case.s(strength)
    t, dB = kernels.up_backward(dy, z, B, strength, False)
    times_s, same_dB = kernels.up_backward(dy, z, B, strength, True)
    assert t.dtype == times_s.dtype == dB.dtype == torch.float32
    assert error(t, dy.double() @ B.double()) < TOLERANCE[case.dtype]
    assert error(times_s, (dy.double() @ B.double()) * s) < TOLERANCE[case.dtype]
    assert error(dB, dy.double().T @ (z.double().repeat(1, case.experts) * s)) < TOLERANCE[case.dtype]
    assert torch.equal(dB, same_dB)


@pytest.mark.parametrize("case", ALL)
def test_down_backward(case: Case) -> None:
    x, dzs, As, mask = case.x(), case.dzs(), case.downs(), case.mask()
    dx, dA = kernels.down_backward(x, dzs, As, mask, case.dtype)
    assert dx.dtype == case.dtype
    assert dA.dtype == torch.float32
    dz = torch.cat(dzs, 1).double()
    assert error(dx, dz @ torch.cat(As).double() * case.kept()) < TOLERANCE[case.dtype]
    assert error(dA, dz.T @ (x.double() * case.kept())) < TOLERANCE[case.dtype]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_either_gradient_of_down_alone(dropout: float) -> None:
    """A frozen A needs no x, and an input without a gradient no dx: the other is not touched by that."""
    case = Case(N=TALL + 1, D=WIDE + 1, R=2, M=2, dropout=dropout)
    x, dzs, As, mask = case.x(), case.dzs(), case.downs(), case.mask()
    dx, dA = kernels.down_backward(x, dzs, As, mask, torch.float32)
    only_dx, no_dA = kernels.down_backward(None, dzs, As, mask, torch.float32)
    no_dx, only_dA = kernels.down_backward(x, dzs, As, mask, None)
    assert no_dA is None
    assert no_dx is None
    assert torch.equal(dx, only_dx)
    assert torch.equal(dA, only_dA)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_are_fp32_whatever_the_dtype(dtype: torch.dtype) -> None:
    """With operands that the dtype holds exactly, only the sums are left to be wrong: they are as good as fp32's."""
    case = Case(N=TALL + 6, D=WIDE + 44, out=WIDE + 3, R=2, dtype=dtype)
    exact = [guarded(A.to(dtype).float()) for A in case.downs()]
    dzs = [guarded(dz.to(dtype).float()) for dz in case.dzs()]
    B, z = guarded(case.up().to(dtype).float()), guarded(case.z().to(dtype).float())
    x, dy, one = case.x(), case.base(), Strength(1.0)
    assert error(kernels.down(x, exact, None), x.double() @ torch.cat(exact).double().T) < 1e-6
    t, dB = kernels.up_backward(dy, z, B, one, False)
    assert error(t, dy.double() @ B.double()) < 1e-6
    assert error(dB, dy.double().T @ z.double()) < 1e-6
    assert error(kernels.down_backward(x, dzs, exact, None, None)[1], torch.cat(dzs, 1).double().T @ x.double()) < 1e-6


def test_a_gate_and_a_z_that_are_columns_of_wider_tensors() -> None:
    """As they come: the gate of one projection out of [N, E], and z out of the z of all that share x."""
    case = Case(N=TALL + 3, R=2, M=3)
    gates, zs, B, base = uniform(case.N, 5, seed=5), normal(case.N, 6, seed=6), case.up(), case.base()
    for position in range(case.M):
        gate, z = gates[:, position + 1, None], zs[:, 2 * position : 2 * position + 2]
        y = kernels.up(base, z, B, Strength(0.7, gate))
        t, dB = kernels.up_backward(base, z, B, Strength(0.7, gate), True)
        scaled = 0.7 * gate.double() * z.double()
        assert error(y, base.double() + scaled @ B.double().T) < 1e-6
        assert error(t, 0.7 * gate.double() * (base.double() @ B.double())) < 1e-6
        assert error(dB, base.double().T @ scaled) < 1e-6


def test_the_mask_is_the_references_entry_by_entry() -> None:
    """With A the identity z is the dropped input itself, and with dz = 1, A = 1 dx is the mask."""
    N, D = TALL + 6, 61
    eye, mask = torch.eye(D, device=DEVICE), Dropout(torch.tensor(123_456_789, device=DEVICE), 0.4)
    kept = reference.keep_mask(torch.Size((N, D)), mask.seed, mask.p)
    z = kernels.down(torch.ones(N, D, device=DEVICE), [eye], mask)
    assert torch.equal(z != 0, kept)
    torch.testing.assert_close(z[kept], torch.full_like(z[kept], 1 / 0.6))
    ones = torch.ones(N, 1, device=DEVICE), torch.ones(1, D, device=DEVICE)
    dx, _ = kernels.down_backward(None, [ones[0]], [ones[1]], mask, torch.float32)
    assert torch.equal(dx != 0, kept)
    assert abs(float(kept.float().mean()) - 0.6) < 0.03  # a mask at all, of about the right size


@pytest.mark.parametrize("seed", [0, 1, 2**31 - 1])
def test_the_mask_follows_the_seed(seed: int) -> None:
    x, eye = torch.ones(40, 16, device=DEVICE), torch.eye(16, device=DEVICE)
    found = [
        kernels.down(x, [eye], Dropout(torch.tensor(value, device=DEVICE), 0.5)) != 0
        for value in (seed, seed, seed + 1)
    ]
    assert torch.equal(found[0], found[1])
    assert float((found[0] != found[2]).float().mean()) > 0.3


def test_two_runs_give_the_same_bits() -> None:
    case = Case(N=3 * TALL + 5, D=60, out=40, R=2, M=2, G=1, dropout=0.2, dtype=torch.bfloat16)
    runs = []
    for _ in range(2):
        x, As, mask, strength = case.x(), case.downs(), case.mask(), case.strength()
        runs.append(
            [
                kernels.down(x, As, mask),
                kernels.up(case.base(), case.z(), case.up(), strength),
                *kernels.up_backward(case.base(), case.z(), case.up(), strength, True),
                *kernels.down_backward(x, case.dzs(), As, mask, case.dtype),
            ]
        )
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)
