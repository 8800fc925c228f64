"""Half precision, casts after wrapping, autocast and a quantised base."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, TorchAoConfig

from monkeyjump.ops.dispatch import implementation
from tests.helpers import (
    ADAPTER_NAMES,
    adapted,
    adapter_tensors,
    assert_same,
    batches,
    centers,
    gradients,
    layers_of,
    lm_batch,
    mj_config,
    routing_state,
    tiny_llama,
    train_steps,
)

HALVES = [torch.bfloat16, torch.float16]


def assert_stored_in_fp32(model: PeftModel) -> None:
    assert {t.dtype for t in adapter_tensors(model).values()} == {torch.float32}
    floating = {v.dtype for v in routing_state(model).values() if v.is_floating_point()}
    assert floating == {torch.float32}


@pytest.mark.parametrize("adapter", ADAPTER_NAMES)
@pytest.mark.parametrize("dtype", HALVES, ids=["bf16", "fp16"])
def test_half_precision_models(adapter: str, dtype: torch.dtype) -> None:
    model = adapted(tiny_llama().to(dtype), adapter=adapter, ema_interval=1)
    assert_stored_in_fp32(model)
    before = centers(model)
    losses = train_steps(
        model, batches(2), torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    )
    assert all(torch.isfinite(torch.tensor(losses)))
    assert_stored_in_fp32(model)
    assert any(not torch.equal(before[k], v) for k, v in centers(model).items())
    with torch.no_grad():
        assert model.eval()(**lm_batch()).logits.dtype == dtype


@pytest.mark.parametrize("adapter", ADAPTER_NAMES)
def test_half_precision_is_close_to_single(adapter: str) -> None:
    with torch.no_grad():
        exact = adapted(adapter=adapter).eval()(**lm_batch()).logits
        rough = adapted(tiny_llama().bfloat16(), adapter=adapter).eval()(**lm_batch()).logits.float()
        base = tiny_llama()(**lm_batch()).logits
    scale = (exact - base).abs().mean()
    assert float((exact - rough).abs().mean()) < 0.25 * float(scale)  # far less than what the adapters do


@pytest.mark.parametrize("cast", [lambda m: m.to(torch.bfloat16), lambda m: m.bfloat16(), lambda m: m.half()])
def test_casting_after_wrapping_loses_nothing_of_the_adapter(cast: Any) -> None:
    model = adapted(ema_interval=1)
    before = {**adapter_tensors(model), **routing_state(model)}
    before = {k: v.clone() for k, v in before.items()}
    cast(model)
    assert_same(before, {**adapter_tensors(model), **routing_state(model)})
    assert {p.dtype for n, p in model.named_parameters() if "monkeyjump" not in n} == {model.dtype}
    assert model.dtype != torch.float32
    train_steps(model, batches(2))


def test_double_precision() -> None:
    """What gradient checks do: everything goes along to fp64."""
    model = adapted(ema_interval=1).double()
    with torch.no_grad():
        exact = model.eval()(**lm_batch()).logits
    assert exact.dtype == torch.float64
    train_steps(model, batches(2))
    with torch.no_grad():
        single = adapted().eval()(**lm_batch()).logits
    torch.testing.assert_close(exact.float(), single, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("adapter", ADAPTER_NAMES)
def test_autocast(adapter: str) -> None:
    """Gates and statistics are those of fp32 similarities; gradients arrive in fp32."""
    model = adapted(adapter=adapter, ema_interval=1).train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for batch in batches(2):
            output = model(**batch)
            output.loss.backward()
    assert_stored_in_fp32(model)
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
    first = adapted(adapter=adapter, ema_interval=1).train()
    second = adapted(adapter=adapter, ema_interval=1).train()
    first(**lm_batch())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        second(**lm_batch())
    a, b = routing_state(first), routing_state(second)
    block = {k: v for k, v in a.items() if "layers.0." in k}  # before it, nothing was rounded
    assert_same(block, {k: b[k] for k in block})


def test_adapter_dtype_option_of_peft_does_not_round_the_adapter() -> None:
    """PEFT's autocast_adapter_dtype=False keeps whatever dtype a tuner gives its adapters: fp32, on purpose."""
    from peft import get_peft_model

    model = get_peft_model(tiny_llama().bfloat16(), mj_config(), autocast_adapter_dtype=False)
    assert_stored_in_fp32(model)


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
@pytest.mark.parametrize("choice", ["torch", "triton"])
def test_an_int8_base(choice: str, tmp_path: Path) -> None:
    """A weight-only int8 base = the dequantised base with the same adapters; it trains, and stays as it is."""
    from torchao.quantization import Int8WeightOnlyConfig

    tiny_llama().save_pretrained(tmp_path)
    for adapter in (*ADAPTER_NAMES, "dora", "vera", "ia3") if choice == "torch" else ("lora",):
        quantised = AutoModelForCausalLM.from_pretrained(
            tmp_path, quantization_config=TorchAoConfig(quant_type=Int8WeightOnlyConfig())
        )
        plain = tiny_llama()
        weights = dict(quantised.named_parameters())
        with torch.no_grad():
            for name, parameter in plain.named_parameters():
                whole = getattr(weights[name], "dequantize", None) if "proj" in name else None
                parameter.copy_(weights[name] if whole is None else whole())
        original = tiny_llama().model.layers[0].self_attn.q_proj.weight
        assert (plain.model.layers[0].self_attn.q_proj.weight - original).abs().max() > 0  # it was quantised
        ours = adapted(quantised, adapter=adapter, ema_interval=1)
        reference = adapted(plain, adapter=adapter, ema_interval=1)
        assert all(layer.quantization_backend is not None for layer in layers_of(ours).values())
        with implementation(choice), torch.no_grad():
            a, b = ours.eval()(**lm_batch()).logits, reference.eval()(**lm_batch()).logits
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
        frozen = {k: v.dequantize().clone() for k, v in ours.named_parameters() if "q_proj.base_layer.weight" in k}
        with implementation(choice):
            for model in (ours, reference):
                train_steps(model, batches(2))
        assert_same(routing_state(ours), routing_state(reference), rtol=1e-2, atol=1e-2)
        found, expected = gradients(ours), gradients(reference)
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=0.02, atol=0.02 * float(gradient.abs().max()))
        assert_same(frozen, {k: v.dequantize() for k, v in ours.named_parameters() if k in frozen})
