"""What may decide a routing and what may move a centre."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import monkeyjump as mj
from tests.helpers import adapted, assert_same, lm_batch, routing_state, tiny_llama, token_ids, train_steps


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("source", ["labels", "prompt_lengths"])
@pytest.mark.parametrize("token", ["prompt", "mean"])
def test_answer_tokens_never_change_the_prompt(training: bool, source: str, token: str) -> None:
    prompts = (3, 5, 4)
    first, second = token_ids(3, 9, seed=1), token_ids(3, 9, seed=2)
    for row, prompt in enumerate(prompts):
        second[row, :prompt] = first[row, :prompt]
    assert not torch.equal(first, second)
    results = []
    for ids in (first, second):
        model = adapted(tiny_llama(3), granularity="sequence", sequence_token=token).train(training)
        labels = ids.clone()
        for row, prompt in enumerate(prompts):
            labels[row, :prompt] = -100
        extra = {"labels": labels} if source == "labels" else {"prompt_lengths": torch.tensor(prompts)}
        with mj.record_routing(model) as trace:
            logits = model(input_ids=ids, **extra).logits.detach()
        results.append((logits, {key: trace.gates(key) for key in trace.blocks()}, routing_state(model)))
    for row, prompt in enumerate(prompts):
        torch.testing.assert_close(results[0][0][row, :prompt], results[1][0][row, :prompt], rtol=1e-5, atol=1e-6)
        assert not torch.allclose(results[0][0][row, prompt:], results[1][0][row, prompt:])
    assert_same(results[0][1], results[1][1], rtol=1e-5, atol=1e-6)  # the whole row follows the prompt
    assert_same(results[0][2], results[1][2], rtol=1e-5, atol=1e-6)


def test_last_token_does_leak_which_is_why_it_is_not_the_default() -> None:
    model = adapted(tiny_llama(3), granularity="sequence", sequence_token="last").eval()
    first = token_ids(1, 9, seed=1)
    second = first.clone()
    second[0, -1] = first[0, -1] % 99 + 1
    with torch.no_grad():
        assert not torch.allclose(model(first).logits[0, :5], model(second).logits[0, :5])
    assert mj.MonkeyJumpConfig().sequence_token == "prompt"


@pytest.mark.parametrize("granularity", ["token", "sequence"])
@pytest.mark.parametrize("how", ["eval", "eval with grad", "train, no_grad", "train, inference_mode", "state_dict"])
def test_nothing_but_training_moves_a_centre(granularity: str, how: str) -> None:
    model = adapted(granularity=granularity, ema_interval=1)
    train_steps(model, iter([lm_batch(seed=1)]))  # statistics are staged and wait for the next training forward
    before = routing_state(model)
    assert any(v.abs().sum() > 0 for k, v in before.items() if "staged_sum" in k)
    batch = lm_batch(seed=2)
    if how == "eval":
        with torch.no_grad():
            model.eval()(**batch)
    elif how == "eval with grad":
        model.eval()(**batch).loss.backward()
    elif how == "train, no_grad":
        with torch.no_grad():
            model.train()(**batch)
    elif how == "train, inference_mode":
        with torch.inference_mode():
            model.train()(**batch)
    else:
        model.load_state_dict(model.state_dict())
        model.train().eval()
    assert_same(before, routing_state(model))
    model.train()(**batch)
    after = routing_state(model)
    assert any(not torch.equal(before[k], after[k]) for k in before if "center" in k)
    assert all(int(after[k]) == int(before[k]) + 1 for k in before if k.endswith("step"))


def test_evaluation_between_training_steps_changes_nothing() -> None:
    states: list[Any] = []
    for evaluate in (False, True):
        model = adapted(ema_interval=1)
        for seed in range(3):
            train_steps(model, iter([lm_batch(seed=seed)]))
            if evaluate:
                with torch.no_grad():
                    model.eval()(**lm_batch(seed=50, batch=5, length=6))
                    model.generate(input_ids=token_ids(1, 4), max_new_tokens=2)
        states.append(routing_state(model))
    assert_same(states[0], states[1])


def test_training_that_cannot_know_the_prompt_raises() -> None:
    model = adapted(granularity="sequence").train()
    with pytest.raises(mj.ConfigError, match=r"must know where the prompt ends.*labels.*prompt_lengths"):
        model(input_ids=token_ids())
