"""Faults of the published code in routing (B1 to B9): ours does right what theirs did wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import monkeyjump as mj
from monkeyjump.ops import reference as ops
from monkeyjump.routing.centroid import committed
from monkeyjump.routing.granularity import CallInputs, select
from monkeyjump.routing.kmeans import spherical_kmeans
from tests.helpers import (
    adapted,
    assert_same,
    centers,
    decided,
    lm_batch,
    mj_config,
    routed_layers,
    routing_state,
    tiny_llama,
    token_ids,
    wrap,
)


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a, b, dim=-1))


@pytest.mark.parametrize("space", ["normalized", "raw"])
def test_b01_momentum_works_whatever_the_norm_of_the_states(space: str) -> None:
    """Theirs mixed a unit centre with a raw mean of norm 241: the old centre vanished at momentum 0.9."""
    generator = torch.Generator().manual_seed(0)
    h = 241 * torch.nn.functional.normalize(torch.randn(1, 64, 32, generator=generator) + 1, dim=-1)
    other = 241 * torch.nn.functional.normalize(torch.randn(500, 32, generator=generator) - 1, dim=-1)
    config = mj_config(ema_space=space, ema_momentum=0.9, ema_interval=1, top_k=1, ema_assign="top1")
    found = spherical_kmeans(other[None], 2)
    old = found.centers[0] if space == "normalized" else found.centers[0] * found.mean_norms[0][:, None]
    selection = select(CallInputs((1, 64), h.device), "token", "prompt")
    decision = decided(h, old, None, selection, config)
    winner = int(decision.counts.argmax())
    new = committed(old, decision.sums, decision.counts, torch.tensor(1), config)[winner]
    mean = decision.sums[winner] / decision.counts[winner]
    torch.testing.assert_close(new, 0.9 * old[winner] + 0.1 * mean)
    assert cosine(new, old[winner]) > 0.95  # nine tenths of the old
    assert cosine(new, mean) < cosine(new, old[winner])
    # the two things mixed are of one size
    assert 0.2 < float(old[winner].norm() / mean.norm()) < 5


def test_b01_raw_space_starts_from_centres_of_the_size_of_the_data() -> None:
    model = wrap(tiny_llama(initializer_range=1.0), center_init="kmeans", ema_space="raw")
    mj.initialize_centers(model, [lm_batch(8, 16, seed=s) for s in range(3)], progress=False, restarts=2)
    norms = [c.norm() for c in centers(model).values()]
    with torch.no_grad():
        states = model.get_input_embeddings()(lm_batch(8, 16)["input_ids"])
    assert min(norms) > 0.5 * states.norm(dim=-1).mean()


@pytest.mark.parametrize("granularity", ["token", "sequence"])
def test_b02_padding_is_not_routed_into_the_ema(granularity: str) -> None:
    """The values under the padding do not matter at all, not even as NaN states."""
    states = []
    for pads in (1, 50):
        model = adapted(granularity=granularity, ema_interval=1).train()
        batch = lm_batch(2, 9)
        batch["attention_mask"][0, :4] = 0
        batch["input_ids"][0, :4] = pads
        model(**batch)
        counts = sum(float(layer.monkeyjump_staged_count["default"]) for layer in routed_layers(model).values())
        assert counts == 2 * 2 * ((5 + 9) if granularity == "token" else 2)  # blocks, top-2, queries
        states.append(routing_state(model))
    assert_same(states[0], states[1])


def test_b02_even_nan_states_under_padding_stage_nothing() -> None:
    h = torch.randn(2, 5, 8)
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[0, :3] = False
    poisoned = h.masked_fill(~mask[..., None], float("nan"))
    config = mj_config()
    selection = select(CallInputs((2, 5), h.device, mask=mask), "token", "prompt")
    own = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    found = [decided(x, own, None, selection, config) for x in (h, poisoned)]
    torch.testing.assert_close(found[0].sums, found[1].sums)
    torch.testing.assert_close(found[0].counts, found[1].counts)


@pytest.mark.parametrize("sequence_token", ["last", "prompt"])
def test_b03_the_last_token_is_found_under_left_padding(sequence_token: str) -> None:
    """Six positions, three of them padding on the left: the last token is 5, not 2."""
    mask = torch.tensor([[0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]]).bool()
    selection = select(CallInputs((3, 6), mask.device, mask=mask), "sequence", sequence_token)
    assert selection.source is not None
    assert selection.source.flatten().tolist() == [5, 3, 5]


def test_b04_four_dimensional_masks_are_read_on_their_diagonal() -> None:
    """Also when the keys are longer than the queries (static cache) and under a sliding window."""
    from monkeyjump.tuner.call import real_tokens

    real = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]).bool()
    causal = torch.ones(5, 5, dtype=torch.bool).tril()
    window = causal & ~torch.ones(5, 5, dtype=torch.bool).tril(-2)
    for allowed in (causal, window):
        boolean = (allowed & real[:, None, :])[:, None]
        additive = torch.zeros(boolean.shape).masked_fill(~boolean, torch.finfo(torch.float32).min)
        longer = torch.cat([boolean, torch.zeros(2, 1, 5, 7, dtype=torch.bool)], -1)
        for mask in (boolean, additive, longer):
            torch.testing.assert_close(real_tokens(mask, (2, 5)), real)
    torch.testing.assert_close(real_tokens(real.long(), (2, 5)), real)


@pytest.mark.parametrize("reentrant", [True, False])
def test_b04_the_mask_is_not_lost_under_checkpointing(reentrant: bool) -> None:
    states = []
    for checkpointing in (False, True):
        model = adapted(tiny_llama(use_cache=False), ema_interval=1).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        batch = lm_batch()
        batch["attention_mask"][0, :4] = 0
        model(**batch).loss.backward()
        states.append(routing_state(model))
    assert_same(states[0], states[1])


def test_b05_the_answer_does_not_set_the_gates_of_the_prompt() -> None:
    gates = []
    for seed in (1, 2):
        model = adapted(granularity="sequence").train()
        batch = lm_batch(prompt=4)
        batch["input_ids"][:, 4:] = token_ids(3, 4, seed=seed)
        batch["labels"][:, 4:] = batch["input_ids"][:, 4:]
        with mj.record_routing(model) as trace:
            model(**batch)
        gates.append(torch.stack([trace.gates(key) for key in trace.blocks()]))
    torch.testing.assert_close(gates[0], gates[1])


def test_b06_a_sequence_is_routed_once_not_at_every_decode_step() -> None:
    model = adapted(granularity="sequence").eval()
    seen: list[torch.Tensor] = []
    with mj.record_routing(model) as trace:
        record = trace.record

        def spy(block: str, adapter: str, names: Any, gates: torch.Tensor, *rest: Any) -> None:
            if block == "1":
                seen.append(gates[:, -1])
            record(block, adapter, names, gates, *rest)

        trace.record = spy  # type: ignore[method-assign, assignment]
        model.generate(input_ids=token_ids(2, 5), max_new_tokens=5, min_new_tokens=5, do_sample=False)
    assert len(seen) == 5
    for gates in seen[1:]:
        assert torch.equal(gates, seen[0])


def test_b07_mode_names_are_validated_and_queries_and_centres_come_from_the_same_tokens() -> None:
    """Their k-means fell back to mean pooling on an unknown name while routing used the last position."""
    for field, value in (("granularity", "prompt_end"), ("sequence_token", "prompt_lengths")):
        with pytest.raises(mj.ConfigError, match=f"{field}='{value}' is not known"):
            mj_config(**{field: value})
    for mode in ("prompt", "last", "mean", "max"):
        settings: dict[str, Any] = {"granularity": "sequence", "sequence_token": mode, "top_k": 1, "ema_interval": 1}
        model = wrap(tiny_llama(1), center_init="random_tokens", **settings)
        batch = lm_batch(3, 8, prompt=3)
        mj.initialize_centers(model, [batch], num_tokens=3, progress=False)
        with torch.no_grad():
            h = model.get_input_embeddings()(batch["input_ids"])
        queries = {"prompt": h[:, 2], "last": h[:, -1], "mean": h[:, :3].mean(1), "max": h[:, :3].amax(1)}[mode]
        queries = torch.nn.functional.normalize(queries, dim=-1)
        for center in centers(model).values():  # each centre is one of the three queries that routing will see
            assert float((queries - center).norm(dim=-1).min()) < 1e-5
        model.train()(**batch)
        staged = [layer.monkeyjump_staged_sum["default"] for layer in routed_layers(model).values()]
        torch.testing.assert_close(torch.stack(staged).sum(0), queries.sum(0), rtol=1e-4, atol=1e-5)


def test_b08_every_expert_of_a_block_has_a_centre_of_its_own() -> None:
    """Theirs padded missing centres with zeros, which then competed at cosine 0. Ours cannot have fewer centres."""
    model = wrap(tiny_llama(), center_init="kmeans")
    mj.initialize_centers(model, [lm_batch(8, 12, seed=s) for s in range(3)], progress=False, restarts=3)
    for block in ("0", "1"):
        found = torch.stack([c for path, c in centers(model).items() if f"layers.{block}." in path])
        assert found.shape == (3, 32)
        torch.testing.assert_close(found.norm(dim=-1), torch.ones(3))
        assert float(torch.pdist(found).min()) > 1e-3


def test_b09_jitter_is_additive_in_training_only_and_never_reaches_the_ema() -> None:
    h = torch.randn(1, 2000, 16, generator=torch.Generator().manual_seed(0))
    orthogonal = torch.zeros(3, 16)
    orthogonal[:, 0] = torch.tensor([1.0, -1.0, 1.0])
    h[..., 0] = 0  # all cosines are exactly zero: multiplicative noise would do nothing
    selection = select(CallInputs((1, 2000), h.device), "token", "prompt")
    noisy, clean = mj_config(jitter=0.5, top_k=1), mj_config(jitter=0.0, top_k=1)
    torch.manual_seed(0)
    training = decided(h, orthogonal, None, selection, noisy, training=True)
    shares = (training.gates > 0).float().mean((0, 1))
    assert shares.min() > 0.25
    quiet = decided(h, orthogonal, None, selection, clean, training=True)
    torch.testing.assert_close(training.sums, quiet.sums)
    torch.testing.assert_close(training.counts, quiet.counts)
    evaluation = decided(h, orthogonal, None, selection, noisy, training=False)
    assert torch.equal(evaluation.gates, quiet.gates)
    assert torch.equal(ops.top_k_mask(torch.zeros(2, 3), 1), torch.tensor([[True, False, False]] * 2))
