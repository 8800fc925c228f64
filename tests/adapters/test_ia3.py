"""(IA)3: outputs scaled, inputs of feed-forward modules scaled, as in PEFT; stored as an offset from 1."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import IA3Config, PeftModel, get_peft_model
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import monkeyjump as mj
from monkeyjump.adapters import Ia3Adapter
from tests.adapters.peers import assert_equals_peft, assert_routed_by_hand, biased_llama
from tests.helpers import VOCAB, adapted, adapter_tensors, layers_of, mj_config, wrap

TARGETS = ["q_proj", "k_proj", "v_proj", "down_proj"]


def ia3(base: Any = None, **settings: Any) -> PeftModel:
    settings = {"target_modules": TARGETS, "shared_modules": None, **settings}
    model = adapted(base if base is not None else biased_llama(), adapter="ia3", **settings)
    with torch.no_grad():
        for tensor in adapter_tensors(model).values():
            tensor.mul_(20)
    return model


def peft_ia3(model: PeftModel, base: Any, targets: list[str], feedforward: list[str]) -> nn.Module:
    config = IA3Config(target_modules=[*targets, *feedforward], feedforward_modules=feedforward, task_type="CAUSAL_LM")
    if isinstance(base, GPT2LMHeadModel):
        config.fan_in_fan_out = True
    other = get_peft_model(base, config)
    own = layers_of(model)
    with torch.no_grad():
        for path, module in other.named_modules():
            if hasattr(module, "ia3_l"):
                offset: Any = own[path].monkeyjump_adapter["default"].ia3_offset
                module.ia3_l["default"].copy_((1 + offset).view_as(module.ia3_l["default"]))
    return other


def peft_name(name: str) -> str:
    return name.replace(".monkeyjump_adapter.default.ia3_offset", ".ia3_l.default")


def test_always_on_equals_peft() -> None:
    model = ia3(layers_to_route=[])
    assert_equals_peft(model, peft_ia3(model, biased_llama(), TARGETS, ["down_proj"]), peft_name)


def test_feedforward_modules_can_be_chosen() -> None:
    for chosen in ([], ["q_proj", "v_proj"]):
        model = ia3(layers_to_route=[], adapter_options={"feedforward_modules": chosen})
        assert_equals_peft(model, peft_ia3(model, biased_llama(), TARGETS, chosen), peft_name)


def tiny_gpt2() -> Any:
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": VOCAB}
    off = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, "bos_token_id": None, "eos_token_id": None}
    return GPT2LMHeadModel(GPT2Config(**sizes, **off, initializer_range=0.2)).eval()  # type: ignore[arg-type]


def test_transposed_weights_equal_peft_too() -> None:
    """GPT-2: Conv1D layers; by default only mlp.c_proj scales its input, the attention's c_proj its output."""
    targets = ["c_attn", "c_proj"]
    model = ia3(tiny_gpt2(), target_modules=targets, layers_to_route=[])
    assert_equals_peft(model, peft_ia3(model, tiny_gpt2(), targets, ["mlp.c_proj"]), peft_name)


def by_hand(adapter: Ia3Adapter, linear: nn.Linear, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    vector = 1 + gate * adapter.ia3_offset
    return linear(x) * vector if adapter.linear is None else linear(x * vector)


def test_routed_by_hand() -> None:
    model = ia3(target_modules=["q_proj", "v_proj", "down_proj", "gate_proj"], shared_modules=["gate_proj"])
    assert_routed_by_hand(model, by_hand)


def test_a_scaling_below_the_resolution_of_bf16_around_one_survives() -> None:
    adapter = Ia3Adapter(4, 4, mj_config(adapter="ia3"))
    with torch.no_grad():
        adapter.ia3_offset.fill_(1e-4)
    y = torch.ones(2, 4).bfloat16()
    delta = adapter.delta(y, y, None)
    assert delta.dtype == torch.bfloat16
    torch.testing.assert_close(delta.float(), torch.full((2, 4), 1e-4), rtol=1e-2, atol=0)


def test_weight_decay_pulls_towards_the_identity() -> None:
    model = wrap(biased_llama(), adapter="ia3", target_modules=TARGETS, shared_modules=None)
    for tensor in adapter_tensors(model).values():
        assert torch.all(tensor == 0)


@pytest.mark.parametrize("value", ["down_proj", [1]])
def test_bad_feedforward_modules(value: Any) -> None:
    with pytest.raises(mj.ConfigError, match="must be a list of module names"):
        mj_config(adapter="ia3", adapter_options={"feedforward_modules": value})
