"""Projections of one input as one op: outputs and every gradient against the formula in float64, and what is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from monkeyjump.ops import reference
from monkeyjump.ops.lowrank import Dropout
from tests.ops.common import DEVICE, TOLERANCE, error, guarded, normal, uniform
from tests.ops.lora_cases import Case

ops = pytest.importorskip("monkeyjump.ops.gated_lora")
from monkeyjump.ops import grouped_products as products  # noqa: E402
from monkeyjump.ops.kernels.tiles import FEW_TOKENS  # noqa: E402

B, T, D, R = 2, 9, 21, 3
OUTS = (13, 6, 6)
SCALE = 0.7
NAMES = ("A", "B", "gate", "diagonal")
Tensors = dict[str, torch.Tensor]


def projections(
    columns: int = R, gates: int = 0, diagonal: bool = False, dtype: torch.dtype = torch.float32
) -> list[Any]:
    """Three frozen linears, the second with a bias; gates are columns of one tensor, as a router makes them."""
    all_gates = uniform(B, T, 1 + len(OUTS) * max(gates, 1), seed=5)
    return [
        ops.Projection(
            weight=normal(out, D, seed=10 + m, dtype=dtype, scale=0.3),
            bias=normal(out, seed=20 + m, dtype=dtype) if m == 1 else None,
            A=normal(R, D, seed=30 + m, scale=0.5),
            B=normal(out, columns, seed=40 + m, scale=0.5),
            gate=all_gates[..., 1 + m * gates : 1 + (m + 1) * gates] if gates else None,
            diagonal=normal(columns, seed=50 + m) if diagonal else None,
        )
        for m, out in enumerate(OUTS)
    ]


def formula(x: torch.Tensor, given: Sequence[Any], kept: torch.Tensor | float = 1.0) -> list[torch.Tensor]:
    """x W^T + b + (dropout(x) A^T * s) B^T of every projection, in the dtype of what is given."""
    found = []
    for p in given:
        columns = p.B.shape[1]
        strength: torch.Tensor | float = SCALE
        if p.gate is not None:
            strength = strength * p.gate.repeat_interleave(columns // p.gate.shape[-1], -1)
        if p.diagonal is not None:
            strength = strength * p.diagonal
        z = ((x * kept) @ p.A.T).repeat(1, 1, columns // p.A.shape[0])
        y = x @ p.weight.T + (0 if p.bias is None else p.bias)
        found.append(y + (z * strength) @ p.B.T)
    return found


def with_gradients(given: Sequence[Any], trained: Sequence[str], wide: bool) -> tuple[list[Any], Tensors]:
    """Copies of the projections (float64 if asked) whose `trained` tensors are leaves, and these by name."""
    leaves: Tensors = {}
    copies = []
    for m, projection in enumerate(given):
        fields = {}
        for name, value in vars(projection).items():
            own = value
            if isinstance(value, torch.Tensor):
                own = value.detach().double() if wide else value.detach()
                if name in trained:
                    leaves[f"{name}{m}"] = own.requires_grad_()
            fields[name] = own
        copies.append(ops.Projection(**fields))
    return copies, leaves


def run(
    call: Callable[..., Sequence[torch.Tensor]],
    x: torch.Tensor,
    given: Sequence[Any],
    trained: Sequence[str],
    dys: Sequence[torch.Tensor],
    wide: bool,
) -> tuple[list[torch.Tensor], Tensors]:
    copies, leaves = with_gradients(given, trained, wide)
    x = (x.double() if wide else x).detach().requires_grad_()
    ys = call(x, copies)
    found = torch.autograd.grad(ys, [x, *leaves.values()], [dy.to(y.dtype) for dy, y in zip(dys, ys, strict=True)])
    return list(ys), dict(zip(["x", *leaves], found, strict=True))


def compare(
    given: Sequence[Any],
    tolerance: float,
    x: torch.Tensor | None = None,
    dys: Sequence[torch.Tensor] | None = None,
    trained: Sequence[str] = NAMES,
) -> None:
    dtype = given[0].weight.dtype
    x = normal(B, T, D, seed=2, dtype=dtype) if x is None else x
    dys = [normal(B, T, out, seed=60 + m, dtype=dtype) for m, out in enumerate(OUTS)] if dys is None else dys
    ys, found = run(lambda x, p: ops.grouped_lora(x, p, SCALE, 0.0), x, given, trained, dys, wide=False)
    ys64, found64 = run(formula, x, given, trained, dys, wide=True)
    for y, y64 in zip(ys, ys64, strict=True):
        assert y.dtype == dtype
        assert error(y, y64) < tolerance
    assert found.keys() == found64.keys()
    for name, gradient in found.items():
        assert error(gradient, found64[name]) < tolerance, name


SETTINGS: dict[str, dict[str, Any]] = {
    "always on": {},
    "gated": {"gates": 1},
    "gated diagonal": {"gates": 1, "diagonal": True},
    "diagonal": {"diagonal": True},
    "an expert a rank": {"gates": R},
    "four experts on one A": {"columns": 4 * R, "gates": 4},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_outputs_and_all_gradients(name: str) -> None:
    compare(projections(**SETTINGS[name]), 2e-6)


@pytest.mark.parametrize("name", ["gated", "four experts on one A"])
def test_gates_without_gradient(name: str) -> None:
    """The centroid router: the same gradients, made in fewer launches."""
    compare(projections(**SETTINGS[name]), 2e-6, trained=("A", "B"))


@pytest.mark.parametrize("name", ["gated", "an expert a rank"])
def test_one_decision_for_a_sequence(name: str) -> None:
    given = projections(**SETTINGS[name])
    for projection in given:
        projection.gate = projection.gate[:, :1]
    compare(given, 2e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision(dtype: torch.dtype) -> None:
    compare(projections(gates=1, dtype=dtype), 2 * TOLERANCE[dtype])


def test_an_output_that_nobody_uses() -> None:
    """Its gradient is zero, not undefined."""
    x, (given, leaves) = normal(B, T, D, seed=2), with_gradients(projections(gates=1), ("A", "B"), wide=False)
    y, _, _ = ops.grouped_lora(x, given, SCALE, 0.0)
    found = dict(zip(leaves, torch.autograd.grad(y.square().sum(), list(leaves.values())), strict=True))
    for name, gradient in found.items():
        assert gradient.ne(0).any() == name.endswith("0"), name


# tensors whose entries do not lie where a kernel that counts rows and columns would look for them
STRANGE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "columns of a wider tensor": lambda t: torch.cat([t, torch.full_like(t, 9.0)], -1)[..., : t.shape[-1]],
    "transposed": lambda t: t.movedim(-1, 0).contiguous().movedim(0, -1),
    "every other token": lambda t: t.repeat_interleave(2, 1)[:, ::2],
}


@pytest.mark.parametrize("layout", STRANGE)
def test_an_input_that_is_not_contiguous(layout: str) -> None:
    compare(projections(gates=1), 2e-6, x=STRANGE[layout](normal(B, T, D, seed=2)))


@pytest.mark.parametrize("layout", STRANGE)
def test_output_gradients_that_are_not_contiguous(layout: str) -> None:
    dys = [STRANGE[layout](normal(B, T, out, seed=60 + m)) for m, out in enumerate(OUTS)]
    compare(projections(gates=1), 2e-6, dys=dys)


def test_the_gradient_of_a_sum() -> None:
    """One number for each output, expanded."""
    dys = [torch.full((), 0.3 + m, device=DEVICE).expand(B, T, out) for m, out in enumerate(OUTS)]
    compare(projections(gates=1), 2e-6, dys=dys)


@pytest.mark.parametrize("trained", [("A", "B"), ("B",)], ids=["trained A", "frozen A"])
def test_backward_makes_the_mask_of_forward_again(trained: tuple[str, ...]) -> None:
    """One mask for the low-rank updates of all, none on the frozen product."""
    p, x = 0.4, normal(B, T, D, seed=2)
    given, dys = projections(gates=1), [normal(B, T, out, seed=60 + m) for m, out in enumerate(OUTS)]
    torch.manual_seed(3)
    ys, found = run(lambda x, q: ops.grouped_lora(x, q, SCALE, p), x, given, trained, dys, wide=False)
    torch.manual_seed(3)
    seed = torch.randint(2**31, (), device=DEVICE)
    kept = reference.keep_mask(torch.Size((B, T, D)), seed, p).double() / (1 - p)
    ys64, found64 = run(lambda x, q: formula(x, q, kept), x, given, trained, dys, wide=True)
    assert 0 < int((kept == 0).sum()) < kept.numel()
    for y, y64 in zip(ys, ys64, strict=True):
        assert error(y, y64) < 2e-6
    for name, gradient in found.items():
        assert error(gradient, found64[name]) < 2e-6, name


@pytest.mark.parametrize("trained", [True, False], ids=["trained A", "frozen A"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_what_is_kept_for_backward(trained: bool, dropout: float) -> None:
    """The input once where A is trained and never where it is frozen; no output, no mask."""
    x = normal(8, T, D, seed=2).requires_grad_()
    given, _ = with_gradients(projections(), ("A", "B") if trained else ("B",), wide=False)
    parameters = {value.data_ptr() for p in given for value in vars(p).values() if value is not None}
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in parameters:
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        ops.grouped_lora(x, given, SCALE, dropout)
    thin, seed = 8 * T * R * len(OUTS), [1] if dropout else []  # z of all, and what the mask is made from
    assert sorted(tensor.numel() for tensor in kept) == sorted([*seed, thin, *([x.numel()] if trained else [])])
    assert all(tensor.data_ptr() == x.data_ptr() for tensor in kept if tensor.numel() == x.numel())


def test_an_input_without_gradient() -> None:
    x, (given, leaves) = normal(B, T, D, seed=2), with_gradients(projections(gates=1), ("A", "B"), wide=False)
    ys = ops.grouped_lora(x, given, SCALE, 0.0)
    torch.stack([y.square().sum() for y in ys]).sum().backward()
    with_x, leaves_with_x = with_gradients(projections(gates=1), ("A", "B"), wide=False)
    ys = ops.grouped_lora(x.clone().requires_grad_(), with_x, SCALE, 0.0)
    torch.stack([y.square().sum() for y in ys]).sum().backward()
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, leaves_with_x[name].grad), name  # type: ignore[arg-type]


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("with_x", [True, False])
@pytest.mark.parametrize("weights", ["apart", "together"])
def test_the_input_gradient_is_by_the_ranks_and_by_the_weights(weights: str, with_x: bool) -> None:
    """dx = dropout(dz A) + sum of dy W into memory that holds anything, narrow neighbours in one product or not."""
    outs, tokens = (products.NARROW_GRADIENT + 1, 6, 5), B * T
    dys = [normal(tokens, out, seed=m) for m, out in enumerate(outs)]
    weight, As = normal(sum(outs), D, seed=5), [normal(R, D, seed=6 + m) for m in range(3)]
    x, dz, mask = normal(tokens, D, seed=9), normal(tokens, 3 * R, seed=10), Dropout(torch.tensor(7).to(DEVICE), 0.4)
    frozen = [weight] if weights == "together" else list(weight.split(outs))
    kept = reference.keep_mask(x.shape, mask.seed, mask.p).double() / (1 - mask.p)
    ups = guarded(torch.arange(10.0).view(2, 5))
    given = dys, x if with_x else None, dz, ups, frozen, As, mask
    dx, sums = products.down_gradients(*given, with_dx=True)
    by_ranks = dz.double() @ torch.cat(As).double() * kept
    assert error(dx, by_ranks + torch.cat(dys, 1).double() @ weight.double()) < 1e-6
    assert torch.equal(sums[:5], ups.sum(0))
    assert sums.shape[0] == 5 + 3 * R * D * with_x
    if with_x:
        assert error(sums[5:].view(3 * R, D), dz.double().T @ (x.double() * kept)) < 1e-6
        no_dx, same = products.down_gradients(*given, with_dx=False)
        assert no_dx.numel() == 0
        assert torch.equal(same, sums)


def test_second_derivatives_are_refused() -> None:
    """They would be wrong without a word: the kernels have no graph."""
    x, (given, _) = normal(B, T, D, seed=2).requires_grad_(), with_gradients(projections(), ("A", "B"), wide=False)
    y = ops.grouped_lora(x, given, SCALE, 0.0)[0]
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        (dx.square().sum() + y.sum()).backward()


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [2, 8])
def test_an_update_before_the_product(
    rank: int, dtype: torch.dtype, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs that are wide enough for products of their own are those of one product, and of the formula."""
    case = Case(N=FEW_TOKENS + 1, D=20, outs=(24, 17), R=rank, G=1, diagonal=True, dropout=0.3, dtype=dtype)
    weight = guarded(normal(sum(case.outs), case.D, seed=80, dtype=dtype))
    frozen = ops.Frozen([weight], [normal(sum(case.outs), seed=81, dtype=dtype) if biased else None])
    together = products.outputs(case.x(), frozen, case.update(), dtype)
    monkeypatch.setattr(products, "WIDE_OUTPUT", min(case.outs))
    monkeypatch.setattr(products.lora, "down_up", None)  # the other way
    ys, z = products.outputs(case.x(), frozen, case.update(), dtype)
    assert torch.equal(z, together[1])
    assert z.dtype == dtype
    z64, strengths = (case.x().double() * case.kept()) @ torch.cat(case.downs()).double().T, case.strengths()
    for m, (W, bias, up) in enumerate(zip(*frozen.by_projection(case.outs), case.ups(), strict=True)):
        y = case.x().double() @ W.double().T + case.scaled(z64, strengths, m) @ up.double().T
        y = y if bias is None else y + bias.double()
        assert error(ys[m], y) < 2 * TOLERANCE[dtype]
        assert error(together[0][m], y) < 2 * TOLERANCE[dtype]


def test_what_is_kept_of_z() -> None:
    """Half of it, unless gates have a gradient: that is made of z itself."""
    assert products.kept_dtype(torch.empty(0, dtype=torch.bfloat16), gated=False) == torch.bfloat16
    assert products.kept_dtype(torch.empty(0, dtype=torch.bfloat16), gated=True) == torch.float32
