"""The kernels of the low-rank update against their formulas in float64, with NaN wherever nothing should be read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from monkeyjump.ops import reference
from monkeyjump.ops.lowrank import Dropout, Strengths
from tests.ops.common import DEVICE, TOLERANCE, error, guarded, normal
from tests.ops.lora_cases import DOWN, DOWN_BACKWARD, PRODUCTS, SUMS, TALL, UP, WIDE, Case, take

kernels = pytest.importorskip("monkeyjump.ops.kernels.lora")
from monkeyjump.ops.kernels.partial_sums import total  # noqa: E402
from monkeyjump.ops.kernels.tiles import TILES  # noqa: E402

pytestmark = pytest.mark.usefixtures("poison")


def up_backward(
    dys: Sequence[torch.Tensor], z: torch.Tensor, Bs: Sequence[torch.Tensor], strengths: Strengths, times_s: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """t and dB of every projection."""
    t, parts = kernels.up_backward(dys, z, Bs, strengths, times_s)
    sums = total([parts]).split([B.numel() for B in Bs])
    return list(t.split(Bs[0].shape[1], 1)), [dB.view(B.shape) for dB, B in zip(sums, Bs, strict=True)]


def down_backward_alone(
    x: torch.Tensor | None, dz: torch.Tensor, As: list[torch.Tensor], mask: Dropout | None, dtype: torch.dtype | None
) -> Any:
    """(dx [N, D], None without a dtype; dA [M * R, D], None without x)."""
    dx = None if dtype is None else torch.empty(dz.shape[0], As[0].shape[1], device=dz.device, dtype=dtype)
    parts = kernels.down_backward(x, dz, As, mask, dx)
    return dx, total(parts).view(-1, As[0].shape[1]) if parts else None


@pytest.fixture(params=[SUMS, PRODUCTS])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    take(request.param, monkeypatch)


def close(case: Case, way: str) -> float:
    """Of fp32 numbers: sums take operands as they are, whatever the dtype of the others."""
    return 1e-6 if way == SUMS else TOLERANCE[case.dtype]


@pytest.mark.parametrize(("case", "way"), DOWN)
def test_down(case: Case, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    take(way, monkeypatch)
    x, As = case.x(), case.downs()
    z = kernels.down(x, As, case.mask())
    assert z.dtype == torch.float32
    assert error(z, (x.double() * case.kept()) @ torch.cat(As).double().T) < close(case, way)


@pytest.mark.parametrize(("case", "way"), UP)
def test_up(case: Case, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into new tensors, and into the base outputs themselves."""
    take(way, monkeypatch)
    bases, z, Bs, strengths = case.bases(), case.z(), case.ups(), case.strengths()
    ys = [torch.empty_like(base) for base in bases]
    kernels.up(bases, z, Bs, strengths, ys)
    for m, (y, base, B) in enumerate(zip(ys, bases, Bs, strict=True)):
        delta = case.scaled(z, strengths, m) @ B.double().T
        assert error(y, base.double() + delta) < TOLERANCE[case.dtype]
    kernels.up(bases, z, Bs, strengths, bases)
    for base, y in zip(bases, ys, strict=True):
        assert torch.equal(base, y)


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_wider_tensors(dtype: torch.dtype) -> None:
    """Outputs and gradients that lie side by side in one tensor are what they are apart."""
    case = Case(N=TALL + 3, D=20, outs=(WIDE + 3, 12, 7), R=2, G=1, dtype=dtype)
    bases, z, Bs, strengths = case.bases(), case.z(), case.ups(), case.strengths()
    wide = guarded(torch.cat([normal(case.N, 3, dtype=dtype), *bases], 1)).split([3, *case.outs], 1)[1:]
    apart, together = [torch.empty_like(base) for base in bases], [torch.empty_like(base) for base in bases]
    kernels.up(bases, z, Bs, strengths, apart)
    kernels.up(wide, z, Bs, strengths, together)
    ts, dBs = up_backward(bases, z, Bs, strengths, True)
    wide_ts, wide_dBs = up_backward(wide, z, Bs, strengths, True)
    kernels.up(wide, z, Bs, strengths, wide)
    for found, expected in ((together, apart), (wide, apart), (wide_ts, ts), (wide_dBs, dBs)):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(("case", "way"), UP)
def test_up_backward(case: Case, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    take(way, monkeypatch)
    dys, z, Bs, strengths = case.bases(), case.z(), case.ups(), case.strengths()
    ts, dBs = up_backward(dys, z, Bs, strengths, False)
    times_s, same_dBs = up_backward(dys, z, Bs, strengths, True)
    for m, (dy, B) in enumerate(zip(dys, Bs, strict=True)):
        t = dy.double() @ B.double()
        assert error(ts[m], t) < close(case, way)
        assert error(times_s[m], t * case.s(strengths, m)) < close(case, way)
        plain = replace(strengths, diagonals=(None,) * len(dys))
        assert error(dBs[m], dy.double().T @ case.scaled(z, plain, m)) < close(case, way)
        # compiled in another layout, the sums have another order
        assert error(dBs[m], same_dBs[m]) <= (1e-6 if DEVICE.type == "cuda" else 0)


@pytest.mark.parametrize("case", DOWN_BACKWARD)
def test_down_backward(case: Case) -> None:
    x, dzs, As, mask = case.x(), case.dzs(), case.downs(), case.mask()
    dx, dA = down_backward_alone(x, torch.cat(dzs, 1), As, mask, case.dtype)
    assert dx.dtype == case.dtype
    assert dA.dtype == torch.float32
    dz = torch.cat(dzs, 1).double()
    assert error(dx, dz @ torch.cat(As).double() * case.kept()) < TOLERANCE[case.dtype]
    assert error(dA, dz.T @ (x.double() * case.kept())) < TOLERANCE[case.dtype]


def test_either_gradient_of_down_alone() -> None:
    """A frozen A needs no x, and an input without a gradient no dx: the other is not touched by that."""
    case = Case(N=TALL + 1, D=WIDE + 1, outs=(1, 1), R=2, dropout=0.3)
    x, dzs, As, mask = case.x(), case.dzs(), case.downs(), case.mask()
    dx, dA = down_backward_alone(x, torch.cat(dzs, 1), As, mask, torch.float32)
    only_dx, no_dA = down_backward_alone(None, torch.cat(dzs, 1), As, mask, torch.float32)
    no_dx, only_dA = down_backward_alone(x, torch.cat(dzs, 1), As, mask, None)
    assert no_dA is None
    assert no_dx is None
    assert torch.equal(dx, only_dx)
    assert torch.equal(dA, only_dA)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_are_fp32_whatever_the_dtype(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """With operands that the dtype holds exactly, only the sums are left to be wrong: they are as good as fp32's."""
    take(PRODUCTS, monkeypatch)
    close = 3e-6 if DEVICE.type == "cuda" else 1e-6  # matrix units cut off where others round
    case = Case(N=TALL + 6, D=WIDE + 44, outs=(WIDE + 3,), R=2, dtype=dtype)
    (A,), (B,), (dz,), z = (
        *([guarded(value.to(dtype).float()) for value in values] for values in (case.downs(), case.ups(), case.dzs())),
        guarded(case.z().to(dtype).float()),
    )
    x, (dy,) = case.x(), case.bases()
    assert error(kernels.down(x, [A], None), x.double() @ A.double().T) < close
    (t,), (dB,) = up_backward([dy], z, [B], Strengths(1.0, (None,), (None,)), False)
    assert error(t, dy.double() @ B.double()) < close
    assert error(dB, dy.double().T @ z.double()) < close
    assert error(down_backward_alone(x, dz, [A], None, None)[1], dz.double().T @ x.double()) < close


def test_the_mask_is_the_references_entry_by_entry() -> None:
    """With A the identity z is the dropped input itself, and with dz = 1, A = 1 dx is the mask."""
    N, D = TALL + 6, 61
    eye, mask = torch.eye(D, device=DEVICE), Dropout(torch.tensor(123_456_789, device=DEVICE), 0.4)
    kept = reference.keep_mask(torch.Size((N, D)), mask.seed, mask.p)
    z = kernels.down(torch.ones(N, D, device=DEVICE), [eye], mask)
    assert torch.equal(z != 0, kept)
    torch.testing.assert_close(z[kept], torch.full_like(z[kept], 1 / 0.6))
    ones = torch.ones(N, 1, device=DEVICE), torch.ones(1, D, device=DEVICE)
    dx, _ = down_backward_alone(None, ones[0], [ones[1]], mask, torch.float32)
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


@pytest.mark.usefixtures("both_ways")
def test_two_runs_give_the_same_bits() -> None:
    case = Case(N=2 * TALL + 5, D=30, outs=(20, 10), R=2, G=1, dropout=0.2, dtype=torch.bfloat16)
    runs = []
    for _ in range(2):
        x, As, mask, strengths, bases = case.x(), case.downs(), case.mask(), case.strengths(), case.bases()
        ts, dBs = up_backward(bases, case.z(), case.ups(), strengths, True)
        dx, dA = down_backward_alone(x, torch.cat(case.dzs(), 1), As, mask, case.dtype)
        kernels.up(bases, case.z(), case.ups(), strengths, bases)
        runs.append([kernels.down(x, As, mask), *bases, *ts, *dBs, dx, dA])
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)


def test_parts_of_all_heights_and_widths() -> None:
    """One after the other; more row blocks than are added up at a time, single ones, and columns past a tile."""
    tile = TILES["add_parts"]
    shapes = [(1, 1), (2 * tile.rows + 1, 5), (tile.rows, tile.columns), (3, 2 * tile.columns + 1), (7, 1)]
    parts = [normal(*shape, seed=m) for m, shape in enumerate(shapes)]
    for some in (parts, parts[:1], parts[1:3]):
        found, expected = total(some), torch.cat([part.double().sum(0) for part in some])
        assert found.dtype == torch.float32
        assert error(found, expected) < 1e-6
