"""The sample that centres are found in: which tokens, and that each block keeps its own states of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import monkeyjump as mj
from monkeyjump.tuner.centers import calibrate, sample
from monkeyjump.tuner.centers.sample import PAPERS_TOKENS, TokenCollector, affordable_tokens, default_sample
from tests.helpers import lm_batch, tiny_llama, wrap


@pytest.mark.parametrize("granularity", ["token", "mean"])
def test_each_block_keeps_its_own_states_and_indices_are_made_once(
    monkeypatch: pytest.MonkeyPatch, granularity: str
) -> None:
    pooled: dict[str, Any] = {"granularity": "sequence", "sequence_token": "mean"} if granularity == "mean" else {}
    base = tiny_llama()
    batches = [lm_batch(8, 6, seed=s) for s in range(3)]
    with torch.no_grad():
        passed = [base(input_ids=b["input_ids"], output_hidden_states=True).hidden_states for b in batches]
    model = wrap(base, center_init="kmeans", **pooled)
    collectors: list[TokenCollector] = []
    selections: list[Any] = []
    original = sample.select

    def keep(model: Any, context: Any, collector: TokenCollector, *rest: Any) -> None:
        collectors.append(collector)
        sample.collect(model, context, collector, *rest)

    def spy(*args: Any) -> Any:
        selections.append(args)
        return original(*args)

    monkeypatch.setattr(calibrate, "collect", keep)
    monkeypatch.setattr(sample, "select", spy)
    only_ids = [{"input_ids": batch["input_ids"]} for batch in batches]
    mj.initialize_centers(model, only_ids, num_tokens=20, progress=False, restarts=1)
    assert len(collectors[0].tokens) == 2
    used = 3 if pooled else 1  # batches until there are 20 tokens, or the data ends
    assert len(selections) == used
    seen = [
        torch.cat([states[layer].mean(1) if pooled else states[layer].flatten(0, 1) for states in passed[:used]])
        for layer in range(2)
    ]
    kept = list(collectors[0].tokens.values())
    for states, expected in zip(kept, seen, strict=True):
        torch.testing.assert_close(states, expected[:20], atol=1e-5, rtol=0)


def test_a_cpu_reads_for_about_a_minute_and_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    tiny = tiny_llama()
    assert affordable_tokens(tiny) == PAPERS_TOKENS  # a minute is enough for all of them
    weights = {"135M": 134_515_008, "7B": 7_000_000_000}
    found = {}
    for name, count in weights.items():
        with torch.device("meta"):
            model = torch.nn.Linear(count, 1, bias=False)
        assert affordable_tokens(model) == PAPERS_TOKENS  # not on a CPU
        model._parameters["weight"] = torch.nn.Parameter(torch.zeros(1).expand(count // 2**10, 2**10), False)
        found[name] = affordable_tokens(model)
    assert found == {"135M": 6_600, "7B": 2_000}
    routed = wrap(tiny, center_init="kmeans")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample, "_MINUTE_OF_A_CPU", 1.0)
        patch.setattr(sample, "_FEWEST_TOKENS", 20)
        report = mj.initialize_centers(routed, [lm_batch(8, 6)], restarts=1)
    assert report.tokens_kept == 20
    assert "centres start from 20 tokens, about a minute's work for a CPU" in capfd.readouterr().out


def test_whole_texts_are_counted_where_these_are_routed(monkeypatch: pytest.MonkeyPatch) -> None:
    """50,000 states of a text each would be 50,000 texts to read."""
    tiny, batches = tiny_llama(), [lm_batch(4, 6, seed=seed) for seed in range(4)]
    token, text = (mj.MonkeyJumpConfig(granularity=name) for name in ("token", "sequence"))
    assert (default_sample(tiny, token), default_sample(tiny, text)) == (PAPERS_TOKENS, 5_000)
    monkeypatch.setattr(sample, "affordable_tokens", lambda model: 6_600)
    assert (default_sample(tiny, token), default_sample(tiny, text)) == (6_600, 264)
    monkeypatch.setattr(sample, "_FEWEST_TEXTS", 7)
    monkeypatch.setattr(sample, "affordable_tokens", lambda model: 20)
    routed = wrap(tiny, center_init="kmeans", granularity="sequence", sequence_token="mean")
    assert mj.initialize_centers(routed, batches, restarts=1).tokens_kept == 7
