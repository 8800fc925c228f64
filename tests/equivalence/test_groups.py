"""`task_experts=N` where centres decide: experts are dealt out to N groups, and a group is chosen as a whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import monkeyjump as mj
from monkeyjump.tuner.centers.revive import revive_experts
from monkeyjump.tuner.count import count_parameters
from tests.helpers import (
    adapted,
    assert_same,
    gradients,
    lm_batch,
    mj_config,
    routed_layers,
    routing_state,
    tiny_llama,
    train_steps,
    wrap,
)

R = 2
GROUPS: dict[str, Any] = {"r": R, "expert_unit": "rank", "task_experts": 2, "top_k": 1, "renormalize": True}
BY_PROMPT: dict[str, Any] = {**GROUPS, "granularity": "sequence", "sequence_token": "mean"}


def centers_of(model: Any) -> dict[str, Tensor]:
    """The centres [E, D] of every block."""
    routers = mj.tuner.model.require_context(model).routers()
    return {
        router.key: torch.cat([layer.monkeyjump_center["default"] for layer in router.layers["default"]])
        for router in routers
    }


def entering(model: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    states: dict[str, Tensor] = {}
    handles = []
    for path, block in model.named_modules():
        if path.endswith(("layers.0", "layers.1")):
            keep = lambda module, args, kwargs, key=path[-1]: states.__setitem__(key, args[0])  # noqa: E731
            handles.append(block.register_forward_pre_hook(keep, with_kwargs=True))
    model(**batch)
    for handle in handles:
        handle.remove()
    return states


@pytest.mark.parametrize(("groups", "top_k"), [(2, 1), (3, 2), (6, 2)])
def test_a_group_is_chosen_as_a_whole(groups: int, top_k: int) -> None:
    """Gates from the definition: a softmax over the centres of groups, the same gate for all experts of one."""
    settings = {"task_experts": groups, "top_k": top_k, "renormalize": False, "center_init": "random"}
    model = adapted(**{**GROUPS, **settings}).eval()
    with mj.record_routing(model) as trace, torch.no_grad():
        states = entering(model, lm_batch())
    for key, centers in centers_of(model).items():
        place = torch.arange(3 * R) % groups
        assert torch.equal(centers, centers[place])
        assert len(centers.unique(dim=0)) == groups
        p = torch.nn.functional.cosine_similarity(states[key].unsqueeze(-2), centers[:groups], dim=-1).softmax(-1)
        gates = p * (p >= p.topk(top_k, -1).values[..., -1:])
        torch.testing.assert_close(trace.gates(key), gates[..., place], atol=1e-6, rtol=1e-5)


def test_as_many_groups_as_experts_are_none() -> None:
    models = [adapted(**{**GROUPS, "task_experts": groups}) for groups in (None, 3 * R)]
    losses = [train_steps(model, iter([lm_batch(seed=s) for s in range(3)])) for model in models]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    assert_same(gradients(models[0]), gradients(models[1]), atol=1e-6, rtol=1e-5)
    assert_same(routing_state(models[0]), routing_state(models[1]), atol=1e-6, rtol=1e-5)


def test_prompts_that_tell_the_task_are_the_oracle() -> None:
    """Groups found by the prompt and groups told by the task: the same losses and gradients."""
    batch = lm_batch(batch=4)
    found = adapted(tiny_llama(1), **BY_PROMPT, center_init="kmeans", ema_stop=0)
    mj.initialize_centers(found, [lm_batch(batch=4)], progress=False)
    with mj.record_routing(found) as trace, torch.no_grad():
        found.eval()(**batch)
    chosen = trace.gates("0")[:, 0, :2].argmax(-1)
    assert len(chosen.unique()) == 2
    told = adapted(tiny_llama(1), **{**GROUPS, "granularity": "task"})
    losses = [
        train_steps(model, iter([given])) for model, given in ((found, batch), (told, {**batch, "task_ids": chosen}))
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    assert_same(gradients(found), gradients(told), atol=1e-6, rtol=1e-5)


def test_centres_of_a_group_move_together() -> None:
    model = adapted(**GROUPS, ema_interval=1, ema_momentum=0.0).train()
    first = centers_of(model)
    with mj.record_routing(model) as trace:
        states = entering(model, lm_batch(batch=6))
    model(**lm_batch(seed=1))  # commits
    moved = 0
    for key, centers in centers_of(model).items():
        assert torch.equal(centers, centers[torch.arange(3 * R) % 2])
        own = torch.nn.functional.normalize(states[key], dim=-1)
        chosen = trace.gates(key)[..., :2].argmax(-1)
        for group in range(2):
            expected = own[chosen == group].mean(0) if bool((chosen == group).any()) else first[key][group]
            torch.testing.assert_close(centers[group], expected, atol=1e-6, rtol=1e-5)
        moved += not torch.equal(centers, first[key])
    assert moved == 2


@pytest.mark.parametrize("init", ["kmeans", "random_tokens", "random_normalized"])
def test_a_group_has_one_centre(init: str) -> None:
    model = wrap(tiny_llama(), **BY_PROMPT, center_init=init, route_space="centered")
    report = mj.initialize_centers(model, [lm_batch(seed=s) for s in range(4)], progress=False)
    assert all(len(shares) == 2 and sum(shares) == pytest.approx(1) for shares in report.shares.values())
    for centers in centers_of(model).values():
        assert torch.equal(centers, centers[torch.arange(3 * R) % 2])
        assert len(centers.unique(dim=0)) == 2


def test_a_revived_group_keeps_one_centre() -> None:
    model = adapted(**GROUPS).train()
    model(**lm_batch())
    revive_experts(model, {"0": ["q_proj.1", "k_proj.1", "v_proj.1"]})
    centers = centers_of(model)["0"]
    assert torch.equal(centers[1], centers[3])
    assert torch.equal(centers[1], centers[5])
    assert not torch.equal(centers[0], centers[1])


def test_groups_need_no_parameters() -> None:
    sizes = [count_parameters(wrap(tiny_llama(), **{**GROUPS, "task_experts": groups})) for groups in (None, 2)]
    assert sizes[0] == sizes[1]
    assert mj_config(**BY_PROMPT).groups == 2
    assert mj_config(**{**GROUPS, "granularity": "task"}).groups is None
    assert len(routed_layers(wrap(tiny_llama(), **BY_PROMPT))) == 6
