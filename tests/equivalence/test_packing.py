"""Packed [1, sum T] batches = the separate sequences."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import PeftModel

import monkeyjump as mj
from monkeyjump.routing import granularity
from monkeyjump.routing.granularity import CallInputs, Selection, segments_of, select
from tests.helpers import adapted, assert_same, routing_state, tiny_llama, token_ids

LENGTHS = (5, 8, 3)
MODES: list[dict[str, Any]] = [
    {"granularity": "token"},
    {"granularity": "sequence", "sequence_token": "prompt"},
    {"granularity": "sequence", "sequence_token": "last"},
    {"granularity": "sequence", "sequence_token": "mean"},
    {"granularity": "sequence", "sequence_token": "max"},
]
IDS = ["-".join(mode.values()) for mode in MODES]


def sequences() -> list[dict[str, torch.Tensor]]:
    found = []
    for i, length in enumerate(LENGTHS):
        ids = token_ids(1, length, seed=i)
        labels = ids.clone()
        labels[:, : 1 + i] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def packed(how: str) -> dict[str, torch.Tensor]:
    rows = sequences()
    batch = {key: torch.cat([row[key] for row in rows], 1) for key in ("input_ids", "labels")}
    batch["position_ids"] = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    if how == "seq_idx":
        batch["seq_idx"] = torch.cat([torch.full((length,), i) for i, length in enumerate(LENGTHS)])[None].int()
    return batch


def model_of(mode: dict[str, Any]) -> PeftModel:
    # the eager attention masks what SDPA without a mask would not: packed sequences see only themselves
    return adapted(tiny_llama(3, attn_implementation="eager"), **mode)


@pytest.mark.parametrize("how", ["position_ids", "seq_idx"])
@pytest.mark.parametrize("mode", MODES, ids=IDS)
def test_packed_equals_separate(mode: dict[str, Any], how: str) -> None:
    model = model_of(mode).eval()
    with torch.no_grad(), mj.record_routing(model) as trace:
        logits = model(**packed(how), use_cache=False).logits[0].split(LENGTHS)
        gates = {key: trace.gates(key)[0].split(LENGTHS) for key in trace.blocks()}
        for i, row in enumerate(sequences()):
            torch.testing.assert_close(logits[i], model(**row).logits[0], rtol=1e-4, atol=1e-5)
            for key, found in gates.items():
                torch.testing.assert_close(found[i], trace.gates(key)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", ["position_ids", "seq_idx"])
@pytest.mark.parametrize("mode", MODES, ids=IDS)
def test_statistics_of_a_packed_training_forward(mode: dict[str, Any], how: str) -> None:
    model = model_of(mode).train()
    model(**packed(how), use_cache=False)
    together = {k: v for k, v in routing_state(model).items() if "staged" in k}
    summed: dict[str, torch.Tensor] = {}
    for row in sequences():
        model = model_of(mode).train()
        model(**row)
        for key in together:
            summed[key] = summed.get(key, torch.zeros(())) + routing_state(model)[key]
    assert_same(together, summed, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pool", ["mean", "max"])
def test_a_tail_of_pads_and_a_sequence_without_a_prompt_are_pooled_like_rows(pool: str) -> None:
    """The tail has the number -1; what has no prompt is pooled whole. Nothing here looks at values: it compiles."""
    shape, mask = (1, 7), torch.tensor([[True] * 6 + [False]])
    segments = segments_of(None, torch.tensor([[0, 0, 0, 1, 1, 1, -1]]))
    labels = torch.tensor([[-100, -100, 4, 5, 6, 7, -100]])
    h = torch.randn(1, 7, 4, generator=torch.Generator().manual_seed(0))
    inputs = CallInputs(shape, h.device, mask=mask, labels=labels, segments=segments)

    def pooled(h: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, Selection]:
        selection = select(replace(inputs, labels=labels), "sequence", pool)
        return granularity.pool(h, selection), selection

    expected = [part.mean(0) if pool == "mean" else part.amax(0) for part in (h[0, :2], h[0, 3:6])]
    for call in (pooled, torch.compile(pooled, fullgraph=True, backend="aot_eager")):
        found, selection = call(h, labels)
        assert selection.queries is not None
        assert selection.source is not None
        assert selection.queries.tolist() == [[True, True, False, False, False, False, False]]
        assert selection.source.tolist() == [[0, 0, 0, 1, 1, 1, 2]]
        torch.testing.assert_close(found[0, :2], torch.stack(expected))
        assert not found[0, 2:].any()


def test_seq_idx_counts_even_beside_a_mask() -> None:
    """A collator that adds an all-ones mask does not turn three sequences into one."""
    model = model_of(MODES[1]).eval()
    batch = packed("seq_idx")
    with torch.no_grad(), mj.record_routing(model) as trace:
        model(**batch, use_cache=False)
        expected = trace.gates("0")
        model(**batch, attention_mask=torch.ones_like(batch["input_ids"]), use_cache=False)
        torch.testing.assert_close(trace.gates("0"), expected)
