"""`mj.route`: PEFT's own LoRA layers, trained or not, become a Monkey Jump adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from transformers import LlamaForSequenceClassification

import monkeyjump as mj
from tests.equivalence.test_peft_lora import as_lora_names
from tests.helpers import (
    SHARED,
    TARGETS,
    assert_same,
    batches,
    gradients,
    layers_of,
    lm_batch,
    routed_layers,
    routing_state,
    tiny_llama,
    token_ids,
    train_steps,
)


def lora_model(base: Any = None, seed: int = 1, adapter_name: str = "default", **settings: Any) -> Any:
    """PEFT's LoRA as after a training: no factor is zero."""
    config = LoraConfig(**{"r": 3, "lora_alpha": 5, "target_modules": TARGETS, "task_type": "CAUSAL_LM", **settings})
    model = get_peft_model(base if base is not None else tiny_llama(), config, adapter_name=adapter_name)
    disturb_lora(model, seed)
    return model.eval()


@torch.no_grad()
def disturb_lora(model: torch.nn.Module, seed: int = 1) -> None:
    for name, parameter in sorted(model.named_parameters()):
        if "lora_" in name or "modules_to_save" in name:
            generator = torch.Generator().manual_seed(seed * 7919 + sum(map(ord, name)))
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))


def base_weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if ".lora_" not in name}


SCALES: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "dropout": {"lora_dropout": 0.3},
    "some layers": {"layers_to_transform": [1]},
    "pattern": {"target_modules": r".*\.(q_proj|v_proj|gate_proj)"},
    "excluded": {"exclude_modules": ["model.layers.0.self_attn.k_proj"]},
    "all-linear": {"target_modules": "all-linear"},
    "equal patterns": {"rank_pattern": {"q_proj": 3}, "alpha_pattern": {"v_proj": 5}},
}


@pytest.mark.parametrize("settings", SCALES.values(), ids=SCALES.keys())
def test_none_routed_equals_the_peft_model(settings: dict[str, Any]) -> None:
    """Outputs and every gradient, up to fp32 rounding: PEFT scales after B, we before it."""
    found = []
    for routed in (False, True):
        model = lora_model(**settings)
        if routed:
            model = mj.route(model, layers_to_route=[])
        model.train()
        torch.manual_seed(3)  # the same dropout masks
        output = model(**lm_batch())
        output.loss.backward()
        found.append((output.logits.detach(), gradients(model)))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-5, atol=1e-5)
    assert_same(found[0][1], as_lora_names(found[1][1]), rtol=1e-4, atol=1e-5)


def test_a_power_of_two_as_scale_is_the_peft_model_to_the_last_bit() -> None:
    with torch.no_grad():
        expected = lora_model(r=2, lora_alpha=4)(**lm_batch()).logits
        routed = mj.route(lora_model(r=2, lora_alpha=4), layers_to_route=[])
        assert torch.equal(routed(**lm_batch()).logits, expected)


def test_routed_carries_the_same_factors_and_leaves_the_base_alone() -> None:
    lora = lora_model()
    before = {name.replace(".base_layer", ""): value for name, value in base_weights(lora).items()}
    factors = {name: p.detach().clone() for name, p in lora.named_parameters() if ".lora_" in name}
    model = mj.route(lora, shared_modules=SHARED, top_k=1, temperature=0.5, center_init="random_normalized")
    assert sorted(path.rpartition(".")[2] for path in routed_layers(model)) == sorted(
        ["q_proj", "k_proj", "v_proj"] * 2
    )
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    assert_same(factors, as_lora_names(trained))
    after = {
        name.replace(".base_layer", ""): p.detach() for name, p in model.named_parameters() if "monkeyjump_" not in name
    }
    assert_same(before, after)
    config: Any = model.peft_config["default"]
    assert (config.top_k, config.temperature, config.r, config.alpha, config.dropout) == (1, 0.5, 3, 5, 0.0)
    assert set(config.target_modules) == set(TARGETS)
    assert not any("lora_" in name for name, _ in model.named_parameters())


def test_everything_else_works_unchanged(tmp_path: Path) -> None:
    model = mj.route(lora_model(), shared_modules=SHARED, ema_interval=1)
    mj.initialize_centers(model, [lm_batch(seed=i) for i in range(4)], num_tokens=64, progress=False)
    started = routing_state(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    train_steps(model, batches(3), optimizer)
    moved = routing_state(model)
    assert any(not torch.equal(started[key], moved[key]) for key in started if "center" in key)
    model.eval().save_pretrained(str(tmp_path))
    loaded = PeftModel.from_pretrained(tiny_llama(), tmp_path)
    assert_same(routing_state(loaded), moved)
    with torch.no_grad():
        assert torch.equal(loaded(**lm_batch()).logits, model(**lm_batch()).logits)
    ids = token_ids(2, 6)
    answers = [
        candidate.generate(input_ids=ids, max_new_tokens=4, do_sample=False, use_cache=cache, pad_token_id=0)
        for candidate in (model, loaded)
        for cache in (True, False)
    ]
    assert all(torch.equal(answer, answers[0]) for answer in answers)


def test_a_loaded_adapter_is_frozen_unless_asked(tmp_path: Path) -> None:
    lora_model().save_pretrained(str(tmp_path))
    for trainable in (False, True):
        lora = PeftModel.from_pretrained(tiny_llama(), tmp_path)
        changes: dict[str, Any] = {"inference_mode": False} if trainable else {}
        with torch.no_grad():
            expected = lora(**lm_batch()).logits
        model = mj.route(lora, layers_to_route=[], **changes)
        assert any(p.requires_grad for p in model.parameters()) == trainable
        with torch.no_grad():
            torch.testing.assert_close(model(**lm_batch()).logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("granularity", ["token", "sequence"])
def test_the_mean_gate_can_be_one(top_k: int, granularity: str) -> None:
    settings: dict[str, Any] = {
        "shared_modules": SHARED,
        "top_k": top_k,
        "center_init": "random_normalized",
        "mean_gate": 1.0,
    }
    model = mj.route(lora_model(), **settings, granularity=granularity)
    with torch.no_grad(), mj.record_routing(model) as trace:
        model(**lm_batch())
        for block in trace.blocks():
            gates = trace.gates(block)
            torch.testing.assert_close(gates.mean(-1), torch.ones_like(gates[..., 0]))
            assert torch.all((gates > 0).sum(-1) == top_k)


def test_a_very_high_temperature_and_mean_gate_one_is_the_lora_model() -> None:
    """All gates 1: the routed model is the one it was made from."""
    with torch.no_grad():
        expected = lora_model()(**lm_batch()).logits
        settings: dict[str, Any] = {
            "top_k": 3,
            "temperature": 1e6,
            "mean_gate": 1.0,
            "center_init": "random_normalized",
        }
        model = mj.route(lora_model(), shared_modules=SHARED, **settings)
        torch.testing.assert_close(model(**lm_batch()).logits, expected, rtol=1e-4, atol=1e-4)


def test_alpha_rescales() -> None:
    model: Any = mj.route(lora_model(), layers_to_route=[], alpha=10.0)
    assert {layer.monkeyjump_adapter["default"].scaling for layer in layers_of(model).values()} == {10 / 3}


def two_adapters() -> Any:
    model = lora_model(adapter_name="first")
    model.add_adapter("second", LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj", "v_proj"]))
    disturb_lora(model, seed=4)
    return model


def test_the_named_adapter_is_routed() -> None:
    lora = two_adapters()
    lora.set_adapter("second")
    with torch.no_grad():
        expected = lora(**lm_batch()).logits
    lora.set_adapter("first")
    model = mj.route(lora, "second", layers_to_route=[])
    assert list(model.peft_config) == ["second"]
    assert {path.rpartition(".")[2] for path in layers_of(model)} == {"q_proj", "v_proj"}
    with torch.no_grad():
        torch.testing.assert_close(model(**lm_batch()).logits, expected, rtol=1e-5, atol=1e-5)


def test_a_trained_head_comes_along(tmp_path: Path) -> None:
    def classifier() -> Any:
        torch.manual_seed(0)
        return LlamaForSequenceClassification(tiny_llama().config).eval()

    ids = {"input_ids": token_ids()}
    lora = lora_model(classifier(), task_type="SEQ_CLS")
    with torch.no_grad():
        expected = lora(**ids).logits
        model = mj.route(lora, layers_to_route=[])
        torch.testing.assert_close(model(**ids).logits, expected, rtol=1e-5, atol=1e-5)
        model.save_pretrained(str(tmp_path))
        loaded = PeftModel.from_pretrained(classifier(), tmp_path)
        assert torch.equal(loaded(**ids).logits, model(**ids).logits)


BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "dora": ({"use_dora": True}, {}, "carries the LoRA variant Dora"),
    "ranks": ({"rank_pattern": {"q_proj": 7}}, {}, "do not have one r: .*7 in 'model.layers.0.self_attn.q_proj'"),
    "scales": ({"alpha_pattern": {"v_proj": 9}}, {}, "do not have one alpha: .*9 in"),
    "bias": ({"bias": "lora_only"}, {}, "bias='lora_only' trains biases"),
    "pissa": ({"init_lora_weights": "pissa"}, {}, "init_lora_weights='pissa' changed the base"),
    "embedding": ({"target_modules": ["embed_tokens", "q_proj"]}, {}, "'model.embed_tokens' is a Embedding"),
    "unknown": ({}, {"topk": 1}, "'topk' is no setting of MonkeyJumpConfig. Did you mean 'top_k'"),
    "fixed": ({}, {"r": 4}, "'r' cannot be set: the rank is"),
    "too many": ({}, {"top_k": 9}, "top_k=9 is larger than the 5"),
    "not there": ({}, {"shared_modules": ["up_proj"]}, "shared_modules names 'up_proj'"),
    "value": ({}, {"temperature": 0}, "temperature=0 must be"),
}


@pytest.mark.parametrize(("lora", "settings", "message"), BAD.values(), ids=BAD.keys())
def test_what_cannot_be_routed_is_said_and_nothing_is_changed(
    lora: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    model = lora_model(**lora)
    with torch.no_grad():
        expected = model(**lm_batch()).logits
    names = [name for name, _ in model.named_parameters()]
    with pytest.raises(mj.ConfigError, match=message):
        mj.route(model, **settings)
    assert [name for name, _ in model.named_parameters()] == names
    with torch.no_grad():
        assert torch.equal(model(**lm_batch()).logits, expected)


def test_an_error_in_the_middle_puts_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = lora_model()
    with torch.no_grad():
        expected = model(**lm_batch()).logits
    trained = {name: p.requires_grad for name, p in model.named_parameters()}

    def fail(*_: Any) -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setattr("monkeyjump.tuner.from_lora._fill", fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        mj.route(model, shared_modules=SHARED, center_init="random_normalized")
    monkeypatch.undo()
    assert {name: p.requires_grad for name, p in model.named_parameters()} == trained
    with torch.no_grad():
        assert torch.equal(model(**lm_batch()).logits, expected)
    model.train()(**lm_batch()).loss.backward()
    assert len(gradients(model)) == 20
    assert isinstance(mj.route(model, layers_to_route=[]), PeftModel)


def test_merged_layers_other_tuners_and_unclear_names_are_refused() -> None:
    merged = lora_model()
    merged.merge_adapter()
    with pytest.raises(mj.ConfigError, match=r"is merged with \['default'\].*unmerge_adapter"):
        mj.route(merged, layers_to_route=[])
    with pytest.raises(mj.ConfigError, match="not a LlamaForCausalLM"):
        mj.route(tiny_llama())
    ia3: Any = get_peft_model(tiny_llama(), IA3Config(target_modules=["k_proj"], feedforward_modules=[]))
    with pytest.raises(mj.ConfigError, match="not a IA3Model"):
        mj.route(ia3)
    both = two_adapters()
    with pytest.raises(mj.ConfigError, match=r"no adapter 'secnd'.*Did you mean 'second'"):
        mj.route(both, "secnd")
    both.base_model.set_adapter(["first", "second"])
    with pytest.raises(mj.ConfigError, match="2 adapters are active"):
        mj.route(both)
