"""The chunked loss of a frozen head equals F.cross_entropy, in value and gradient, and holds no [N, V] tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from monkeyjump.ops.linear_cross_entropy import IGNORE, linear_cross_entropy

N, D, V = 37, 16, 101


def problem(dtype: torch.dtype = torch.float32, bias: bool = False, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, D, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(V, D, generator=generator).to(dtype)
    targets = torch.randint(0, V, (N,), generator=generator)
    targets[torch.rand(N, generator=generator) < 0.4] = IGNORE
    return (
        hidden,
        weight,
        targets,
        torch.randn(V, generator=generator).to(dtype) if bias else torch.zeros(V, dtype=dtype),
    )


def ordinary(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, bias: torch.Tensor, divisor: Any
) -> torch.Tensor:
    logits = F.linear(hidden, weight, bias).float()
    if divisor is None:
        return F.cross_entropy(logits, targets, ignore_index=IGNORE)
    return F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum") / divisor


@pytest.mark.parametrize("rows", [1, 5, 36, 37, 1000])
@pytest.mark.parametrize("divisor", [None, 50, torch.tensor(17)], ids=["mean", "number", "tensor"])
@pytest.mark.parametrize("bias", [False, True])
def test_value_and_gradient(rows: int, divisor: Any, bias: bool) -> None:
    hidden, weight, targets, b = problem(bias=bias)
    expected = ordinary(hidden, weight, targets, b, divisor)
    (expected_grad,) = torch.autograd.grad(3 * expected, hidden)
    loss = linear_cross_entropy(hidden, weight, targets, b if bias else None, divisor=divisor, chunk_elements=rows * V)
    (grad,) = torch.autograd.grad(3 * loss, hidden)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    # sums of V numbers cancel: what their order changes is a part of the largest entry, not of a small one
    order = 2.0**-24 * V**0.5 * float(expected_grad.abs().max())
    torch.testing.assert_close(grad, expected_grad, rtol=1e-5, atol=order)
    assert (grad[targets == IGNORE] == 0).all()


def test_bf16_is_no_further_from_the_truth_than_the_ordinary_path() -> None:
    hidden, weight, targets, bias = problem(torch.bfloat16)
    exact = hidden.detach().double().requires_grad_()
    (truth,) = torch.autograd.grad(ordinary(exact, weight.double(), targets, bias.double(), 7), exact)
    errors = []
    for loss in (
        ordinary(hidden, weight, targets, bias, 7),
        linear_cross_entropy(hidden, weight, targets, divisor=7, chunk_elements=8 * V),
    ):
        assert loss.dtype == torch.float32
        (grad,) = torch.autograd.grad(loss, hidden)
        assert grad.dtype == torch.bfloat16
        errors.append(float((grad.double() - truth).norm() / truth.norm()))
    assert errors[1] <= 1.1 * errors[0] < 0.05


def test_without_gradients_none_is_computed() -> None:
    hidden, weight, targets, bias = problem()
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, targets)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, ordinary(hidden, weight, targets, bias, None).detach())


def test_extreme_logits_stay_finite() -> None:
    hidden, weight, targets, bias = problem()
    large = (hidden.detach() * 1e4).requires_grad_()
    loss = linear_cross_entropy(large, weight, targets)
    (grad,) = torch.autograd.grad(loss, large)
    assert torch.isfinite(loss)
    assert torch.isfinite(grad).all()
    torch.testing.assert_close(loss, ordinary(large, weight, targets, bias, None))


class Largest(TorchDispatchMode):
    """The most elements any tensor had."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def test_no_tensor_is_larger_than_a_chunk() -> None:
    hidden, weight, targets, bias = problem()
    with Largest() as fused:
        linear_cross_entropy(hidden, weight, targets, chunk_elements=4 * V).backward()
    with Largest() as usual:
        ordinary(hidden, weight, targets, bias, None).backward()
    assert usual.elements == N * V
    assert fused.elements == max(4 * V, V * D, N * D)


def test_a_trained_head_is_refused() -> None:
    hidden, weight, targets, _ = problem()
    with pytest.raises(ValueError, match="must be frozen"):
        linear_cross_entropy(hidden, weight.requires_grad_(), targets)
