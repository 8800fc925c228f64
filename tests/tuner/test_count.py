"""Parameter counts against the numbers of the paper, on the real shapes, without allocating a weight."""

from __future__ import annotations

import pytest
import torch
from peft import get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

import monkeyjump as mj
from tests.helpers import adapted, tiny_llama, wrap


def qwen2_half_billion() -> PreTrainedModel:
    return Qwen2ForCausalLM(
        Qwen2Config(
            hidden_size=896,
            intermediate_size=4864,
            num_hidden_layers=24,
            num_attention_heads=14,
            num_key_value_heads=2,
            vocab_size=151936,
        )
    )


def llama3_8b() -> PreTrainedModel:
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            vocab_size=128256,
        )
    )


ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
GOLDEN = {
    ("qwen2", "lora"): 270_336,
    ("qwen2", "lora_fa"): 98_304,
    ("qwen2", "adalora"): 270_528,
    ("qwen2", "propulsion"): 49_152,
    ("llama3", "lora"): 2_883_584,
    ("llama3", "lora_fa"): 1_572_864,
    ("llama3", "adalora"): 2_883_904,
    ("llama3", "propulsion"): 786_432,
}


@pytest.mark.parametrize(("shape", "adapter"), GOLDEN)
@pytest.mark.parametrize("shared", [None, ["o_proj"]], ids=["all routed", "o shared"])
def test_golden_counts(shape: str, adapter: str, shared: list[str] | None) -> None:
    targets = ATTENTION if shape == "qwen2" else [*ATTENTION, "gate_proj"]
    config = mj.MonkeyJumpConfig(adapter=adapter, r=2, target_modules=targets, shared_modules=shared)
    with torch.device("meta"):
        model = get_peft_model(qwen2_half_billion() if shape == "qwen2" else llama3_8b(), config)
    count = mj.count_parameters(model)
    assert count.trainable == GOLDEN[shape, adapter]
    assert count.router == 0
    assert all(p.is_meta for p in model.parameters())


def test_a_model_made_on_meta_and_wrapped_afterwards_counts_the_same() -> None:
    with torch.device("meta"):
        base = qwen2_half_billion()
    model = get_peft_model(base, mj.MonkeyJumpConfig(target_modules=ATTENTION, center_init="random"))
    assert mj.count_parameters(model).trainable == 270_336


def test_total_and_buffers() -> None:
    base = tiny_llama()
    before = sum(p.numel() for p in base.parameters())
    count = mj.count_parameters(wrap(base, r=3))
    assert count.total == before + count.trainable
    # per routed projection: centre and staged sum (32 each), count and step
    assert count.buffers == 2 * 3 * (32 + 32 + 1 + 1)


def test_the_frozen_factor_of_lora_fa_is_a_buffer_not_a_parameter() -> None:
    model = adapted(adapter="lora_fa", r=2)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained
    assert all(name.endswith(".B") for name in trained)
    assert mj.count_parameters(model).buffers == 2 * 3 * (32 + 32 + 1 + 1) + 2 * 5 * 2 * 32


def test_count_prints_for_people() -> None:
    text = str(mj.count_parameters(wrap(tiny_llama())))
    assert "router 0" in text
    assert "trainable" in text
