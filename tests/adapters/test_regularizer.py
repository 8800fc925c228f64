"""AdaLoRA's orthogonality loss over all adapters of a model: its value, its gradients and its number of operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import get_peft_model
from torch import nn
from torch.profiler import ProfilerActivity, profile

import monkeyjump as mj
from monkeyjump.adapters.adalora import AdaLoraAdapter
from monkeyjump.tuner.training.regularizer import active_adapters, auxiliary_loss
from tests.helpers import disturb, mj_config, tiny_llama


def test_regularisers_of_many_adapters_are_those_of_each() -> None:
    """Two shapes and a mixture, in one model: the batched form against one adapter after the other."""
    for method in ("adalora", "moe_adalora"):
        config = mj.methods.build(method, preset="mj_paper", target_modules=["q_proj", "k_proj", "gate_proj"])
        model: Any = get_peft_model(tiny_llama(2), config).train()
        disturb(model)
        each = [adapter.auxiliary_loss() for _, adapter in active_adapters(model)]
        assert len(each) == 6
        found = auxiliary_loss(model.base_model.model)
        assert found is not None
        torch.testing.assert_close(found, AdaLoraAdapter.option("orth_reg_weight", config) * torch.stack(each).mean())  # type: ignore[arg-type]


def defects_one_by_one(adapter: Any) -> torch.Tensor:
    """The regulariser of one adapter, expert after expert, from its definition."""
    ranks = adapter.A.shape[0] // adapter.experts
    eye = torch.eye(ranks, dtype=adapter.A.dtype)
    terms = []
    for start in range(0, adapter.A.shape[0], ranks):
        A, B = adapter.A[start : start + ranks], adapter.B[:, start : start + ranks]
        terms += [(A @ A.T - eye).norm(), (B.T @ B - eye).norm()]
    return torch.stack(terms).mean()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("method", ["adalora", "moe_adalora"])
def test_gradients_of_the_regulariser_are_those_of_its_definition(method: str, autocast: bool) -> None:
    """Shapes of q, k and gate differ; a loss scale arrives as the gradient of the loss; autocast does not round it."""
    config = mj.methods.build(method, preset="mj_paper", target_modules=["q_proj", "k_proj", "gate_proj"])
    model: Any = get_peft_model(tiny_llama(2), config).train()
    disturb(model)
    adapters: list[Any] = [adapter for _, adapter in active_adapters(model)]
    factors = [factor for adapter in adapters for factor in (adapter.A, adapter.B)]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = auxiliary_loss(model.base_model.model)
    assert found is not None
    gradients = torch.autograd.grad(1024 * found, factors)
    expected = (
        AdaLoraAdapter.option("orth_reg_weight", config)
        * torch.stack([defects_one_by_one(adapter) for adapter in adapters]).mean()
    )
    torch.testing.assert_close(found, expected)
    for one, other in zip(gradients, torch.autograd.grad(1024 * expected, factors), strict=True):
        assert one.stride() == other.stride()
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_the_regulariser_takes_as_many_operations_for_many_layers() -> None:
    """But for views, and the sum with the gradient of the language loss, which autograd makes tensor by tensor."""
    counts = []
    for layers in (1, 6):
        config = mj.methods.build("adalora", preset="mj_paper", target_modules=["q_proj", "k_proj"])
        model: Any = get_peft_model(tiny_llama(layers), config).train()
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            loss = auxiliary_loss(model.base_model.model)
            assert loss is not None
            loss.backward()
        work = ("aten::bmm", "aten::baddbmm", "aten::cat", "aten::add", "aten::mul", "aten::div", "aten::copy_")
        counts.append({event.key: event.count for event in recorded.key_averages() if event.key in work})
    assert counts[0] == counts[1]


def test_the_regulariser_can_be_differentiated_twice() -> None:
    adapter: Any = AdaLoraAdapter(7, 5, mj_config(adapter="adalora", r=3)).double()
    nn.init.normal_(adapter.A)
    nn.init.normal_(adapter.B)

    def loss(A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(_Regulariser(adapter), {"adapter.A": A, "adapter.B": B}, ())

    assert torch.autograd.gradgradcheck(loss, (adapter.A, adapter.B))


class _Regulariser(nn.Module):
    def __init__(self, adapter: Any) -> None:
        super().__init__()
        self.adapter = adapter

    def forward(self) -> torch.Tensor:
        return self.adapter.auxiliary_loss()
