"""Gradient checkpointing on = off: gradients, staged statistics and centres, over several optimiser steps.

Neither run has a key-value cache, which checkpointing switches off: keys and values would lie elsewhere in memory, and
products of them may add up in another order.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

import monkeyjump as mj
from tests.helpers import (
    VOCAB,
    adapted,
    assert_same,
    batches,
    disturb,
    gradients,
    lm_batch,
    routing_state,
    tiny_llama,
    wrap,
)

KINDS = [{"use_reentrant": True}, {"use_reentrant": False}]
PARTLY = {"every_n_layers": 2}  # what Transformers offers beside them from 5.23 on
MODES: list[dict[str, Any]] = [
    {"granularity": "token", "ema_interval": 1},
    {"granularity": "token", "ema_interval": 2, "dropout": 0.3, "jitter": 0.3},
    {"granularity": "token", "ema_interval": 1, "adapter": "lora_fa", "dropout": 0.3},
    {"granularity": "sequence", "ema_interval": 1},
    {"granularity": "task"},
]


def run(mode: dict[str, Any], kind: dict[str, Any] | None, steps: int = 4) -> tuple[list[dict], list[dict], PeftModel]:
    model = adapted(tiny_llama(3, use_cache=False), **mode)
    if kind is PARTLY:
        base: Any = model.get_base_model()
        base.activation_checkpointing_enable(**PARTLY)
        assert [block.gradient_checkpointing for block in base.model.layers] == [True, False, True]
    elif kind is not None:
        model.gradient_checkpointing_enable(kind)
        model.enable_input_require_grads()  # reentrant checkpointing needs an input with a gradient
    model.train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    found, states = [], []
    torch.manual_seed(5)
    for batch in batches(steps):
        batch["attention_mask"][0, :2] = 0
        if mode["granularity"] == "task":
            batch["task_ids"] = torch.tensor([2, 0, 1])
        model(**batch).loss.backward()
        found.append(gradients(model))
        states.append(routing_state(model))
        optimizer.step()
        optimizer.zero_grad()
    return found, states, model


@pytest.mark.parametrize("mode", MODES, ids=["token", "token dropout jitter", "lora_fa", "sequence", "task"])
@pytest.mark.parametrize("kind", [*KINDS, PARTLY], ids=["reentrant", "non-reentrant", "every second block"])
def test_on_equals_off(mode: dict[str, Any], kind: dict[str, Any]) -> None:
    if kind is PARTLY and not hasattr(PreTrainedModel, "activation_checkpointing_enable"):
        pytest.skip("before Transformers 5.23")
    plain_gradients, plain_states, _ = run(mode, None)
    gradients_, states, model = run(mode, kind)
    assert model.get_base_model().is_gradient_checkpointing
    for a, b in zip(plain_gradients, gradients_, strict=True):
        assert_same(a, b, rtol=1e-5, atol=1e-7)
    for a, b in zip(plain_states, states, strict=True):
        assert_same(a, b)
    if mode["granularity"] != "task":
        centres = [{k: v for k, v in state.items() if "center" in k} for state in states]
        assert any(not torch.equal(centres[0][k], centres[-1][k]) for k in centres[0])


@pytest.mark.parametrize("kind", KINDS, ids=["reentrant", "non-reentrant"])
def test_a_forward_with_adapters_off_between_forward_and_backward(kind: dict[str, bool]) -> None:
    """What preference trainers do: the reference model is the same model with its adapters disabled."""
    results = []
    for checkpointing in (False, True):
        model = adapted(tiny_llama(3, use_cache=False), granularity="sequence", ema_interval=1)
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable(kind)
            model.enable_input_require_grads()
        loss = model(**lm_batch(seed=1, prompt=2)).loss
        with torch.no_grad(), model.disable_adapter():
            model(**lm_batch(seed=2, prompt=5))
        loss.backward()
        results.append((gradients(model), routing_state(model)))
    assert_same(results[0][0], results[1][0], rtol=1e-5, atol=1e-7)
    assert_same(results[0][1], results[1][1])


@pytest.mark.parametrize("kind", KINDS, ids=["reentrant", "non-reentrant"])
def test_two_forwards_before_one_backward(kind: dict[str, bool]) -> None:
    """Siamese losses: both recomputations must see the mask, the prompt and the centres of their own forward."""
    results = []
    for checkpointing in (False, True):
        model = adapted(tiny_llama(3, use_cache=False), granularity="sequence", ema_interval=1)
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable(kind)
            model.enable_input_require_grads()
        first = model(**lm_batch(seed=1, prompt=2)).loss
        second = model(**lm_batch(seed=2, prompt=5)).loss
        (first - 0.5 * second).backward()
        results.append((gradients(model), routing_state(model)))
    assert_same(results[0][0], results[1][0], rtol=1e-5, atol=1e-7)
    assert_same(results[0][1], results[1][1])


def noisy_gpt2() -> GPT2LMHeadModel:
    """A model that drops out embeddings, attention and residuals, so that what enters a block is drawn anew."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "initializer_range": 0.2}
    sizes["use_cache"] = False
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3))  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["mjlora", "moelora", "mixlora"])
@pytest.mark.parametrize("kind", KINDS, ids=["reentrant", "non-reentrant"])
def test_a_model_with_dropout_of_its_own(kind: dict[str, bool], method: str) -> None:
    """From the same seed both runs route alike: a recomputation draws the numbers of its forward."""
    targets = ["c_attn", "c_proj", "c_fc"]
    settings: dict[str, Any] = {"r": 2, "dropout": 0.2, "target_modules": targets, "aux_loss_weight": 0.0}
    if method == "mjlora":
        settings |= {"center_init": "random_normalized", "ema_interval": 1, "jitter": 0.1}
    results = []
    for checkpointing in (False, True):
        model = wrap(noisy_gpt2(), mj.methods.build(method, **settings))
        disturb(model)
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable(kind)
            model.enable_input_require_grads()
        torch.manual_seed(7)
        for batch in batches(2):
            model(**batch).loss.backward()
        results.append((gradients(model), routing_state(model)))
    assert_same(results[0][0], results[1][0], rtol=1e-5, atol=1e-7)
    assert_same(results[0][1], results[1][1])


@pytest.mark.parametrize("kind", KINDS, ids=["reentrant", "non-reentrant"])
def test_a_router_that_comes_later(kind: dict[str, bool]) -> None:
    """A second adapter brings routers of another class to blocks that have been checkpointed before."""
    found = []
    for checkpointing in (False, True):
        model = adapted(tiny_llama(2, use_cache=False))
        if checkpointing:
            model.gradient_checkpointing_enable(kind)
            model.enable_input_require_grads()
        model.train()(**lm_batch()).loss.backward()
        settings: dict[str, Any] = {"task_type": "CAUSAL_LM", "dropout": 0.0, "aux_loss_weight": 0.0}
        model.add_adapter("mixture", mj.methods.build("moelora", **settings))
        model.set_adapter("mixture")
        disturb(model)
        model.zero_grad()
        model(**lm_batch(seed=1)).loss.backward()
        found.append(gradients(model))
    assert any("router" in name for name in found[0])
    assert_same(*found, rtol=1e-5, atol=1e-7)
