"""The sample that centres are found in: which tokens, and that each block keeps its own states of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import monkeyjump as mj
from monkeyjump.tuner.centers import calibrate, sample
from monkeyjump.tuner.centers.sample import Reservoir, TokenCollector
from tests.helpers import lm_batch, tiny_llama, wrap


def _all_by_key(batches: list[int], capacity: int, seed: int) -> list[int]:
    """Items of the smallest keys, slot by slot: the slow way, by sorting all of them after every batch."""
    generator = torch.Generator().manual_seed(seed)
    slots: list[tuple[float, int]] = []
    first = 0
    for count in batches:
        keys = torch.rand(count, dtype=torch.float64, generator=generator).tolist()
        new = [(key, first + item) for item, key in enumerate(keys)]
        kept = set(sorted(slots + new)[:capacity])
        entering = iter(sorted(entry for entry in new if entry in kept))
        slots = [entry if entry in kept else next(entering) for entry in slots]
        slots += entering
        first += count
    return [item for _, item in slots]


@pytest.mark.parametrize("batches", [[30, 20], [30, 40, 1, 25, 60], [200, 10]])
def test_the_sample_is_what_sorting_all_keys_gives(batches: list[int]) -> None:
    reservoir, found, first = Reservoir(50, 3), torch.full((50,), -1), 0
    for count in batches:
        entering, slots = reservoir.offer(count)
        found[slots] = entering + first
        first += count
    assert len(reservoir) == reservoir.capacity
    assert found.tolist() == _all_by_key(batches, 50, 3)


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
    used = 3 if pooled else 2  # batches until four times 20 tokens have passed, or the data ends
    assert len(selections) == used
    seen = [
        torch.cat([states[layer].mean(1) if pooled else states[layer].flatten(0, 1) for states in passed[:used]])
        for layer in range(2)
    ]
    kept = list(collectors[0].tokens.values())
    # block 1 tells tokens apart; the states entering block 0 are those of the vocabulary
    where = torch.cdist(kept[1], seen[1], compute_mode="donot_use_mm_for_euclid_dist").argmin(1)
    assert len(where.unique()) == 20
    for states, expected in zip(kept, seen, strict=True):
        torch.testing.assert_close(states, expected[where], atol=1e-5, rtol=0)
