"""Learned routers and their losses, by themselves and in a model."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import monkeyjump as mj
from monkeyjump.ops.precision import PreciseLinear
from monkeyjump.routing.centroid import shuffled_gates
from monkeyjump.routing.learned import (
    LearnedDecision,
    LearnedRouter,
    balance_loss,
    contrastive_loss,
    load_and_probability,
    sample_tokens,
)
from monkeyjump.tuner.trace import staged_load
from tests.helpers import adapted, lm_batch, mj_config, tiny_llama
from tests.methods.common import learned_routers, spread

MIXTURE: dict[str, Any] = {"placement": "projection", "router": "linear", "shared_modules": None}


def router(experts: int = 4, width: int = 6, **changes: Any) -> LearnedRouter:
    torch.manual_seed(0)
    return LearnedRouter(width, experts, mj_config(**{"router": "linear", **changes}))


def test_top_k_and_renormalisation() -> None:
    x = torch.randn(2, 3, 6)
    dense, top = router(top_k=None)(x), router(top_k=2)(x)
    torch.testing.assert_close(dense.gates.sum(-1), torch.ones(2, 3))
    assert ((top.gates > 0).sum(-1) == 2).all()
    assert torch.equal(top.gates[top.chosen], dense.gates[top.chosen])
    torch.testing.assert_close(router(top_k=2, renormalize=True)(x).gates.sum(-1), torch.ones(2, 3))


def test_starts_small_and_random() -> None:
    normal, kaiming = router(width=500), router(width=500, router_init="kaiming")
    assert float(normal.weight.detach().std()) == pytest.approx(0.02, rel=0.1)
    assert kaiming.weight.abs().max() <= 1 / math.sqrt(500)
    sigmoid: Any = router(router="sigmoid", top_k=None, threshold=0.5)
    assert not sigmoid.bias.any()
    torch.testing.assert_close(sigmoid(torch.zeros(1, 6)).gates, torch.full((1, 4), 0.5))


@pytest.mark.parametrize("grad", ["none", "ste", "subtract"])
def test_threshold_gradients(grad: str) -> None:
    module = router(router="sigmoid", top_k=None, threshold=1.0, threshold_grad=grad)
    spread(module, 1.0)
    x = torch.randn(8, 6)
    decision = module(x)
    bar = torch.sigmoid(x @ module.threshold.T + module.threshold_bias)
    kept = decision.probabilities >= bar
    assert torch.equal(decision.chosen, kept)
    assert 0 < kept.float().mean() < 1
    assert not decision.gates[~kept].any()
    decision.gates.sum().backward()
    assert module.threshold.grad is not None  # none: a gradient of zero, so that no parameter is left out
    assert bool(module.threshold.grad.any()) is (grad != "none")


def test_precise_linear_is_a_linear() -> None:
    x: Any
    x, weight = torch.randn(2, 3, 5, dtype=torch.bfloat16), torch.randn(4, 5)
    x.requires_grad_()
    weight.requires_grad_()
    PreciseLinear.apply(x, weight).square().sum().backward()
    plain_x, plain_weight = x.detach().float().requires_grad_(), weight.detach().clone().requires_grad_()
    (plain_x @ plain_weight.T).square().sum().backward()
    torch.testing.assert_close(weight.grad, plain_weight.grad)
    torch.testing.assert_close(x.grad.float(), plain_x.grad, rtol=1e-2, atol=1e-2)


# --- balance ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("norm", "even"), [("switch", 1.0), ("mixtral", 2.0)])
def test_balance_of_an_even_and_of_a_collapsed_load(norm: str, even: float) -> None:
    load, p = torch.full((4,), 0.25), torch.full((4,), 0.25)
    assert float(balance_loss(load, p, 2, norm)) == pytest.approx(even)
    collapsed = torch.tensor([0.5, 0.5, 0.0, 0.0])
    assert float(balance_loss(collapsed, collapsed, 2, norm)) == pytest.approx(2 * even)


def test_load_has_no_gradient_and_padding_counts_for_nothing() -> None:
    p = torch.rand(2, 3, 4, requires_grad=True)
    chosen = p.detach() > 0.5
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]]).bool()
    load, probability = load_and_probability(LearnedDecision(p, p, chosen), mask)
    assert not load.requires_grad
    torch.testing.assert_close(load, chosen[mask].float().sum(0) / chosen[mask].sum())
    torch.testing.assert_close(probability, p[mask].mean(0))
    probability.sum().backward()
    assert not p.grad[~mask].any()  # type: ignore[index]


def collapse_once() -> Any:
    """A hook that turns a router, at its first input, towards the first two experts for nearly every token."""
    done: list[bool] = []

    @torch.no_grad()
    def hook(module: Any, args: tuple) -> None:
        if not done:
            done.append(True)
            mean = args[0].flatten(0, -2).mean(0)
            module.weight[:2] += 3 * mean / mean.square().sum()

    return hook


@pytest.mark.parametrize("reduce", ["mean", "sum", "global"])
def test_a_collapsed_load_becomes_even(reduce: str) -> None:
    """All tokens start at two of four experts; the balance loss alone spreads them."""
    model: Any = adapted(**MIXTURE, aux_loss_weight=1.0, lb_reduce=reduce).train()
    batch = lm_batch(batch=8)
    routers = learned_routers(model).values()
    model.requires_grad_(False)
    for module in routers:
        module.weight.requires_grad_()
        module.register_forward_pre_hook(collapse_once())
    model(**batch)

    def entropy() -> float:
        model(**batch)
        loads = staged_load(model).values()
        return sum(load.entropy for load in loads) / len(loads)

    optimizer = torch.optim.Adam([module.weight for module in routers], lr=0.05)
    before = entropy()
    assert before < 0.85
    for _ in range(40):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    assert entropy() > before + 0.1
    assert float(model.base_model.routing.losses.last["balance"]) < 1.2 * (len(routers) if reduce == "sum" else 1)


def test_nothing_is_held_between_steps() -> None:
    model: Any = adapted(**MIXTURE, aux_loss_weight=0.1, contrastive_weight=0.1).train()
    losses = model.base_model.routing.losses
    model(**lm_batch())
    assert not any(said.probability is not None or said.contrastive is not None for said in losses.statements.values())
    assert all(not value.requires_grad for value in [*losses.last.values(), *losses.loads.values()])
    assert losses.last.keys() == {"balance", "contrastive"}
    model.eval()
    assert model(**lm_batch()).loss < model.train()(**lm_batch()).loss  # evaluation has no auxiliary losses


# --- contrast --------------------------------------------------------------------------------------------------------


def test_contrast_falls_when_experts_differ() -> None:
    torch.manual_seed(0)
    used = torch.ones(6, 3, dtype=torch.bool)
    apart = torch.eye(3).repeat(6, 1, 1) + 0.01 * torch.randn(6, 3, 3)
    assert contrastive_loss(apart, used) < contrastive_loss(torch.randn(6, 3, 3), used)
    start: Any = torch.zeros(6, 3, 3, requires_grad=True)  # B is zero: no direction, no gradient
    contrastive_loss(start, used).backward()
    assert torch.equal(start.grad, torch.zeros_like(start))
    alone = contrastive_loss(apart, torch.eye(6, 3).bool())  # one output per expert: nothing to pull together
    assert float(alone) == 0


def test_contrast_samples_real_tokens() -> None:
    mask = torch.zeros(4, 100, dtype=torch.bool)
    mask[:, :30] = True
    picked = sample_tokens(400, 4, mask, mask.device)
    assert picked is not None
    assert len(picked.unique()) == 64
    assert mask.flatten()[picked].all()
    assert sample_tokens(64, 4, None, mask.device) is None


# --- the control -----------------------------------------------------------------------------------------------------


def test_shuffled_gates_are_those_of_other_real_tokens() -> None:
    gates = torch.arange(40.0).view(4, 10, 1)
    mask = torch.ones(4, 10, dtype=torch.bool)
    mask[0, :4] = mask[2, 7:] = False
    shuffled = shuffled_gates(gates, mask)
    assert not torch.equal(shuffled, gates)
    assert torch.equal(shuffled[mask].sort(0).values, gates[mask].sort(0).values)
    assert sorted(shuffled[~mask].flatten().tolist()) == sorted(gates[~mask].flatten().tolist())
    rows = shuffled_gates(gates[:, :1], mask)
    assert sorted(rows.flatten().tolist()) == gates[:, 0, 0].tolist()


def test_a_trained_adapter_can_be_evaluated_with_shuffled_gates() -> None:
    model: Any = adapted(temperature=0.1).eval()
    with torch.no_grad():
        plain = model(**lm_batch()).logits
        model.peft_config["default"].router = "shuffled"
        assert not torch.allclose(model(**lm_batch()).logits, plain, atol=1e-3)


# --- in a model ------------------------------------------------------------------------------------------------------


def test_the_trace_of_projections() -> None:
    model: Any = adapted(tiny_llama(), **MIXTURE).eval()
    with torch.no_grad(), mj.record_routing(model) as trace:
        model(**lm_batch())
    assert trace.blocks()[:2] == ["0.q_proj", "0.k_proj"]
    assert trace.gates("1.gate_proj").shape == (3, 8, 4)
    assert sum(trace.load("0.q_proj").share) == pytest.approx(1)
