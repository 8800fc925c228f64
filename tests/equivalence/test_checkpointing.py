"""Gradient checkpointing on = off: gradients, staged statistics and centres, over several optimiser steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import PeftModel

from tests.helpers import adapted, assert_same, batches, gradients, lm_batch, routing_state, tiny_llama

KINDS = [{"use_reentrant": True}, {"use_reentrant": False}]
MODES: list[dict[str, Any]] = [
    {"granularity": "token", "ema_interval": 1},
    {"granularity": "token", "ema_interval": 2, "dropout": 0.3, "jitter": 0.3},
    {"granularity": "token", "ema_interval": 1, "adapter": "lora_fa", "dropout": 0.3},
    {"granularity": "sequence", "ema_interval": 1},
    {"granularity": "task"},
]


def run(mode: dict[str, Any], kind: dict[str, bool] | None, steps: int = 4) -> tuple[list[dict], list[dict], PeftModel]:
    model = adapted(tiny_llama(3), **mode)
    if kind is not None:
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
@pytest.mark.parametrize("kind", KINDS, ids=["reentrant", "non-reentrant"])
def test_on_equals_off(mode: dict[str, Any], kind: dict[str, bool]) -> None:
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
        model = adapted(tiny_llama(3), granularity="sequence", ema_interval=1)
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
        model = adapted(tiny_llama(3), granularity="sequence", ema_interval=1)
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
