"""Learned routers under the compiler: blocks share their graphs, and what a graph stages is what eager mode stages."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from monkeyjump.ops.dispatch import implementation
from monkeyjump.routing.learned import LearnedDecision, balance_loss, decide_together, load_and_probability
from monkeyjump.training.compile import compiled
from monkeyjump.tuner.trace import staged_load
from tests.helpers import COMPILING, assert_same, gradients, tiny_llama
from tests.methods.common import LOUD, batch_for, learned_routers, moved

pytestmark = COMPILING
TARGETS = ["q_proj", "v_proj"]
LEARNED: dict[str, dict[str, Any]] = {
    **{name: {"target_modules": TARGETS} for name in ("moelora", "hydralora", "mixlora", "moa", "more")},
    **{name: {"target_modules": TARGETS} for name in ("moe_lora_fa", "moe_adalora", "moe_propulsion")},
    "mola": {"target_modules": TARGETS, "experts": 3},  # blocks with different numbers of experts are different graphs
    "mixlora published": {},
    "moa published": {},
}


def batch_of(case: str, seed: int = 0) -> dict[str, torch.Tensor]:
    batch = batch_for(case, seed=seed)
    batch["attention_mask"][0, :2] = 0
    return batch


def model_of(case: str, layers: int = 3, **changes: Any) -> Any:
    base = tiny_llama(layers)
    base.config.use_cache = False
    return moved(case, base, **{**LOUD.get(case, {}), **LEARNED[case], **changes}).train()


def step(model: Any, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Everything that a training forward and its backward leave behind."""
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    losses = model.base_model.routing.losses
    assert not any(said.probability is not None or said.contrastive is not None for said in losses.statements.values())
    loads = {f"load {key}": load for (_, key), load in losses.loads.items()}
    return {"loss": loss.detach(), **loads, **{f"last {k}": v for k, v in losses.last.items()}, **gradients(model)}


# one of each way to route: every projection, whole experts, ranks, after the norm
@pytest.mark.parametrize("case", ["moelora", "mixlora published", "more", "moa published"])
def test_blocks_share_their_graphs(case: str) -> None:
    """Two for a shape, as without routers: the first block's input needs no gradient. No third at the second step."""
    model = model_of(case)
    twin = copy.deepcopy(model)
    with compiled(model, "blocks", backend="eager") as report:  # test_compile.py compiles the backward too
        for seed in range(2):
            assert_same(step(model, batch_of(case, seed)), step(twin, batch_of(case, seed)), rtol=1e-4, atol=1e-5)
    assert report.graphs == 1


@pytest.mark.parametrize("case", ["moelora"])
def test_blocks_share_their_graphs_with_kernels(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With q and v in one group, whose routers read x in one pass and decide together."""
    together: list[LearnedDecision | None] = []

    def spy(*args: Any) -> LearnedDecision | None:
        together.append(decide_together(*args))
        return together[-1]

    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = model_of(case, contrastive_weight=0.0, target_modules=[*TARGETS, "o_proj"]).to(device)
    batch = {name: value.to(device) for name, value in batch_of(case).items()}
    with implementation("triton"):
        with monkeypatch.context() as patch:
            patch.setattr("monkeyjump.routing.learned.decide_together", spy)
            eager = step(model, batch)
        assert [decision is not None for decision in together] == 3 * [True, False]  # q and v, then o
        with implementation("torch"):
            assert_same(eager, step(model, batch), rtol=1e-4, atol=1e-5)
        with compiled(model, "blocks", backend="aot_eager") as report:
            for _ in range(2):
                assert_same(step(model, batch), eager, rtol=1e-4, atol=1e-5)
    assert report.graphs == 1


@contextmanager
def decisions(model: nn.Module) -> Iterator[dict[str, LearnedDecision]]:
    """What every router decided, by its path."""
    found: dict[str, LearnedDecision] = {}

    def keep(path: str) -> Any:
        return lambda module, args, output: found.__setitem__(path, output)

    handles = [router.register_forward_hook(keep(path)) for path, router in learned_routers(model).items()]
    yield found
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize(
    "case", ["moelora", "mola", "moe_lora_fa", "moe_adalora", "moe_propulsion", "mixlora published"]
)
def test_losses_and_loads_are_those_of_every_router(case: str) -> None:
    model, batch = model_of(case), batch_of(case)
    config = model.peft_config["default"]
    with decisions(model) as found:
        step(model, batch)
    mask = batch["attention_mask"].bool()
    said = [load_and_probability(decision, mask) for decision in found.values()]
    loads, probabilities = (torch.stack(both) for both in zip(*said, strict=True))
    if config.learned.lb_reduce == "global":
        loads, probabilities = loads.mean(0, keepdim=True), probabilities.mean(0, keepdim=True)
    each = torch.stack(
        [balance_loss(f, p, config.top_k, config.learned.lb_norm) for f, p in zip(loads, probabilities, strict=True)]
    )
    expected = each.sum() if config.learned.lb_reduce == "sum" else each.mean()
    torch.testing.assert_close(model.base_model.routing.losses.last["balance"], expected, rtol=1e-6, atol=1e-7)
    staged = staged_load(model)
    if "published" in case:
        assert list(staged) == ["0", "1", "2"]
    else:
        assert list(staged) == [f"{block}.{name}" for block in range(3) for name in TARGETS]
    for (load, _), shown in zip(said, staged.values(), strict=True):
        assert shown.share == load.tolist()


def test_an_adapter_that_is_deleted_says_no_more() -> None:
    model = model_of("moelora", layers=1)
    losses = model.base_model.routing.losses
    step(model, batch_of("moelora"))
    assert losses.loads
    model.add_adapter("second", model.peft_config["default"])
    model.set_adapter("second")
    model.delete_adapter("default")
    assert {adapter for adapter, _ in losses.statements} == {"second"}
    step(model, batch_of("moelora"))
    assert {adapter for adapter, _ in losses.loads} == {"second"}
