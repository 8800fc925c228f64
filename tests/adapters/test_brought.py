"""What every adapter owes, for those beyond the paper's four: identity, padding, checkpointing, saving, merging."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict

import monkeyjump as mj
from tests.adapters.peers import biased_llama
from tests.helpers import (
    adapted,
    adapter_tensors,
    assert_same,
    batches,
    gradients,
    layers_of,
    lm_batch,
    padded,
    routing_state,
    tiny_llama,
    token_ids,
    train_steps,
    wrap,
)

# down_proj: its input is not the hidden state, and (IA)3 scales it there
CASES: dict[str, dict[str, Any]] = {
    name: {
        "adapter": name,
        "r": 4,
        "target_modules": ["q_proj", "v_proj", "o_proj", "down_proj", "gate_proj"],
        "shared_modules": ["gate_proj", "o_proj"],
    }
    for name in ("dora", "vera", "ia3")
}
every = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


@every
def test_identity_at_the_start(case: dict[str, Any]) -> None:
    base = biased_llama()
    with torch.no_grad():
        expected = base(**lm_batch()).logits
        assert torch.equal(wrap(base, **case)(**lm_batch()).logits, expected)


@every
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(case: dict[str, Any], side: str) -> None:
    model = adapted(biased_llama(), **case).eval()
    rows = [token_ids(1, length, seed=length)[0] for length in (5, 9)]
    mask = padded([torch.ones_like(row) for row in rows], side, 11)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    with torch.no_grad():
        together = model(input_ids=padded(rows, side, 11), attention_mask=mask, position_ids=positions).logits
        for row, logits, real in zip(rows, together, mask.bool(), strict=True):
            torch.testing.assert_close(logits[real], model(input_ids=row[None]).logits[0], rtol=1e-4, atol=2e-5)


@every
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_changes_nothing(case: dict[str, Any], reentrant: bool) -> None:
    found = []
    for checkpointing in (False, True):
        model = adapted(biased_llama(), dropout=0.3, ema_interval=1, **case)
        model.config.use_cache = False  # as checkpointing does
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        torch.manual_seed(5)
        train_steps(model, batches(3))
        found.append((gradients(model), routing_state(model)))
    assert_same(found[0][0], found[1][0], rtol=1e-5, atol=1e-6)
    assert_same(found[0][1], found[1][1])


@every
def test_saved_is_loaded_bit_for_bit_and_trains_on(case: dict[str, Any], tmp_path: Path) -> None:
    model = adapted(biased_llama(), ema_interval=1, **case)
    train_steps(model, batches(2))
    model.save_pretrained(str(tmp_path))
    loaded = PeftModel.from_pretrained(biased_llama(), tmp_path, is_trainable=True)
    assert_same(adapter_tensors(model), adapter_tensors(loaded))
    assert_same(routing_state(model), routing_state(loaded))
    model.zero_grad()
    for candidate in (model, loaded):
        train_steps(candidate, batches(2))
    assert_same(gradients(model), gradients(loaded))
    with torch.no_grad():
        assert torch.equal(model.eval()(**lm_batch()).logits, loaded.eval()(**lm_batch()).logits)


@every
def test_always_on_is_merged_and_routed_refuses(case: dict[str, Any]) -> None:
    model = adapted(biased_llama(), layers_to_route=[], **case)
    with torch.no_grad():
        before = model(**lm_batch()).logits
        torch.testing.assert_close(model.merge_and_unload()(**lm_batch()).logits, before, rtol=1e-4, atol=2e-5)
    with pytest.raises(ValueError, match="is routed"):
        adapted(biased_llama(), **case).merge_adapter()


@every
def test_in_bf16_parameters_stay_fp32_and_deltas_have_the_dtype_of_the_base(case: dict[str, Any]) -> None:
    model = adapted(biased_llama(), **case).bfloat16()
    assert {tensor.dtype for tensor in adapter_tensors(model).values()} == {torch.float32}
    for layer in layers_of(model).values():
        adapter: Any = layer.monkeyjump_adapter["default"]
        x = torch.randn(2, 3, layer.in_features).bfloat16()
        for gate in (None, torch.rand(2, 3, 1)):
            assert adapter.delta(x, layer.base_layer(x), gate).dtype == torch.bfloat16
    exact = adapted(biased_llama(), **case)
    with torch.no_grad():
        rounded, full = model(**lm_batch()).logits, exact(**lm_batch()).logits
    assert rounded.dtype == torch.bfloat16
    assert float((rounded.float() - full).norm() / full.norm()) < 0.1
    model.train()(**lm_batch()).loss.backward()
    assert all(torch.isfinite(gradient).all() for gradient in gradients(model).values())


@every
def test_the_gate_has_a_gradient_for_a_learned_router(case: dict[str, Any]) -> None:
    """delta is linear in the gate, so its derivative is the delta of gate 1."""
    model = adapted(biased_llama(), **case)
    for layer in layers_of(model).values():
        adapter: Any = layer.monkeyjump_adapter["default"]
        x = torch.randn(2, 3, layer.in_features)
        base = layer.base_layer(x)
        gate = torch.rand(2, 3, 1, requires_grad=True)
        whole = adapter.delta(x, base, None)
        torch.testing.assert_close(adapter.delta(x, base, gate), gate * whole, rtol=1e-3, atol=1e-5)
        assert torch.count_nonzero(adapter.delta(x, base, torch.zeros(2, 3, 1))) == 0
        (gradient,) = torch.autograd.grad(adapter.delta(x, base, gate).sum(), gate)
        torch.testing.assert_close(gradient.squeeze(-1), whole.sum(-1), rtol=1e-3, atol=1e-4)


@every
@pytest.mark.parametrize("router", ["linear", "sigmoid"])
def test_learned_routers_learn(case: dict[str, Any], router: str) -> None:
    model = adapted(biased_llama(), router=router, **case).train()
    model(**lm_batch()).loss.backward()
    routers = {name: value for name, value in gradients(model).items() if "monkeyjump_router" in name}
    assert routers
    assert all(gradient.abs().max() > 0 for gradient in routers.values())


@every
def test_cached_generation_is_the_full_forward(case: dict[str, Any]) -> None:
    model = adapted(biased_llama(), **case).eval()
    ids = token_ids(2, 6)
    cached, full = (
        model.generate(input_ids=ids, max_new_tokens=5, do_sample=False, use_cache=use, pad_token_id=0)
        for use in (True, False)
    )
    assert torch.equal(cached, full)


@every
def test_centres_can_be_initialised_and_parameters_counted(case: dict[str, Any]) -> None:
    model = wrap(biased_llama(), **{**case, "center_init": "kmeans"})
    mj.initialize_centers(model, [lm_batch(seed=i) for i in range(4)], num_tokens=64, progress=False)
    count = mj.count_parameters(model)
    assert count.trainable == sum(p.numel() for p in model.parameters() if p.requires_grad)


@every
@pytest.mark.parametrize("other", ["lora", "propulsion", "dora", "vera", "ia3"])
def test_tensors_of_another_kind_are_refused(case: dict[str, Any], other: str) -> None:
    """No two kinds call their tensors alike, so none is ever taken for the other."""
    if other == case["adapter"]:
        return
    model = adapted(biased_llama(), **case)
    before = adapter_tensors(model)
    with pytest.raises(mj.ConfigError, match="cannot be loaded"):
        set_peft_model_state_dict(
            model, get_peft_model_state_dict(adapted(biased_llama(), **{**case, "adapter": other}))
        )
    assert_same(adapter_tensors(model), before)


@every
def test_compiled_without_a_graph_break(case: dict[str, Any]) -> None:
    """VeRA derives its matrices in the first forward, which must not be the compiled one."""
    few = {"target_modules": ["q_proj", "v_proj", "down_proj"], "shared_modules": ["down_proj"]}  # quick to trace
    model = adapted(tiny_llama(1), **{**case, **few}).train()
    batch = {"input_ids": lm_batch()["input_ids"]}
    expected = model(**batch).logits
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(**batch).logits, expected)
