"""Experts that are knocked out: the same as a gate of zero, for one thread and for as long as it was asked."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import monkeyjump as mj
from monkeyjump.ops import dispatch
from tests.equivalence.thread_runs import built
from tests.helpers import REORDERED, ROUTED, adapted, disturb, layers_of, token_ids

METHODS = ["mjlora", "hydralora", "mola", "moa", "mixlora"]


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(token_ids(2, 6).to(model.device)).logits


def model_of(method: str) -> Any:
    changes = {"experts": [3, 4]} if method == "mola" else {}
    return (adapted() if method == "mjlora" else built(method, **changes)).eval()


@pytest.mark.parametrize("granularity", ["token", "sequence", "uniform"])
def test_a_knocked_out_projection_adds_nothing(granularity: str) -> None:
    changes: dict[str, Any] = {"router": "uniform"} if granularity == "uniform" else {"granularity": granularity}
    model = adapted(**changes).eval()
    before = logits(model)
    with mj.knock_out(model, {"1": ["k_proj"]}), mj.record_routing(model) as trace:
        without = logits(model)
    assert not trace.gates("1")[..., 1].any()
    assert trace.gates("0")[..., 1].any()
    assert torch.equal(logits(model), before)  # undone
    [layer] = [layer for path, layer in layers_of(model).items() if "layers.1" in path and path.endswith("k_proj")]
    with torch.no_grad():
        layer.monkeyjump_adapter["default"].B.zero_()  # type: ignore[operator]
    torch.testing.assert_close(without, logits(model), **REORDERED)
    assert not torch.allclose(without, before, atol=1e-3)


@pytest.mark.parametrize("method", METHODS)
def test_all_experts_knocked_out_leave_what_is_not_routed(method: str) -> None:
    """Without experts a learned router's model is its base model, or that with its shared adapters."""
    model = model_of(method)
    with mj.record_routing(model) as trace:
        before = logits(model)
    every = {key: trace.experts(key) for key in trace.blocks()}
    with mj.knock_out(model, every), mj.record_routing(model) as trace:
        without = logits(model)
    assert not any(trace.gates(key).any() for key in trace.blocks())
    assert not torch.allclose(without, before, atol=1e-3)
    if method in ("hydralora", "mola"):
        with model.disable_adapter():
            torch.testing.assert_close(without, logits(model), **REORDERED)
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("method", METHODS)
def test_one_expert_of_one_block(method: str) -> None:
    """The gates of the others are as they were, in the blocks up to this one."""
    model = model_of(method)
    with mj.record_routing(model) as trace:
        logits(model)
    key = trace.blocks()[0]
    gates, experts = trace.gates(key).clone(), trace.experts(key)
    one, other = mj.knock_out(model, {key: experts[:1]}), mj.knock_out(model, {key: experts[1:2]})
    with one, other, mj.record_routing(model) as trace:  # both are off
        logits(model)
    gates[..., :2] = 0
    torch.testing.assert_close(trace.gates(key), gates, **REORDERED)


@pytest.mark.skipif(not dispatch.HAS_TRITON, reason="Triton is not installed")
@pytest.mark.parametrize("method", METHODS)
def test_kernels_do_without_it_too(method: str) -> None:
    """Projections that read one tensor ask for their gates together, which is another way through a router."""
    model = model_of(method)
    disturb(model, scale=0.1)  # from larger numbers a learned router makes more of the last digits
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    with mj.record_routing(model) as trace, dispatch.implementation("triton"):
        before = logits(model)
    with mj.knock_out(model, {key: trace.experts(key)[:1] for key in trace.blocks()}):
        without = logits(model)
        with dispatch.implementation("triton"):
            torch.testing.assert_close(logits(model), without, **REORDERED)
    assert not torch.allclose(without, before, atol=1e-3)


def test_generation_and_kept_decisions_do_without_it() -> None:
    """A decision that a cache keeps is the whole one; the experts are taken out of it in every step."""
    model = adapted(granularity="sequence", top_k=1).eval()
    greedy: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    with mj.knock_out(model, {"0": ROUTED, "1": ROUTED}), mj.record_routing(model) as trace:
        model.generate(token_ids(1, 5), **greedy)
    assert trace.load("0").mean_gate == [0, 0, 0]
    assert not trace.gates("1").any()


def test_another_thread_does_not_see_it() -> None:
    model, found = adapted().eval(), []
    before = logits(model)
    with mj.knock_out(model, {"0": ROUTED}):
        thread = threading.Thread(target=lambda: found.append(logits(model)))
        thread.start()
        thread.join()
        assert not torch.equal(logits(model), before)
    assert torch.equal(found[0], before)


def test_another_model_of_this_thread_does_not_see_it() -> None:
    model, other = adapted().eval(), adapted().eval()
    before = logits(other)
    with mj.knock_out(model, {"0": ROUTED}):
        assert torch.equal(logits(other), before)


def test_names_that_are_not_there() -> None:
    with pytest.raises(mj.ConfigError) as error, mj.knock_out(adapted(), {"7": ["q_proj"], "0": ["o_proj"]}):
        pass
    assert "block '7' routes nothing" in str(error.value)
    assert "block '0' has no expert 'o_proj'" in str(error.value)
    with pytest.raises(mj.ConfigError, match="routes nothing"), mj.knock_out(built("more"), {"0": ["expert 0"]}):
        pass


@pytest.mark.parametrize("method", ["mjlora", "hydralora", "mola", "moa"])
def test_probabilities_of_experts_below_the_top_k(method: str) -> None:
    model = model_of(method)
    with mj.record_routing(model, probabilities=True) as trace:
        logits(model)
    for key in trace.blocks():
        gates, p = trace.gates(key), trace.probabilities(key)
        assert p is not None
        assert (p > 0).all()
        if method in ("mjlora", "mola"):
            torch.testing.assert_close(p.sum(-1), torch.ones_like(p[..., 0]))
        if method != "mola":  # which renormalises
            torch.testing.assert_close(gates[gates > 0], p[gates > 0])
    with mj.record_routing(model) as trace:
        logits(model)
    assert trace.probabilities(trace.blocks()[0]) is None
