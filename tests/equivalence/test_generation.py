"""Generation agrees with and without a KV cache, batched and single, greedy, beam and sampled, in every granularity."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import GenerationConfig

import monkeyjump as mj
from tests.helpers import PAD, adapted, padded, tiny_llama, token_ids

MODES: list[dict[str, Any]] = [
    {"granularity": "token"},
    {"granularity": "sequence", "sequence_token": "prompt"},
    {"granularity": "sequence", "sequence_token": "last"},
    {"granularity": "sequence", "sequence_token": "mean"},
    {"granularity": "sequence", "sequence_token": "max"},
    {"granularity": "task"},
]
IDS = ["-".join(mode.values()) for mode in MODES]
STRATEGIES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "beam": {"do_sample": False, "num_beams": 3},
    "sampled": {"do_sample": True, "temperature": 1.5, "top_k": 20},
    "several sampled": {"do_sample": True, "temperature": 1.5, "num_return_sequences": 2},
}
LENGTHS = (4, 7, 6)
NEW = 6


def prompts() -> list[torch.Tensor]:
    return [token_ids(1, length, seed=20 + i)[0] for i, length in enumerate(LENGTHS)]


def model_of(mode: dict[str, Any]) -> PeftModel:
    return adapted(tiny_llama(3), temperature=0.2, **mode).eval()


def generate(model: PeftModel, ids: torch.Tensor, mode: dict[str, Any], tasks: list[int], **how: Any) -> torch.Tensor:
    torch.manual_seed(11)
    extra = {"task_ids": torch.tensor(tasks)} if mode["granularity"] == "task" else {}
    config = GenerationConfig(max_new_tokens=NEW, min_new_tokens=NEW, pad_token_id=PAD, **how)
    mask = (ids != PAD).long()
    out = model.generate(input_ids=ids, attention_mask=mask, generation_config=config, **extra)
    return out[:, ids.shape[1] :]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("mode", MODES, ids=IDS)
def test_cached_equals_uncached(mode: dict[str, Any], strategy: str) -> None:
    model, how = model_of(mode), STRATEGIES[strategy]
    ids = padded(prompts(), "left", 8)
    cached = generate(model, ids, mode, [0, 1, 2], use_cache=True, **how)
    assert torch.equal(cached, generate(model, ids, mode, [0, 1, 2], use_cache=False, **how))
    assert cached.shape[1] == NEW
    assert len(cached.unique()) > 1  # a model that repeats one token would prove nothing


@pytest.mark.parametrize("strategy", ["greedy", "beam"])
@pytest.mark.parametrize("mode", MODES, ids=IDS)
@pytest.mark.parametrize("cache", [True, False], ids=["cached", "uncached"])
def test_batched_equals_single(mode: dict[str, Any], strategy: str, cache: bool) -> None:
    model, how = model_of(mode), STRATEGIES[strategy]
    together = generate(model, padded(prompts(), "left", 8), mode, [0, 1, 2], use_cache=cache, **how)
    for i, prompt in enumerate(prompts()):
        assert torch.equal(together[i], generate(model, prompt[None], mode, [i], use_cache=cache, **how)[0])


@pytest.mark.parametrize("mode", MODES, ids=IDS)
def test_static_cache(mode: dict[str, Any]) -> None:
    model = model_of(mode)
    ids = padded(prompts(), "left", 8)
    expected = generate(model, ids, mode, [0, 1, 2], do_sample=False)
    static = generate(model, ids, mode, [0, 1, 2], do_sample=False, cache_implementation="static", disable_compile=True)
    assert torch.equal(static, expected)


@pytest.mark.parametrize("mode", [MODES[0], MODES[1], MODES[5]], ids=[IDS[0], IDS[1], IDS[5]])
def test_greedy_equals_one_full_forward(mode: dict[str, Any]) -> None:
    """The decision of the prefill holds for all decoded tokens, so one forward over all tokens agrees.

    (`last`, `mean` and `max` see the answer in such a forward, by definition.)
    """
    model = model_of(mode)
    prompt = prompts()[1]
    new = generate(model, prompt[None], mode, [1], do_sample=False)[0]
    whole = torch.cat([prompt, new])[None]
    labels = whole.clone()
    labels[:, : len(prompt)] = -100
    extra: dict[str, Any] = {"task_ids": torch.tensor([1])} if mode["granularity"] == "task" else {}
    with torch.no_grad():
        logits = model(input_ids=whole, labels=labels, **extra).logits[0]
    assert torch.equal(logits[len(prompt) - 1 : -1].argmax(-1), new)


def test_a_cache_filled_by_hand_keeps_its_decision() -> None:
    model = model_of(MODES[1])
    first, second = token_ids(2, 5, seed=3), token_ids(2, 1, seed=4)
    with torch.no_grad(), mj.record_routing(model) as trace:
        cache = model(first, use_cache=True).past_key_values
        decided = {key: trace.gates(key)[:, -1:] for key in trace.blocks()}
        logits = model(second, past_key_values=cache).logits
        for key, gates in decided.items():
            torch.testing.assert_close(trace.gates(key), gates)
        whole = torch.cat([first, second], 1)
        full = model(whole, prompt_lengths=torch.tensor([5, 5])).logits
    torch.testing.assert_close(logits[:, -1], full[:, -1], rtol=1e-4, atol=1e-5)


def test_a_new_prompt_gets_a_new_decision() -> None:
    """Nothing of one generation is left for the next."""
    model, mode = model_of(MODES[1]), MODES[1]
    a, b = token_ids(2, 6, seed=1), token_ids(2, 6, seed=2)
    alone = generate(model, b, mode, [], do_sample=False)
    generate(model, a, mode, [], do_sample=False)
    assert torch.equal(generate(model, b, mode, [], do_sample=False), alone)


def test_explicit_positions_without_a_mask_are_not_packing() -> None:
    """Positions 0..T-1 in every row describe one sequence per row, for every pooling and for a kept decision."""
    ids = token_ids(2, 6, seed=1)
    positions = torch.arange(6).expand(2, 6)
    for mode in MODES[:-1]:
        model = model_of(mode)
        with torch.no_grad():
            expected = model(ids, use_cache=True)
            found = model(ids, position_ids=positions, use_cache=True)
            torch.testing.assert_close(found.logits, expected.logits)
            after = [
                model(ids[:, :1], past_key_values=out.past_key_values, position_ids=torch.full((2, 1), 6)).logits
                for out in (expected, found)
            ]
        torch.testing.assert_close(after[0], after[1])
