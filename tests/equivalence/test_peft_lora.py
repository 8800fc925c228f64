"""An adapter that is always on, or the only expert of its block, is PEFT's own LoRA: outputs and all gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from tests.helpers import TARGETS, adapted, gradients, layers_of, lm_batch, tiny_llama

R, ALPHA = 3, 5


def peft_lora(model: PeftModel, targets: list[str], dropout: float, dtype: torch.dtype) -> PeftModel:
    """PEFT's LoRA on the same base weights with the A and B of `model`."""
    config = LoraConfig(r=R, lora_alpha=ALPHA, lora_dropout=dropout, target_modules=targets, task_type="CAUSAL_LM")
    other = get_peft_model(tiny_llama().to(dtype), config)
    own = layers_of(model)
    with torch.no_grad():
        for path, module in other.named_modules():
            if hasattr(module, "lora_A") and "default" in module.lora_A:
                adapter: Any = own[path].monkeyjump_adapter["default"]
                module.lora_A["default"].weight.copy_(adapter.A)
                module.lora_B["default"].weight.copy_(adapter.B)
    assert isinstance(other, PeftModel)
    return other


def as_lora_names(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`...monkeyjump_adapter.default.A` -> `...lora_A.default.weight`."""
    renamed = {}
    for name, value in found.items():
        path, _, factor = name.rpartition(".monkeyjump_adapter.default.")
        renamed[f"{path}.lora_{factor}.default.weight"] = value
    return renamed


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(
    "settings",
    [
        {"layers_to_route": [], "shared_modules": None},
        {"layers_to_route": [], "shared_modules": list(TARGETS)},
        {"layers_to_route": []},
        # One routed projection: softmax over one expert is exactly 1.
        {"target_modules": ["v_proj"], "shared_modules": None, "top_k": 1},
        {"target_modules": ["v_proj", "gate_proj"], "shared_modules": ["gate_proj"], "top_k": 1, "renormalize": True},
        {
            "target_modules": ["v_proj"],
            "shared_modules": None,
            "top_k": 1,
            "granularity": "sequence",
            "similarity": "l1",
        },
    ],
    ids=["none routed", "all shared", "default, none routed", "one expert", "one expert and a shared", "one, sequence"],
)
def test_outputs_and_gradients_equal_peft_lora(settings: dict[str, Any], dropout: float) -> None:
    model = adapted(r=R, alpha=ALPHA, dropout=dropout, **settings)
    other = peft_lora(model, settings.get("target_modules", TARGETS), dropout, torch.float32)
    batch = lm_batch()
    batch["attention_mask"][1, :3] = 0
    results = []
    for candidate in (model, other):
        candidate.train()
        torch.manual_seed(3)  # both draw the same dropout masks
        output = candidate(**batch)
        output.loss.backward()
        results.append((output.logits.detach(), gradients(candidate)))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-4, atol=1e-5)
    ours, theirs = as_lora_names(results[0][1]), results[1][1]
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert gradient.abs().max() > 0
        torch.testing.assert_close(ours[name], gradient, rtol=1e-3, atol=1e-6)


def test_bf16_base_agrees_to_the_last_rounding() -> None:
    """PEFT adds the delta in fp32 and rounds; ours rounds the delta first: one bf16 rounding apart."""
    model = adapted(tiny_llama().bfloat16(), r=R, alpha=ALPHA, layers_to_route=[])
    other = peft_lora(model, TARGETS, 0.0, torch.bfloat16)
    with torch.no_grad():
        a, b = model(**lm_batch()).logits, other(**lm_batch()).logits
    assert a.dtype == torch.bfloat16
    torch.testing.assert_close(a, b, rtol=0.05, atol=0.2)


def test_always_on_can_be_merged_and_equals_itself() -> None:
    model = adapted(r=R, layers_to_route=[])
    batch = lm_batch()
    with torch.no_grad():
        before = model(**batch).logits
        merged = model.merge_and_unload()
        torch.testing.assert_close(merged(**batch).logits, before, rtol=1e-4, atol=1e-5)
