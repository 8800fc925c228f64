"""The differentiable low-rank update against the reference in float64: output, every gradient, and what is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from monkeyjump.ops import reference
from tests.ops.common import DEVICE, TOLERANCE, error, gradients_of, normal, uniform

ops = pytest.importorskip("monkeyjump.ops.gated_lora")

B, T, D, OUT, R = 2, 9, 21, 13, 3
SCALE = 0.7


def expected(
    base: torch.Tensor,
    x: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    gate: torch.Tensor | None = None,
    diagonal: torch.Tensor | None = None,
) -> torch.Tensor:
    """The reference, in the dtype of its inputs: columns of B repeat those of z, gates repeat to the columns."""
    columns, rank = B.shape[1], A.shape[0]
    strength: torch.Tensor | float = SCALE
    if gate is not None:
        strength = strength * gate.repeat_interleave(columns // gate.shape[-1], -1)
    if diagonal is not None:
        strength = strength * diagonal
    if columns == rank:
        return base + reference.gated_lora(x, A, B, strength)
    z = (x @ A.T).repeat(*[1] * (x.dim() - 1), columns // rank)
    return base + reference.project_up(z, B, strength)


def actual(base: torch.Tensor, x: torch.Tensor, A: torch.Tensor, B: torch.Tensor, **factors: Any) -> torch.Tensor:
    return ops.gated_lora(base, x, A, B, SCALE, **factors)


def inputs(columns: int = R, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {
        "base": normal(B, T, OUT, seed=1, dtype=dtype),
        "x": normal(B, T, D, seed=2, dtype=dtype),
        "A": normal(R, D, seed=3, scale=0.5),
        "B": normal(OUT, columns, seed=4, scale=0.5),
    }


FACTORS: dict[str, dict[str, Callable[[], torch.Tensor]]] = {
    "always on": {},
    "gated": {"gate": lambda: uniform(B, T, 1, seed=5)},
    "one gate a sequence": {"gate": lambda: uniform(B, 1, 1, seed=5)},
    "an expert a rank": {"gate": lambda: uniform(B, T, R, seed=5)},
    "experts, one decision a sequence": {"gate": lambda: uniform(B, 1, R, seed=5)},
    "diagonal": {"diagonal": lambda: normal(R, seed=6)},
    "gated diagonal": {"gate": lambda: uniform(B, T, 1, seed=5), "diagonal": lambda: normal(R, seed=6)},
}


def compare(given: dict[str, torch.Tensor], tolerance: float) -> None:
    dy = normal(*given["base"].shape, seed=9)
    y, found = gradients_of(actual, given, dy.to(given["base"].dtype))
    wide = {name: value.double() for name, value in given.items()}
    y64, found64 = gradients_of(expected, wide, dy.to(given["base"].dtype).double())
    assert y.dtype == given["base"].dtype
    assert error(y, y64) < tolerance
    for name, gradient in found.items():
        assert gradient.dtype == given[name].dtype, name
        assert error(gradient, found64[name]) < tolerance, name


@pytest.mark.parametrize("name", FACTORS)
def test_output_and_all_gradients(name: str) -> None:
    compare({**inputs(), **{key: make() for key, make in FACTORS[name].items()}}, 1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision(dtype: torch.dtype) -> None:
    # three roundings one after the other where an output has one
    compare({**inputs(dtype=dtype), "gate": uniform(B, T, 1, seed=5)}, 2 * TOLERANCE[dtype])


@pytest.mark.parametrize("sequence", [False, True])
def test_experts_on_one_a(sequence: bool) -> None:
    """HydraLoRA: the gradients of A and x are sums over the experts, those of the gates are not."""
    compare({**inputs(4 * R), "gate": uniform(B, 1 if sequence else T, 4, seed=5)}, 1e-6)


def test_tokens_without_a_batch_dimension() -> None:
    given = inputs()
    given["base"], given["x"] = given["base"].flatten(0, 1), given["x"].flatten(0, 1)
    compare({**given, "gate": uniform(B * T, 1, seed=5)}, 1e-6)


def test_all_tokens_to_one_expert() -> None:
    """Gates of exactly 0 and 1: what is off adds nothing and gets no gradient."""
    given = inputs()
    gate = torch.zeros(B, T, R, device=DEVICE)
    gate[..., 1] = 1
    compare({**given, "gate": gate}, 1e-6)
    dy = normal(B, T, OUT, seed=9)
    _, found = gradients_of(lambda **leaves: actual(gate=gate, **leaves), given, dy)
    assert found["B"][:, [0, 2]].eq(0).all()
    assert found["A"][[0, 2]].eq(0).all()
    assert found["A"][1].ne(0).all()


# tensors whose entries do not lie where a kernel that counts rows and columns would look for them
STRANGE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "columns of a wider tensor": lambda t: torch.cat([t, torch.full_like(t, 9.0)], -1)[..., : t.shape[-1]],
    "transposed": lambda t: t.movedim(-1, 0).contiguous().movedim(0, -1),
    "every other token": lambda t: t.repeat_interleave(2, 1)[:, ::2],
    "last tokens": lambda t: torch.cat([torch.full_like(t, 9.0), t], 1)[:, t.shape[1] :],
}


@pytest.mark.parametrize(
    ("name", "layout"),
    [(name, layout) for name in ("x", "base", "gate") for layout in STRANGE]
    + [("A", "transposed"), ("B", "transposed")],
)
def test_an_input_that_is_not_contiguous(name: str, layout: str) -> None:
    given = {**inputs(), "gate": uniform(B, T, R, seed=5)}
    strange = STRANGE[layout](given[name])
    assert torch.equal(strange, given[name])
    assert not strange.is_contiguous()
    compare({**given, name: strange}, 1e-6)


@pytest.mark.parametrize("name", ["x", "base"])
def test_one_sequence_of_every_other_token(name: str) -> None:
    """A batch of one hides its stride: its tokens are a view of [N, D] that is not dense."""
    given = {key: value[:1] if value.dim() == 3 else value for key, value in inputs().items()}
    compare({**given, name: given[name].repeat_interleave(2, 1)[:, ::2]}, 1e-6)


def test_one_gate_for_every_expert() -> None:
    gate = uniform(B, T, 1, seed=5)
    y = actual(**inputs(), gate=gate.expand(B, T, R))
    assert error(y, expected(**inputs(), gate=gate)) < 1e-6


@pytest.mark.parametrize("layout", ["of a sum", *STRANGE])
def test_an_output_gradient_that_is_not_contiguous(layout: str) -> None:
    """`y.sum().backward()` hands back one number, expanded."""
    dy = torch.full((), 0.3, device=DEVICE).expand(B, T, OUT) if layout == "of a sum" else normal(B, T, OUT, seed=9)
    strange = STRANGE[layout](dy) if layout in STRANGE else dy
    given = inputs()
    _, found = gradients_of(actual, given, strange)
    wide = {name: value.double() for name, value in given.items()}
    _, found64 = gradients_of(expected, wide, dy.double())
    for name, gradient in found.items():
        assert error(gradient, found64[name]) < 1e-6, name


@pytest.mark.parametrize("trained", [False, True])
def test_backward_makes_the_mask_of_forward_again(trained: bool) -> None:
    """Every gradient is that of the formula with the one mask which the seed of the forward gives."""
    given, p = inputs(), 0.4
    frozen = {} if trained else {"A": given.pop("A")}
    dy = normal(B, T, OUT, seed=9)
    torch.manual_seed(3)
    y, found = gradients_of(lambda **leaves: actual(**leaves, **frozen, dropout=p), given, dy)
    torch.manual_seed(3)
    seed = torch.randint(2**31, (), device=DEVICE)
    kept = reference.keep_mask(torch.Size((B, T, D)), seed, p).double() / (1 - p)
    wide = {name: value.double() for name, value in given.items()}
    wide_frozen = {name: value.double() for name, value in frozen.items()}

    def formula(x: torch.Tensor, **others: torch.Tensor) -> torch.Tensor:
        return expected(x=x * kept, **others, **wide_frozen)

    y64, found64 = gradients_of(formula, wide, dy.double())
    assert 0 < int((kept == 0).sum()) < kept.numel()
    assert error(y, y64) < 1e-6
    for name, gradient in found.items():
        assert error(gradient, found64[name]) < 1e-6, name


def test_two_calls_drop_different_entries() -> None:
    given = inputs()
    torch.manual_seed(0)
    first, second = (actual(**given, dropout=0.5) for _ in range(2))
    torch.manual_seed(0)
    assert not torch.equal(first, second)
    assert torch.equal(first, actual(**given, dropout=0.5))


def kept_by(function: Callable[[], Any]) -> list[torch.Tensor]:
    """What autograd holds on to for backward."""
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function()
    assert kept, "nothing is kept: no gradient was asked for"
    return kept


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_frozen_a_keeps_no_input(dropout: float) -> None:
    """Neither x, nor its mask, nor the base output: only what is as thin as the rank."""
    x, base = normal(8, T, D, seed=2).requires_grad_(), normal(8, T, OUT, seed=1).requires_grad_()
    A, up = normal(R, D, seed=3), normal(OUT, R, seed=4).requires_grad_()
    kept = kept_by(lambda: ops.gated_lora(base, x, A, up, SCALE, uniform(8, T, 1), None, dropout))
    assert max(tensor.numel() for tensor in kept) == 8 * T * R < min(x.numel(), base.numel())


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_trained_projection_keeps_the_input_itself(dropout: float) -> None:
    x, A = normal(8, T, D, seed=2).requires_grad_(), normal(R, D, seed=3).requires_grad_()
    up, base = normal(OUT, R, seed=4).requires_grad_(), normal(8, T, OUT, seed=1).requires_grad_()
    kept = kept_by(lambda: ops.gated_lora(base, x, A, up, SCALE, None, None, dropout))
    large = [tensor for tensor in kept if tensor.numel() > 8 * T * R]
    assert [(tensor.numel(), tensor.data_ptr()) for tensor in large] == [(x.numel(), x.data_ptr())]


def test_an_input_without_gradient_costs_none() -> None:
    """The first block of a model: x has no gradient, so none is made for it."""
    given = inputs()
    x = given.pop("x")
    _, found = gradients_of(lambda **leaves: actual(x=x, **leaves), given, normal(B, T, OUT, seed=9))
    assert set(found) == {"base", "A", "B"}


def test_no_gradient_mode() -> None:
    given = {name: value.requires_grad_() for name, value in inputs().items()}
    with torch.no_grad():
        y = actual(**given)
    assert not y.requires_grad
    assert error(y, expected(**given)) < 1e-6
