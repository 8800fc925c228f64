# PEFT types its models as unions of tensors and modules; tests look inside.
# mypy: disable-error-code="arg-type, attr-defined, union-attr"
"""Targets that are not named work wherever PEFT's LoRA has defaults: what cannot be routed is always on."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from peft import PeftModel, get_peft_model
from torch import nn

import monkeyjump as mj
from monkeyjump.errors import MonkeyJumpWarning
from tests.helpers import ROUTED, TARGETS, disturb, layers_of, routed_layers, tiny_llama, token_ids

SIZES: dict[str, Any] = {
    **{"vocab_size": 101, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"intermediate_size": 48, "max_position_embeddings": 64, "pad_token_id": 0},
}
BART = {f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")}

MODELS: dict[str, Callable[[], hf.PreTrainedModel]] = {
    "llama": tiny_llama,
    "gpt_bigcode": lambda: hf.GPTBigCodeForCausalLM(
        hf.GPTBigCodeConfig(vocab_size=101, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    ),
    "gpt_neox": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**SIZES)),
    "bloom": lambda: hf.BloomForCausalLM(hf.BloomConfig(vocab_size=101, hidden_size=32, n_layer=2, n_head=4)),
    "deberta": lambda: hf.DebertaModel(hf.DebertaConfig(**SIZES)),
    "bert": lambda: hf.BertModel(hf.BertConfig(**SIZES)),
    "t5": lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=101, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    ),
    "bart": lambda: hf.BartForConditionalGeneration(
        hf.BartConfig(vocab_size=101, d_model=32, **BART, encoder_ffn_dim=48, decoder_ffn_dim=48)
    ),
    "opt": lambda: hf.OPTForCausalLM(hf.OPTConfig(**{**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32})),
}
# architecture -> (settings, what the warning says, the shared modules that are filled in)
FITTED: dict[str, tuple[dict[str, Any], str, list[str] | None]] = {
    "gpt_bigcode": ({}, r"\['c_attn'\] \(alone in its block\), so nothing is routed", None),
    "gpt_neox": ({}, r"\['query_key_value'\] \(alone in its block\), so nothing is routed", None),
    "bloom": ({}, r"\['query_key_value'\] \(alone in its block\), so nothing is routed", None),
    "deberta": ({}, r"\['in_proj'\] \(alone in its block\), so nothing is routed", None),
    "t5": ({}, r"\['EncDecAttention.k', 'EncDecAttention.v'\] \(reads the encoder's tokens\)",
           ["EncDecAttention.k", "EncDecAttention.v"]),
    "bart": ({}, r"\['encoder_attn.v_proj'\] \(reads the encoder's tokens\)", ["encoder_attn.v_proj"]),
    "bert": ({"target_modules": "all-linear"}, r"\['pooler.dense'\] \(in no block\)", ["pooler.dense"]),
    "opt": ({"top_k": 3}, r"top_k is 2 instead of 3", None),
}  # fmt: skip


def made(name: str) -> Any:
    torch.manual_seed(0)
    return MODELS[name]().eval()


def settings(**changes: Any) -> mj.MonkeyJumpConfig:
    return mj.MonkeyJumpConfig(dropout=0.0, center_init="random_normalized", **changes)


def output(model: nn.Module) -> torch.Tensor:
    encoder_decoder = getattr(model.config, "is_encoder_decoder", False)
    extra = {"decoder_input_ids": token_ids(2, 5, seed=1)} if encoder_decoder else {}
    with torch.no_grad():
        return model(input_ids=token_ids(2, 6), **extra)[0]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # by DeBERTa and GPT-BigCode, when imported
@pytest.mark.parametrize("name", FITTED)
def test_what_cannot_be_routed_is_always_on_and_told_once(name: str, tmp_path: Path) -> None:
    changes, said, shared = FITTED[name]
    config, base = settings(**changes), made(name)
    with pytest.warns(UserWarning, match="target_modules is not a list") as caught:
        model = get_peft_model(base, config)
    told = [str(warning.message) for warning in caught if issubclass(warning.category, MonkeyJumpWarning)]
    assert len(told) == 1
    assert re.search(said, told[0]), told[0]
    assert config.shared_modules == shared
    routed = set(routed_layers(model))
    assert bool(routed) == (config.layers_to_route != [])
    assert len(routed) < len(layers_of(model)) or name == "opt"
    assert torch.equal(output(model.eval()), output(made(name)))
    disturb(model)
    model.save_pretrained(str(tmp_path))
    again = PeftModel.from_pretrained(made(name), tmp_path)  # without a warning, which would be an error here
    assert set(routed_layers(again)) == routed
    assert torch.equal(output(again.eval()), output(model))


def test_the_defaults_are_those_of_the_paper(tmp_path: Path) -> None:
    """q, k and v are routed, o and gate are shared; an empty list of shared modules routes all five."""
    config = settings()
    model = get_peft_model(tiny_llama(), config)
    assert {path.rpartition(".")[2] for path in routed_layers(model)} == set(ROUTED)
    assert {path.rpartition(".")[2] for path in layers_of(model)} == set(TARGETS)
    assert config.shared_modules == ["o_proj", "gate_proj"]
    model.save_pretrained(str(tmp_path))
    loaded = PeftModel.from_pretrained(tiny_llama(), tmp_path)
    assert loaded.peft_config["default"].shared_modules == ["o_proj", "gate_proj"]
    assert len(routed_layers(get_peft_model(tiny_llama(), settings(shared_modules=[])))) == 10
    assert len(routed_layers(get_peft_model(tiny_llama(), settings(exclude_modules=["o_proj"])))) == 6


def test_listed_targets_and_older_files_route_all_of_them(tmp_path: Path) -> None:
    """An adapter that was saved when nothing was shared by default lists its targets, and goes on routing all."""
    model = get_peft_model(tiny_llama(), settings(target_modules=list(TARGETS)))
    assert len(routed_layers(model)) == 10
    model.save_pretrained(str(tmp_path))
    again = PeftModel.from_pretrained(tiny_llama(), tmp_path)
    assert again.peft_config["default"].shared_modules is None
    assert len(routed_layers(again)) == 10


@pytest.mark.parametrize(("name", "shared"), [("llama", ["o_proj", "gate_proj"]), ("opt", None)])
def test_a_preset_without_targets_takes_those_of_the_model(name: str, shared: list[str] | None) -> None:
    config = mj.methods.build("mjlora", target_modules=None, center_init="random_normalized")
    get_peft_model(made(name), config)
    assert config.shared_modules == shared


@pytest.mark.parametrize("method", ["moelora", "moa", "mixlora"])
def test_other_routers_share_nothing_by_default(method: str) -> None:
    config = mj.methods.build(method, preset="mj_paper", target_modules=None, dropout=0.0)
    model = get_peft_model(tiny_llama(), config)
    assert config.shared_modules is None
    assert len(routed_layers(model)) == 10


def test_feed_forward_experts_where_the_feed_forward_is_no_module() -> None:
    config = mj.methods.build("mixlora", target_modules="all-linear", r=2, experts=3, dropout=0.0)
    with pytest.warns(UserWarning, match=r"\['fc1', 'fc2'\] \(in a feed-forward that is no module of its own\)"):
        model = get_peft_model(made("opt"), config)
    assert config.shared_modules == ["fc1", "fc2"]
    assert not routed_layers(model)
    assert torch.equal(output(model.eval()), output(made("opt")))


@pytest.mark.parametrize("name", ["llama", "bert"])
@pytest.mark.filterwarnings("ignore:target_modules is not a list")
def test_a_second_adapter_on_all_linear_layers(name: str) -> None:
    """It goes where the first one is, whether it has the same configuration or one of its own."""
    config = settings(target_modules="all-linear")
    model = get_peft_model(made(name), config)
    model.add_adapter("same", config)
    model.add_adapter("own", settings(target_modules="all-linear", r=4))
    for path, layer in layers_of(model).items():
        assert set(layer.monkeyjump_adapter) == {"default", "same", "own"}, path
        assert set(layer.routers) in ({"default", "same", "own"}, set()), path
    assert not any(path.endswith("lm_head") for path in layers_of(model))
    alone = get_peft_model(made(name), settings(target_modules="all-linear", r=4), adapter_name="own")
    assert {key for key in model.state_dict() if ".own" in key} == {key for key in alone.state_dict() if ".own" in key}
