"""Parameter counts against the numbers of the paper, on the real shapes, without allocating a weight."""

from __future__ import annotations

import pytest
import torch
from peft import get_peft_model

import monkeyjump as mj
from monkeyjump.bench.variants import empty_model
from tests.helpers import adapted, tiny_llama, wrap

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
GOLDEN = {"lora": 270_336, "lora_fa": 98_304, "adalora": 270_528, "propulsion": 49_152}  # Qwen2-0.5B, 24 blocks


@pytest.mark.parametrize("adapter", GOLDEN)
@pytest.mark.parametrize("shared", [None, ["o_proj"]], ids=["all routed", "o shared"])
def test_golden_counts(adapter: str, shared: list[str] | None) -> None:
    """Llama-3-8B and the methods' own settings: `tests/methods/test_counts.py`."""
    config = mj.MonkeyJumpConfig(adapter=adapter, r=2, target_modules=ATTENTION, shared_modules=shared)
    with torch.device("meta"):
        model = get_peft_model(empty_model("qwen2-0.5b", layers=1), config)
    count = mj.count_parameters(model)
    assert 24 * count.trainable == GOLDEN[adapter]
    assert count.router == 0
    assert all(p.is_meta for p in model.parameters())


def test_a_model_made_on_meta_and_wrapped_afterwards_counts_the_same() -> None:
    base = empty_model("qwen2-0.5b", layers=1)
    model = get_peft_model(base, mj.MonkeyJumpConfig(target_modules=ATTENTION, center_init="random"))
    assert 24 * mj.count_parameters(model).trainable == GOLDEN["lora"]


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
