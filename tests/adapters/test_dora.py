"""DoRA: gate 1 is PEFT's, gate 0 is the base, and the start is the identity in every dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

from monkeyjump.adapters import DoraAdapter
from monkeyjump.ops import reference as ops
from tests.adapters.peers import assert_equals_peft, assert_routed_by_hand, biased_llama
from tests.helpers import TARGETS, adapted, adapter_tensors, layers_of, lm_batch, wrap

R, ALPHA = 3, 5


def dora(dtype: torch.dtype = torch.float32, **settings: Any) -> PeftModel:
    model = adapted(biased_llama(dtype), adapter="dora", r=R, alpha=ALPHA, **settings)
    with torch.no_grad():  # magnitudes well away from the base's
        for name, tensor in adapter_tensors(model).items():
            if name.endswith("offset"):
                tensor.mul_(20)
    return model


def peft_dora(model: PeftModel, dropout: float = 0.0, dtype: torch.dtype = torch.float32) -> nn.Module:
    config = LoraConfig(
        r=R, lora_alpha=ALPHA, lora_dropout=dropout, target_modules=TARGETS, use_dora=True, task_type="CAUSAL_LM"
    )
    other = get_peft_model(biased_llama(dtype), config)
    own = layers_of(model)
    with torch.no_grad():
        for path, module in other.named_modules():
            if hasattr(module, "lora_A") and "default" in module.lora_A:
                adapter: Any = own[path].monkeyjump_adapter["default"]
                module.lora_A["default"].weight.copy_(adapter.A)
                module.lora_B["default"].weight.copy_(adapter.B)
                norm = own[path].get_base_weight().float().norm(dim=1)
                module.lora_magnitude_vector["default"].weight.copy_(norm + adapter.magnitude_offset)
    return other


def peft_name(name: str) -> str:
    path, _, tensor = name.rpartition(".monkeyjump_adapter.default.")
    return f"{path}.{'lora_magnitude_vector' if tensor == 'magnitude_offset' else f'lora_{tensor}'}.default.weight"


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_always_on_equals_peft(dropout: float) -> None:
    model = dora(layers_to_route=[], dropout=dropout)
    assert_equals_peft(model, peft_dora(model, dropout), peft_name)


def test_bf16_base_agrees_with_peft_to_the_rounding_of_its_norm() -> None:
    model = dora(torch.bfloat16, layers_to_route=[])
    other = peft_dora(model, dtype=torch.bfloat16)
    with torch.no_grad():
        ours, theirs = model(**lm_batch()).logits, other(**lm_batch()).logits
    assert ours.dtype == torch.bfloat16
    assert float((ours - theirs).float().norm() / theirs.float().norm()) < 0.05


def by_hand(adapter: DoraAdapter, linear: nn.Linear, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """A straight line between the frozen weight and the decomposed one."""
    direction = linear.weight + adapter.scaling * adapter.B @ adapter.A
    magnitude = linear.weight.norm(dim=1) + adapter.magnitude_offset
    decomposed = (magnitude / direction.norm(dim=1)).unsqueeze(1) * direction
    return (1 - gate) * (x @ linear.weight.T) + gate * (x @ decomposed.T) + linear.bias


def test_routed_is_a_line_between_two_weights() -> None:
    assert_routed_by_hand(dora(), by_hand)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_identity_in_every_dtype_also_after_a_cast(dtype: torch.dtype) -> None:
    base = biased_llama()
    model = wrap(base, adapter="dora").to(dtype)
    with torch.no_grad():
        logits = model(**lm_batch()).logits
        with model.disable_adapter():
            assert torch.equal(logits, model(**lm_batch()).logits)


def test_the_norm_is_a_constant_for_the_gradient_but_follows_the_factors() -> None:
    weight, A, B = torch.randn(7, 5), torch.randn(2, 5), torch.randn(7, 2)
    own, both = ops.row_norms(weight, A, B)
    torch.testing.assert_close(own, weight.norm(dim=1))
    torch.testing.assert_close(both, (weight + B @ A).norm(dim=1))
    same, zero = ops.row_norms(weight, A, torch.zeros_like(B))
    assert torch.equal(same, zero)
    # B A = -W: the norm vanishes without turning into NaN
    _, gone = ops.row_norms(weight[:, :2], torch.eye(2), -weight[:, :2])
    assert torch.isfinite(gone).all()
    assert float(gone.max()) < 1e-2


def test_a_row_of_zeros_stays_zero() -> None:
    base = biased_llama()
    with torch.no_grad():
        base.model.layers[0].self_attn.q_proj.weight[3] = 0
    model = wrap(base, adapter="dora", layers_to_route=[])
    model.train()
    loss = model(**lm_batch()).loss
    loss.backward()
    assert torch.isfinite(loss)


def test_weight_decay_pulls_towards_the_magnitude_of_the_base() -> None:
    model = dora(layers_to_route=[])
    adapter: Any = next(iter(layers_of(model).values())).monkeyjump_adapter["default"]
    start = adapter.magnitude_offset.detach().clone()
    optimizer = torch.optim.AdamW([adapter.magnitude_offset], lr=1e-2, weight_decay=1.0)
    adapter.magnitude_offset.grad = torch.zeros_like(adapter.magnitude_offset)
    for _ in range(100):
        optimizer.step()
    torch.testing.assert_close(adapter.magnitude_offset.detach(), start * 0.99**100, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("routed", [True, False])
def test_gradients_by_finite_differences(routed: bool) -> None:
    """Of everything but the norm, which is a constant for the gradient: A and B are left out of the comparison."""
    layer = next(iter(layers_of(dora(torch.float64)).values()))
    adapter: Any = layer.monkeyjump_adapter["default"].double()
    x = torch.randn(3, layer.in_features, dtype=torch.float64, requires_grad=True)
    base = torch.randn(3, layer.out_features, dtype=torch.float64, requires_grad=True)
    gate = torch.rand(3, 1, dtype=torch.float64, requires_grad=True) if routed else None

    def call(x: torch.Tensor, base: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return adapter(x, base, base, gate)

    wanted = [x, base, adapter.magnitude_offset, *([] if gate is None else [gate])]
    assert torch.autograd.gradcheck(call, wanted, atol=1e-6)
