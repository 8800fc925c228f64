"""MoE-AdaLoRA's rank budget: by default a rarely used expert looks unimportant, with `score_per_token` it does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import monkeyjump as mj
from monkeyjump.adapters import AdaLoraAdapter
from monkeyjump.adapters.mixture import AdaLoraMixture
from tests.helpers import assert_same, layers_of, lm_batch
from tests.methods.common import config_of, moved

BUDGET: dict[str, Any] = {"r": 2, "target_r": 1, "total_step": 4}
PLACES: dict[str, tuple[str, dict[str, Any]]] = {
    "a router per projection": ("moe_adalora", {}),
    "a router per block": ("moe_adalora", {"router_scope": "block"}),
    "whole feed-forwards": ("mixlora published", {"adapter": "adalora"}),
}
every_place = pytest.mark.parametrize("place", PLACES)


def model_of(place: str, **changes: Any) -> Any:
    case, own = PLACES[place]
    return moved(case, **{**BUDGET, "score_per_token": True, **own, **changes}).train()


def batch_with_padding(seed: int) -> dict[str, torch.Tensor]:
    batch = lm_batch(seed=seed)
    batch["attention_mask"][seed % 3, : 1 + seed] = 0
    return batch


def counts_of(model: Any) -> dict[str, torch.Tensor]:
    """Tokens sent to each expert, then all tokens, of every mixture."""
    return {
        path: torch.zeros(5, dtype=torch.int64) if adapter.tokens is None else adapter.tokens.clone()
        for path, layer in layers_of(model).items()
        if isinstance(adapter := layer.monkeyjump_adapter["default"], AdaLoraMixture)
    }


def expected_counts(model: Any, batches: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The same from the recorded gates and the masks."""
    total = {path: torch.zeros(5, dtype=torch.int64) for path in counts_of(model)}
    for batch in batches:
        with mj.record_routing(model) as trace, torch.no_grad():
            model(**batch)
        real = batch["attention_mask"].bool()
        for path in total:
            _, _, block, _, name = path.rsplit(".", 4)
            key = f"{block}.{name}" if f"{block}.{name}" in trace.blocks() else block
            total[path] += torch.cat([(trace.gates(key) > 0)[real].sum(0), real.sum()[None]])
    return total


@every_place
def test_every_real_token_is_counted_once(place: str) -> None:
    """Over two micro-batches; not in evaluation, not without gradients, and forgotten once it was used."""
    model = model_of(place)
    batches = [batch_with_padding(seed) for seed in (0, 1)]
    expected = expected_counts(model, batches)
    assert not any(count.any() for count in counts_of(model).values())
    for batch in batches:
        model(**batch).loss.backward()
    model.eval()(**batches[0])
    assert_same(counts_of(model), expected)
    assert len({tuple(count[:-1].tolist()) for count in expected.values()}) > 1
    mj.allocate_ranks(model)
    assert not any(count.any() for count in counts_of(model).values())


@every_place
def test_a_recomputation_counts_nothing(place: str) -> None:
    model = model_of(place)
    expected = expected_counts(model, [batch_with_padding(1)])
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model(**batch_with_padding(1)).loss.backward()
    assert_same(counts_of(model), expected)


def two_experts(per_token: bool) -> AdaLoraMixture:
    """Two experts with the same factors and like tokens: 2 of 20 reach the first, whose ranks matter a tenth more."""
    config = config_of("moe_adalora", experts=2, score_per_token=per_token, **{**BUDGET, "r": 2})
    torch.manual_seed(0)
    adapter = AdaLoraMixture(8, 6, config, experts=2)
    with torch.no_grad():
        adapter.A[2:] = adapter.A[:2]
        adapter.B[:, 2:] = adapter.B[:, :2]
        adapter.diagonal.copy_(torch.tensor([1.1, 2.2, 1.0, 2.0]))
    gate = torch.zeros(20, 2)
    gate[:2, 0] = 1
    gate[2:, 1] = 1
    adapter.delta(torch.ones(20, 8), torch.zeros(20, 6), gate).sum().backward()
    if per_token:
        adapter.count_tokens(torch.tensor([2, 18, 20]))
    return adapter


def test_importance_does_not_depend_on_how_many_tokens_came_by() -> None:
    for per_token, ratio in ((True, 1.1), (False, 1.1 * 2 / 18)):
        adapter = two_experts(per_token)
        adapter.observe_gradients()
        sensitivity: Any = adapter.sensitivity_diagonal
        torch.testing.assert_close(sensitivity[:2] / sensitivity[2:], torch.full((2,), ratio))
        first, second = adapter.importance().view(2, 2)
        assert bool((first > second).all()) is per_token
    torch.testing.assert_close(first / second, torch.full((2,), ratio**2), rtol=0.2, atol=0)  # the biased score


def test_the_sensitivity_is_that_of_a_token() -> None:
    """|lam * grad| over the share of the tokens, smoothed as AdaLoRA does."""
    adapter = two_experts(per_token=True)
    grad, share = adapter.diagonal.grad, torch.tensor([0.1, 0.1, 0.9, 0.9])
    assert grad is not None
    once = (adapter.diagonal * grad).abs().detach() / share
    adapter.observe_gradients()
    torch.testing.assert_close(adapter.sensitivity_diagonal, 0.15 * once)
    torch.testing.assert_close(adapter.uncertainty_diagonal, 0.15 * (once - 0.15 * once))


def test_an_expert_that_no_token_reached_keeps_its_statistics() -> None:
    adapter = two_experts(per_token=True)
    adapter.observe_gradients()
    before = {k: v.clone() for k, v in adapter.state_dict().items() if k.endswith("_diagonal")}
    assert adapter.diagonal.grad is not None
    adapter.diagonal.grad[:2] = 0
    adapter.count_tokens(torch.tensor([0, 20, 20]))
    adapter.observe_gradients()
    for name, value in before.items():
        torch.testing.assert_close(adapter.state_dict()[name][:2], value[:2], rtol=1e-6, atol=0)
        assert (adapter.state_dict()[name][2:] != value[2:]).all()
    assert adapter.state_dict()["sensitivity_diagonal"].isfinite().all()


def test_a_shared_adapter_beside_a_mixture_is_reached_by_all() -> None:
    model = model_of("a router per projection", shared_modules=["o_proj"])
    model(**lm_batch()).loss.backward()
    plain = [m for m in model.modules() if isinstance(m, AdaLoraAdapter) and not isinstance(m, AdaLoraMixture)]
    assert len(plain) == 2
    mj.allocate_ranks(model)
    for adapter in plain:
        assert adapter.diagonal.grad is not None
        expected = 0.15 * (adapter.diagonal * adapter.diagonal.grad).abs()
        kept = adapter.diagonal != 0
        torch.testing.assert_close(adapter.get_buffer("sensitivity_diagonal")[kept], expected[kept])


def test_counts_are_those_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are averaged over the ranks, so every rank must divide by the same shares."""
    model = model_of("a router per projection")
    model(**lm_batch()).loss.backward()
    local = counts_of(model)
    seen: list[torch.Tensor] = []

    def all_reduce(flat: torch.Tensor) -> None:
        seen.append(flat.clone())
        flat.mul_(3)

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    shares: dict[int, torch.Tensor] = {}
    observe = AdaLoraAdapter.observe_gradients

    def recording(adapter: AdaLoraAdapter) -> None:
        assert adapter.tokens is not None
        shares[id(adapter)] = adapter.tokens
        observe(adapter)

    monkeypatch.setattr(AdaLoraAdapter, "observe_gradients", recording)
    mj.allocate_ranks(model)
    assert len(seen) == 1
    assert torch.equal(seen[0], torch.cat(list(local.values())))
    assert torch.equal(torch.cat(list(shares.values())), 3 * seen[0])


@pytest.mark.parametrize(("tfinal", "deltaT"), [(0, 5), (2, 5), (3, 7)])
def test_the_target_is_reached_whatever_the_interval(tfinal: int, deltaT: int) -> None:
    """No `deltaT`-th step falls into the end of the schedule, where the budget is the target."""
    settings = {**BUDGET, "total_step": 4, "tfinal": tfinal, "deltaT": deltaT}
    model = moved("moe_adalora", **settings).train()
    adapters = [m for m in model.modules() if isinstance(m, AdaLoraAdapter)]
    for step in range(1, 5):
        model.zero_grad()
        model(**lm_batch(seed=step)).loss.backward()
        budget = mj.allocate_ranks(model)
        alive = sum(int((adapter.diagonal != 0).sum()) for adapter in adapters)
        assert alive == (budget if step >= 4 - tfinal else 2 * 4 * len(adapters))
    assert budget == 4 * len(adapters)


def test_without_the_option_nothing_is_counted() -> None:
    model = moved("moe_adalora", **BUDGET).train()
    model(**lm_batch()).loss.backward()
    assert not any(count.any() for count in counts_of(model).values())


@pytest.mark.parametrize(
    ("method", "settings"),
    [("adalora", {}), ("mjadalora", {}), ("moelora", {}), ("moe_adalora", {"router": "uniform", "aux_loss_weight": 0})],
)
def test_it_needs_a_mixture_of_adalora_experts(method: str, settings: dict[str, Any]) -> None:
    with pytest.raises(
        mj.ConfigError,
        match=r"score_per_token(=True compares the experts of a mixture|', which adapter 'lora' does not have)",
    ):
        mj.methods.build(method, "mj_paper", score_per_token=True, **settings)
