"""What a method cannot do: one message that names the cause and the fix, before anything is changed."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

import monkeyjump as mj
from tests.helpers import TARGETS, lm_batch, mj_config, tiny_llama, wrap
from tests.methods.common import fresh

MIXTURE: dict[str, Any] = {"placement": "projection", "router": "linear"}
VALUES: list[tuple[dict[str, Any], str]] = [
    ({"placement": "blok"}, "Did you mean 'block'"),
    ({"placement": "projection"}, "set router='linear'"),
    ({**MIXTURE, "experts": 0}, "experts=0 must be an integer >= 1"),
    ({**MIXTURE, "experts": []}, "must be an integer >= 1, or a list"),
    ({**MIXTURE, "experts": 3, "top_k": 4}, "use top_k=3 or fewer"),
    ({**MIXTURE, "experts": [2, 4], "top_k": 3}, "exceeds the 2 experts of some block"),
    ({**MIXTURE, "granularity": "sequence"}, "use granularity='token'"),
    ({**MIXTURE, "adapter": "adalora", "share_A": True}, "share_A=True needs"),
    ({"share_A": True}, "share_A=True needs"),
    ({**MIXTURE, "top_k": None, "aux_loss_weight": 0.1}, "nothing to balance"),
    ({**MIXTURE, "experts": [2, 3], "lb_reduce": "global"}, "use 'mean' or 'sum'"),
    ({**MIXTURE, "aux_loss_weight": -1}, "0 switches the loss off"),
    ({**MIXTURE, "threshold": 0.5}, "router='sigmoid'"),
    ({"router": "sigmoid", "threshold": 2.0}, "must be in \\(0, 1\\]"),
    ({"top_k": None}, "needs a learned router"),
    ({"router": "sigmoid", "aux_loss_weight": 0.1}, "balances router='linear', not router='sigmoid'"),
    ({"aux_loss_weight": 0.1}, "needs router='linear' or router='sigmoid', not router='centroid'"),
    ({"contrastive_weight": 0.1}, "placement='projection'"),
    ({"router": "linear", "router_init": "zeros"}, "choose one of normal, kaiming"),
    ({"placement": "nested", "task_width": 0}, "task_width=0"),
]


@pytest.mark.parametrize(("settings", "message"), VALUES)
def test_values(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(mj.ConfigError, match=message):
        mj_config(shared_modules=None, **settings)


def test_options_in_a_dict_are_overrides_too() -> None:
    config = mj.methods.build("moelora", method_options={"aux_loss_weight": 0.5}, lb_norm="mixtral")
    assert config.method_options == {"aux_loss_weight": 0.5, "lb_norm": "mixtral"}


def test_top_k_above_the_experts_of_some_block() -> None:
    with pytest.raises(mj.ConfigError, match="exceeds the 2 experts of some block"):
        mj.methods.build("mola", top_k=3)
    with pytest.raises(mj.ConfigError, match="larger than the 5 routed projection"):
        wrap(tiny_llama(), mj_config(shared_modules=None, router="linear", top_k=6))


def test_more_parts_than_blocks() -> None:
    with pytest.raises(mj.ConfigError, match="at most one number per block"):
        wrap(tiny_llama(2), mj.methods.build("mola"))
    excluded = mj.methods.build("mola", target_modules=["q_proj"], exclude_modules=["q_proj"])
    with pytest.raises(ValueError, match="No modules were targeted"):  # that is the fault, not the number of blocks
        wrap(tiny_llama(2), excluded)


@pytest.mark.parametrize("method", mj.methods.names())
def test_targets_the_model_does_not_have(method: str) -> None:
    config = GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, bos_token_id=None, eos_token_id=None)
    base = GPT2LMHeadModel(config)
    with pytest.raises(mj.ConfigError, match=r"names 'q_proj', which no module of the model has|feed-forward"):
        wrap(base, mj.methods.build(method, "mj_paper"))
    assert not [name for name, _ in base.named_modules() if "monkeyjump" in name]


@pytest.mark.parametrize("method", ["moelora", "moa", "mixlora", "more"])
def test_targets_outside_a_block_or_not_linear(method: str) -> None:
    for target, message in (("lm_head", "is in no block"), ("embed_tokens", "only linear layers")):
        config = mj.methods.build(method, "mj_paper", target_modules=[*TARGETS, target])
        with pytest.raises(mj.ConfigError, match=message):
            wrap(tiny_llama(), config)


def test_cross_attention_has_no_mask_to_balance_with() -> None:
    base = T5ForConditionalGeneration(T5Config(vocab_size=11, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2))
    settings: dict[str, Any] = {"target_modules": ["k", "v"], "shared_modules": None, "task_type": "SEQ_2_SEQ_LM"}
    with pytest.raises(mj.ConfigError, match="EncDecAttention"):
        wrap(base, mj_config(**settings, **MIXTURE, aux_loss_weight=0.1))
    wrap(base, mj_config(**settings, **MIXTURE))  # each projection routes by its own input


@pytest.mark.parametrize("method", ["more", "mjlora_task"])
def test_task_routed_methods_need_task_ids(method: str) -> None:
    with pytest.raises(mj.ConfigError, match="task_ids"):
        fresh(method).train()(**lm_batch())


def test_unknown_methods_and_settings() -> None:
    with pytest.raises(mj.ConfigError, match="Did you mean 'moelora'"):
        mj.methods.build("moelra")
    with pytest.raises(mj.ConfigError, match="Did you mean 'experts'"):
        mj.methods.build("moelora", expert=3)
    with pytest.raises(mj.ConfigError, match="published, mj_paper"):
        mj.methods.build("moelora", "paper")
