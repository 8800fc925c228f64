"""Batched, cached and padded scores are those of the simplest loop there is."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from monkeyjump.evaluation.answers import number_in
from monkeyjump.evaluation.score import Prediction, predict
from monkeyjump.tasks import Example
from monkeyjump.tasks.encode import Encoder
from tests.evaluation.toys import add_adapter, example, make_model

TASK_IDS = {"toy": 1, "other": 2}
ADAPTERS: dict[str, dict[str, Any]] = {
    "token": {},
    "prompt": {"granularity": "sequence"},
    "last": {"granularity": "sequence", "sequence_token": "last"},
    "mean": {"granularity": "sequence", "sequence_token": "mean"},
    "task": {"granularity": "task"},
}


def naive_logprob(model: Any, prompt: list[int], answer: list[int], extras: dict[str, Any]) -> float:
    """One row, no cache, no padding, all logits: log p(answer | prompt)."""
    ids = torch.tensor([prompt + answer])
    with torch.no_grad():
        logprobs = model(input_ids=ids, use_cache=False, **extras).logits[0].float().log_softmax(-1)
    return sum(logprobs[len(prompt) + i - 1, token].item() for i, token in enumerate(answer))


def naive_scores(model: Any, encoder: Encoder, item: Example, mode: str, extras: dict[str, Any]) -> list[float]:
    (prompt,) = encoder.prompt_ids([item])
    assert prompt is not None
    if extras:
        extras = {"task_ids": torch.tensor([TASK_IDS[item.task]]), "prompt_lengths": torch.tensor([len(prompt)])}
    if mode == "letter":
        letters = "ABC"[: len(item.options)]
        answers = [encoder.tokenizer(letter)["input_ids"] for letter in letters]
        return [naive_logprob(model, prompt, answer, extras) for answer in answers]
    answers = [[*encoder.tokenizer(option)["input_ids"], encoder.tokenizer.eos_token_id] for option in item.options]
    return [naive_logprob(model, prompt, answer, extras) / len(answer) for answer in answers]


def by_index(predictions: list[Prediction]) -> dict[int, tuple[float, ...]]:
    return {prediction.index: prediction.scores or () for prediction in predictions}


@pytest.mark.parametrize("mode", ["letter", "text"])
@pytest.mark.parametrize("kind", [None, "token", "prompt", "task"])
def test_scores_equal_a_naive_loop(tokenizer, examples, mode, kind):
    model = make_model() if kind is None else add_adapter(make_model(), **ADAPTERS[kind])
    encoder = Encoder(tokenizer, TASK_IDS, answer_format=mode)
    items = [replace(item, task=("toy", "other")[i % 2]) for i, item in enumerate(examples)]
    predictions = predict(model, encoder, items, mode)
    assert [p.index for p in predictions] == list(range(len(items)))
    for prediction, item in zip(predictions, items, strict=True):
        expected = naive_scores(model, encoder, item, mode, {"routed": True} if kind else {})
        assert prediction.scores == pytest.approx(expected, abs=2e-4)
        shares = torch.tensor(prediction.scores, dtype=torch.float64).log_softmax(0)
        assert prediction.nll == pytest.approx(float(-shares[item.label]))
        assert prediction.predicted == max(range(len(expected)), key=expected.__getitem__)
        assert prediction.gold == item.label
        assert prediction.correct == (prediction.predicted == item.label)


def test_the_adapter_matters(tokenizer, examples):
    """Otherwise the equalities above would say nothing about routing."""
    encoder = Encoder(tokenizer, TASK_IDS, answer_format="text")
    found = {"none": by_index(predict(make_model(), encoder, examples, "text"))[0]}
    for name, kind in ADAPTERS.items():
        found[name] = by_index(predict(add_adapter(make_model(), **kind), encoder, examples, "text"))[0]
    assert found["last"] == found["prompt"]  # the answer is not there yet when the sequence is routed
    assert len({round(scores[0], 4) for scores in found.values()}) == len(found) - 1


@pytest.mark.parametrize("kind", list(ADAPTERS))
def test_batching_and_order_change_nothing(tokenizer, examples, kind):
    model = add_adapter(make_model(), **ADAPTERS[kind])
    encoder = Encoder(tokenizer, TASK_IDS, answer_format="text")
    together = by_index(predict(model, encoder, examples, "text", batch_tokens=100_000))
    alone = by_index(predict(model, encoder, examples, "text", batch_tokens=1))
    order = random.Random(3).sample(range(len(examples)), len(examples))
    shuffled = predict(model, encoder, [examples[i] for i in order], "text", batch_tokens=2000)
    for place, prediction in enumerate(shuffled):
        assert prediction.index == place
        assert prediction.scores == pytest.approx(together[order[place]], abs=2e-4)
        assert prediction.scores == pytest.approx(alone[order[place]], abs=2e-4)


@pytest.mark.parametrize("kind", ["prompt", "last", "mean"])
def test_answers_do_not_influence_routing(tokenizer, kind):
    """An option's score depends on the prompt and itself, not on how the sequence would be routed with it inside."""
    model = add_adapter(make_model(), **ADAPTERS[kind])
    encoder = Encoder(tokenizer, TASK_IDS, answer_format="text")
    item = example(3, ("a first answer", "another"))
    (prompt,) = encoder.prompt_ids([item])
    scores, answers = predict(model, encoder, [item], "text")[0].scores, encoder.target_ids(item.options)
    with torch.no_grad():  # generation's own way: read the prompt, then one token after another
        for option, score in zip(item.options, scores or (), strict=True):
            output = model(input_ids=torch.tensor([prompt]), use_cache=True)
            total = 0.0
            for token in answers[option]:
                total += output.logits[0, -1].log_softmax(-1)[token].item()
                output = model(input_ids=torch.tensor([[token]]), past_key_values=output.past_key_values)
            assert score * len(answers[option]) == pytest.approx(total, abs=2e-4)


def test_a_model_that_always_says_b(tokenizer, examples):
    model = make_model()
    answer = tokenizer("B")["input_ids"][0]
    with torch.no_grad():  # the same state for every token, and an output that only "B" reads
        model.model.norm.weight.zero_()
        model.model.norm.register_forward_hook(lambda module, args, output: torch.ones_like(output))
        model.lm_head.weight.zero_()
        model.lm_head.weight[answer] = 1.0
    encoder = Encoder(tokenizer, answer_format="letter")
    for mode in ("letter", "generate"):
        predictions = predict(model, encoder, examples, mode)
        # In generation "BBBBB..." is no answer: a letter must stand alone.
        assert {p.predicted for p in predictions} == ({1} if mode == "letter" else {-1})
    assert [p.correct for p in predict(model, encoder, examples, "letter")] == [e.label == 1 for e in examples]


def test_a_model_that_has_diverged_answers_nothing(tokenizer, examples):
    model = make_model()
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    predictions = predict(model, Encoder(tokenizer, answer_format="letter"), examples, "letter")
    assert {(p.predicted, p.correct) for p in predictions} == {(-1, False)}


def test_regression_predicts_the_expected_value(model, tokenizer):
    encoder = Encoder(tokenizer, answer_format="letter")
    items = [example(n, ("0", "1", "2"), score=0.5 * n, label=0) for n in range(4)]
    for prediction in predict(model, encoder, items, "letter"):
        weights = torch.tensor(prediction.scores).softmax(0)
        assert prediction.value == pytest.approx((weights * torch.tensor([0.0, 1.0, 2.0])).sum().item(), abs=1e-5)
        assert prediction.gold_value == 0.5 * prediction.index


@pytest.mark.parametrize("kind", [None, *ADAPTERS])
def test_generation_equals_generate(tokenizer, examples, kind):
    model: Any = make_model() if kind is None else add_adapter(make_model(), **ADAPTERS[kind])
    encoder = Encoder(tokenizer, TASK_IDS, answer_format="letter")
    extras = {"task_ids": torch.tensor([1])} if kind else {}
    examples = examples[::4]
    for prediction, item in zip(predict(model, encoder, examples, "generate"), examples, strict=True):
        (prompt,) = encoder.prompt_ids([item])
        limit = max(map(len, encoder.target_ids(item.options).values())) + 8
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        with torch.no_grad():
            out = model.generate(
                input_ids=ids, attention_mask=mask, max_new_tokens=limit, do_sample=False, pad_token_id=0, **extras
            )
        assert prediction.text == tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def test_only_answer_positions_get_logits(model, tokenizer, examples):
    widths: list[int] = []
    model.lm_head.register_forward_hook(lambda module, args, output: widths.append(output.shape[1]))
    encoder = Encoder(tokenizer, answer_format="text")
    predict(model, encoder, examples, "text")
    longest = max(len(ids) for item in examples for ids in encoder.target_ids(item.options).values())
    assert 1 in widths
    assert max(widths) < longest
    widths.clear()
    predict(model, Encoder(tokenizer, answer_format="letter"), examples, "letter")
    assert set(widths) == {1}


def test_modes_of_modules_come_back(model, tokenizer, examples):
    model.train()
    model.model.layers[0].eval()
    predict(model, Encoder(tokenizer), examples[:2], "letter")
    assert model.training
    assert not model.model.layers[0].training
    assert model.model.layers[1].training


def test_too_long_is_left_out_and_counted(model, tokenizer, examples):
    encoder = Encoder(tokenizer, max_length=120)
    items = [*examples[:2], example(2, ("no", "yes"), task="toy", context="far " * 100), example(3, ("n" * 90, "y"))]
    predictions = predict(model, encoder, items, "letter")
    assert [p.index for p in predictions] == [0, 1, 2]
    assert encoder.counts.dropped["toy"] == 1
    assert encoder.counts.truncated["toy"] == 1


def test_a_free_answer_may_be_a_number(tokenizer):
    """Its rank counts, and the first number of whatever was generated is it."""
    item = Example("How similar?", free_answer="2.5", score=2.5, task="toy", metric="spearman")
    [prediction] = predict(make_model(), Encoder(tokenizer, TASK_IDS), [item], "generate")
    assert prediction.gold_value == 2.5
    assert prediction.value == number_in(prediction.text or "")
