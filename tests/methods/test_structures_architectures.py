"""MixLoRA's experts, MoRE's ranks and MoA's further experts on models that are not Llama."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import get_peft_model
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import monkeyjump as mj
from tests.helpers import REORDERED, disturb, gradients, layers_of, lm_batch, token_ids
from tests.methods.common import spread

SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def t5() -> T5ForConditionalGeneration:
    sizes: dict[str, Any] = {"vocab_size": 101, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    more: dict[str, Any] = {"dropout_rate": 0.0, "feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0}
    return T5ForConditionalGeneration(T5Config(**sizes, **more))


def bloom() -> BloomForCausalLM:
    sizes: dict[str, Any] = {"vocab_size": 101, "hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.2}
    return BloomForCausalLM(BloomConfig(**sizes, hidden_dropout=0.0, attention_dropout=0.0, pad_token_id=0))


MODELS: dict[str, tuple[Any, list[str], int]] = {
    # how to make it, targets, feed-forward projections per block
    "phi3": (lambda: Phi3ForCausalLM(Phi3Config(**SIZES)), ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"], 2),
    "gemma2": (lambda: Gemma2ForCausalLM(Gemma2Config(head_dim=8, **SIZES)), ALL, 3),
    "qwen3": (lambda: Qwen3ForCausalLM(Qwen3Config(head_dim=8, **SIZES)), ALL, 3),
    "t5": (t5, ["q", "v", "wi_0", "wi_1", "wo"], 3),
    "bloom": (bloom, ["query_key_value", "dense_h_to_4h", "dense_4h_to_h"], 2),  # its feed-forward adds the residual
}


def made(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return MODELS[name][0]().eval()


def check(name: str, config: mj.MonkeyJumpConfig, exact: bool = True) -> Any:
    """Identity at the start; away from it another output, and a gradient for everything that is trained."""
    batch = lm_batch()
    tasks = {"task_ids": torch.tensor([0, 1, 2])} if config.placement == "nested" else {}
    with torch.no_grad():
        expected = made(name)(**batch).logits
        model: Any = get_peft_model(made(name), config)
        start = model.eval()(**batch, **tasks).logits
        torch.testing.assert_close(start, expected, **({"rtol": 0, "atol": 0} if exact else REORDERED))
    disturb(model)
    spread(model)
    out = model.train()(**batch, **tasks)
    out.loss.backward()
    assert not torch.allclose(out.logits, expected, atol=1e-3)
    assert all(gradient.isfinite().all() for gradient in gradients(model).values())
    return model


@pytest.mark.parametrize("name", MODELS)
def test_mixlora(name: str) -> None:
    config = mj.methods.build("mixlora", target_modules=MODELS[name][1], r=2, experts=3, dropout=0.0, task_type=None)
    model = check(name, config, exact=False)  # repeated rows are another product
    inner = [path for path, layer in layers_of(model).items() if "default" in layer.routers]
    blocks = 4 if name == "t5" else 2
    assert len(inner) == blocks * MODELS[name][2]
    assert not any("att" in path.lower() for path in inner)


@pytest.mark.parametrize("name", MODELS)
def test_more(name: str) -> None:
    """T5's cross-attention reads the encoder's tokens, which no state of the decoder stands for: no task loss there."""
    weight = 0.0 if name == "t5" else 0.1
    settings: dict[str, Any] = {"target_modules": MODELS[name][1], "r": 2, "dropout": 0.0, "task_type": None}
    config = mj.methods.build("more", contrastive_weight=weight, **settings)
    check(name, config)


@pytest.mark.parametrize("name", ["gemma2", "qwen3"])
def test_moa(name: str) -> None:
    check(name, mj.methods.build("moa", r=2, dropout=0.0), exact=False)


@pytest.mark.parametrize("name", ["phi3", "t5"])
def test_moa_without_the_prompt(name: str) -> None:
    """The prompt needs separate q, k, v and o; the bottleneck needs only a feed-forward."""
    targets = [target for target in MODELS[name][1] if target not in ("q", "v")]
    settings: dict[str, Any] = {"target_modules": targets, "r": 2, "dropout": 0.0, "task_type": None}
    with pytest.raises(mj.ConfigError, match="asks for 'prompt'"):
        get_peft_model(made(name), mj.methods.build("moa", **settings))
    check(name, mj.methods.build("moa", extra_experts=["parallel"], **settings), exact=False)


def on_bloom() -> mj.MonkeyJumpConfig:
    return mj.methods.build("mixlora", target_modules=MODELS["bloom"][1], r=2, experts=3, dropout=0.0)


def test_a_feed_forward_that_adds_the_residual_itself() -> None:
    """BLOOM hands the residual to its feed-forward: every copy of a row gets its own, whatever the batch size."""
    model = check("bloom", on_bloom(), exact=False).eval()
    ids = token_ids(3, 6)
    with torch.no_grad():
        together = model(input_ids=ids).logits
        for row in range(3):
            torch.testing.assert_close(model(input_ids=ids[row : row + 1]).logits, together[row : row + 1], **REORDERED)


def test_an_adapter_after_the_last_was_deleted() -> None:
    """The hooks of the first adapter serve the second, once."""
    model: Any = get_peft_model(made("bloom"), on_bloom()).eval()
    model.delete_adapter("default")
    model.add_adapter("again", on_bloom())
    model.set_adapter("again")
    fresh: Any = get_peft_model(made("bloom"), on_bloom(), adapter_name="again").eval()
    for copy in (model, fresh):
        disturb(copy)
        spread(copy)
    with torch.no_grad():
        expected, found = fresh(**lm_batch()).logits, model(**lm_batch()).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
