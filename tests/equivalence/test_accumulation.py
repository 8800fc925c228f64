"""One batch of 8 and 8 batches of 1: the same gradients; the unit of the centres' schedule is one training forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import PeftModel

from tests.helpers import adapted, assert_same, centers, gradients, lm_batch, routed_layers, routing_state, tiny_llama

STEPS = 3


def run(model: PeftModel, micro: int) -> tuple[list[dict], list[dict]]:
    """Training on batches of 8, split into micro-batches; the loss is a sum over tokens divided by their number."""
    model.train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    found, states = [], []
    for step in range(STEPS):
        batch = lm_batch(batch=8, seed=step)
        items = (batch["labels"][:, 1:] != -100).sum()
        for start in range(0, 8, micro):
            part = {key: value[start : start + micro] for key, value in batch.items()}
            model(**part, num_items_in_batch=items).loss.backward()
        found.append(gradients(model))
        states.append(routing_state(model))
        optimizer.step()
        optimizer.zero_grad()
    return found, states


@pytest.mark.parametrize(
    "settings",
    [
        {"ema_stop": 0},
        {"adapter": "adalora", "ema_stop": 0},
        {"adapter": "propulsion", "ema_stop": 0},
        {"granularity": "sequence", "ema_stop": 0},
    ],
    ids=["lora", "adalora", "propulsion", "sequence"],
)
def test_gradients_agree_with_centres_at_rest(settings: dict[str, Any]) -> None:
    """AdaLoRA's own loss included: it is a share of the accumulated batch, as the language loss is."""
    whole, _ = run(adapted(tiny_llama(3), **settings), 8)
    parts, _ = run(adapted(tiny_llama(3), **settings), 1)
    for a, b in zip(whole, parts, strict=True):
        assert_same(a, b, rtol=1e-3, atol=1e-5)


def test_the_first_gradients_agree_with_moving_centres_and_a_matched_interval() -> None:
    """interval 8 with 8 micro-batches: no centre moves inside the first accumulated batch."""
    whole, whole_states = run(adapted(tiny_llama(3), ema_interval=1), 8)
    parts, part_states = run(adapted(tiny_llama(3), ema_interval=8), 1)
    assert_same(whole[0], parts[0], rtol=1e-4, atol=1e-6)
    # the counter counts training forwards: 1 per batch against 8 per batch
    for states, per_batch in ((whole_states, 1), (part_states, 8)):
        for number, state in enumerate(states, start=1):
            assert {int(v) for k, v in state.items() if k.endswith("step")} == {number * per_batch}


def test_what_differs_is_the_sample_of_one_update() -> None:
    """An update is made from ONE forward: from 8 rows undivided, from the last micro-batch alone when divided."""
    batch = lm_batch(batch=8, seed=0)
    undivided = adapted(tiny_llama(3), ema_interval=1).train()
    undivided(**batch)
    divided = adapted(tiny_llama(3), ema_interval=8).train()
    for row in range(8):
        divided(**{key: value[row : row + 1] for key, value in batch.items()})
    last = adapted(tiny_llama(3), ema_interval=1).train()
    last(**{key: value[7:] for key, value in batch.items()})
    for model in (undivided, divided, last):
        model(**lm_batch(batch=1, seed=9))  # commits
    assert_same(centers(divided), centers(last), rtol=1e-5, atol=1e-6)
    assert any(
        not torch.allclose(a, b, atol=1e-4)
        for a, b in zip(centers(undivided).values(), centers(divided).values(), strict=True)
    )


def test_one_training_forward_is_one_unit_whatever_happens_to_its_gradient() -> None:
    model = adapted(ema_interval=1).train()
    model(**lm_batch(seed=0))  # no backward
    model(**lm_batch(seed=1)).loss.backward()
    assert {int(layer.monkeyjump_step["default"]) for layer in routed_layers(model).values()} == {2}
