"""Propulsion's kernels against the formula in float64, for offsets of every size and sign."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from monkeyjump.ops import reference
from tests.ops.common import DEVICE, TOLERANCE, error, gradients_of, guarded, normal, uniform

kernels = pytest.importorskip("monkeyjump.ops.kernels.propulsion")
from monkeyjump.ops.kernels import propulsion  # noqa: E402
from monkeyjump.ops.kernels.tiles import TILES  # noqa: E402

TALL = max(tile.rows for tile in TILES.values())
WIDE = max(tile.columns for tile in TILES.values())


def formula(base: torch.Tensor, offset: torch.Tensor, degree: int, gate: torch.Tensor | float) -> torch.Tensor:
    return base * (1 + gate * ((1 + offset) ** degree - 1))


# N, O, tokens that share a gate (0: no gate), degree
SHAPES = {
    # one entry
    "one of everything": (1, 1, 1, 15),
    # a single token, as in generation
    "single token": (1, 37, 1, 15),
    # an odd width below one tile, and the lowest degree, whose derivative is a constant
    "degree 1": (13, 5, 1, 1),
    "degree 2": (13, 5, 0, 2),
    # two tiles in both directions, the second nearly empty
    "past every tile": (TALL + 1, WIDE + 1, 1, 15),
    # nothing masked
    "exact tiles": (TALL, WIDE, 0, 15),
    # a sequence across two row blocks
    "sequence gate": (3 * (TALL // 2 + 3), 9, TALL // 2 + 3, 15),
}


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_output_and_both_gradients(shape: str, dtype: torch.dtype) -> None:
    tokens, width, every, degree = SHAPES[shape]
    base, dy = normal(tokens, width, seed=1, dtype=dtype), normal(tokens, width, seed=2, dtype=dtype)
    offset = normal(width, seed=3, scale=0.05)
    gate = uniform(tokens // every, 1, seed=4) if every else None
    y = kernels.scale(base, offset, degree, gate, max(every, 1))
    dbase, doffset = kernels.scale_backward(dy, base, offset, degree, gate, max(every, 1))
    spread = 1.0 if gate is None else gate.double().repeat_interleave(every, 0)
    y64, found64 = gradients_of(
        lambda base, offset: formula(base, offset, degree, spread),
        {"base": base.double(), "offset": offset.double()},
        dy.double(),
    )
    assert y.dtype == dbase.dtype == dtype
    assert doffset.dtype == torch.float32
    assert error(y, y64) < TOLERANCE[dtype]
    assert error(dbase, found64["base"]) < TOLERANCE[dtype]
    assert error(doffset, found64["offset"]) < 1e-6  # of fp32 whatever the dtype of the output


# below the resolution of fp32 around 1, where a plain power gives 0; around -1, where log1p ends; beyond
OFFSETS = [1e-7, -1e-7, 1e-12, 3e-3, -0.5, -0.999, -1.0, -1.5, -2.0, 0.7, 0.0]


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("degree", [1, 2, 15])
@pytest.mark.parametrize("value", OFFSETS)
def test_every_offset(value: float, degree: int) -> None:
    """A large gate brings a tiny power to where fp32 can tell: (1 + 1e-7) ** 15 - 1 is 1.5e-6, not 1.8e-6 nor 0."""
    offset = torch.full((3,), value, device=DEVICE)
    wide = float(offset[0])
    exact = math.expm1(degree * math.log1p(wide)) if wide > -1 else (1 + wide) ** degree - 1
    large = 1 / abs(exact) if exact else 1.0
    base, dy = guarded(torch.tensor([[1.0, -2.0, 0.5]])), guarded(torch.tensor([[0.3, 1.0, -1.0]]))
    gate = torch.full((1, 1), large, device=DEVICE)
    y = kernels.scale(base, offset, degree, gate, 1)
    dbase, doffset = kernels.scale_backward(dy, base, offset, degree, gate, 1)
    factor, slope = 1 + large * exact, large * degree * (1 + wide) ** (degree - 1)
    torch.testing.assert_close(y.double(), base.double() * factor, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(dbase.double(), dy.double() * factor, rtol=2e-6, atol=2e-6)
    expected = (dy * base)[0].double() * slope
    torch.testing.assert_close(doffset.double(), expected, rtol=2e-6, atol=2e-6 * large)  # around -1 the slope is 0


@pytest.mark.parametrize("value", [1e-7, -1e-7])
def test_a_tiny_offset_does_not_vanish(value: float) -> None:
    """An optimiser's first steps, without a gate: one unit in the last place of fp32 is what is allowed."""
    base, offset = torch.ones(2, 4, device=DEVICE), torch.full((4,), value, device=DEVICE)
    change = kernels.scale(base, offset, 15, None, 1) - 1
    torch.testing.assert_close(change, torch.full_like(change, 15 * value), rtol=0, atol=1.2e-7)
    assert (change.sign() == (1 if value > 0 else -1)).all()


@pytest.mark.parametrize("degree", [1, 2, 3, 6, 15, 16, 31])
def test_the_kernel_takes_the_steps_of_the_reference(degree: int) -> None:
    """The same bits, but for the products and sums that a GPU makes in one rounding."""
    offset, base, dy = normal(33, seed=3, scale=0.5), normal(7, 33, seed=1), normal(7, 33, seed=2)
    allowed: dict[str, Any] = {"rtol": 2e-6, "atol": 1e-6} if DEVICE.type == "cuda" else {"rtol": 0.0, "atol": 0.0}
    y = kernels.scale(base, offset, degree, None, 1)
    torch.testing.assert_close(y, base + reference.scale_output(base, offset, degree, 1.0), **allowed)
    leaf = offset.clone().requires_grad_()
    ones = torch.ones(1, 33, device=DEVICE)
    _, slope = kernels.scale_backward(ones, ones, offset, degree, None, 1)
    (expected,) = torch.autograd.grad(reference.power_minus_one(leaf, degree).sum(), leaf)
    torch.testing.assert_close(slope, expected, **allowed)
    dbase, _ = kernels.scale_backward(dy, base, offset, degree, None, 1)
    torch.testing.assert_close(dbase, dy + reference.scale_output(dy, offset, degree, 1.0), **allowed)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda t: t,
    "columns of a wider tensor": lambda t: torch.cat([t, torch.full_like(t, 9.0)], -1)[..., : t.shape[-1]],
    "transposed": lambda t: t.movedim(-1, 0).contiguous().movedim(0, -1),
    "every other token": lambda t: t.repeat_interleave(2, 1)[:, ::2],
}
GATES: dict[str, Callable[[], torch.Tensor | None]] = {
    "always on": lambda: None,
    "a token": lambda: uniform(2, 9, 1, seed=4),
    "a sequence": lambda: uniform(2, 1, 1, seed=4),
    "one of five": lambda: uniform(2, 9, 5, seed=4)[..., 3:4],
}


@pytest.mark.parametrize(
    ("gate", "layout", "of"),
    [
        *((gate, "contiguous", "base") for gate in GATES),
        *(("a token", layout, of) for layout in LAYOUTS for of in ("base", "dy")),
    ],
)
def test_the_differentiable_op(gate: str, layout: str, of: str) -> None:
    """[B, T, O] with gates as the router makes them; what is not contiguous is read as what it is."""
    base, dy, offset = normal(2, 9, 11, seed=1), normal(2, 9, 11, seed=2), normal(11, seed=3, scale=0.1)
    given = GATES[gate]()
    if of == "base":
        base = LAYOUTS[layout](base)
    else:
        dy = LAYOUTS[layout](dy)
    y, found = gradients_of(
        lambda base, offset: propulsion.scaled(base, offset, 15, given), {"base": base, "offset": offset}, dy
    )
    spread = 1.0 if given is None else given.double()
    y64, found64 = gradients_of(
        lambda base, offset: formula(base, offset, 15, spread),
        {"base": base.double(), "offset": offset.double()},
        dy.double(),
    )
    assert error(y, y64) < 1e-6
    for name in found:
        assert error(found[name], found64[name]) < 1e-6, name


def test_the_gradient_of_a_sum() -> None:
    """One number, expanded to the shape of the output."""
    base, offset = normal(2, 9, 11, seed=1), normal(11, seed=3, scale=0.1).requires_grad_()
    propulsion.scaled(base, offset, 15, None).sum().backward()
    assert offset.grad is not None
    slope = 15 * (1 + offset.detach().double()) ** 14
    assert error(offset.grad, base.double().sum((0, 1)) * slope) < 1e-6


def test_two_runs_give_the_same_bits() -> None:
    base, dy = normal(3 * TALL + 5, 40, seed=1), normal(3 * TALL + 5, 40, seed=2)
    offset, gate = normal(40, seed=3, scale=0.1), uniform(3 * TALL + 5, 1, seed=4)
    runs = [
        (kernels.scale(base, offset, 15, gate, 1), *kernels.scale_backward(dy, base, offset, 15, gate, 1))
        for _ in range(2)
    ]
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)
