"""What figures do to a model, which they leave as it was; and collection against the public trace, method by method."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from peft import get_peft_model

import monkeyjump as mj
from monkeyjump.analysis.changed_models import (
    answer_nll,
    before_training,
    can_permute,
    centers_of,
    permute_experts,
)
from monkeyjump.analysis.collect import collect
from monkeyjump.analysis.rows import Rows, mean_gate, rows_of_tasks
from monkeyjump.analysis.theory import check_ranks, groups
from monkeyjump.tasks.encode import Encoder
from monkeyjump.training.recipe import Recipe
from tests.evaluation.toys import TASKS, add_adapter, make_model, make_tokenizer
from tests.helpers import adapter_tensors, assert_same, disturb


@pytest.fixture(scope="module")
def rows() -> dict[str, Rows]:
    encoder = Encoder(make_tokenizer(), {task.name: place for place, task in enumerate(TASKS)}, max_length=256)
    return rows_of_tasks(encoder, TASKS, 6, None, seed=0)


def test_the_mean_gate_is_that_of_all_tokens(
    model: Any, rows: dict[str, Rows], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Recipe(data={"max_length": 256})  # type: ignore[arg-type]
    monkeypatch.setattr("monkeyjump.analysis.rows.GATE_ROWS", 6 * len(TASKS))
    found = mean_gate(model, make_tokenizer(), TASKS, recipe)
    usage, tokens = collect(model, rows).usage, []
    for some in rows.values():
        tokens.append(sum(int(batch["attention_mask"].sum()) for batch in some))
    by_task = [[gate for load in loads.values() for gate in load.mean_gate] for loads in usage.loads.values()]
    assert found == pytest.approx(np.average(np.mean(by_task, 1), weights=tokens))
    assert mean_gate(make_model(), make_tokenizer(), TASKS, recipe) is None


@pytest.fixture
def model() -> Any:
    adapted = add_adapter(make_model())
    mj.initialize_centers(adapted)
    return adapted


@pytest.mark.parametrize("method", ["mjlora", "moelora", "hydralora", "moa", "more", "mjlora_oracle", "lime"])
def test_collection_counts_what_the_trace_counts(method: str, rows: dict[str, Rows]) -> None:
    settings: dict[str, dict[str, Any]] = {"more": {"tasks": 3}, "mjlora": {"center_init": "random"}}
    own = settings.get(method, {})
    model = get_peft_model(make_model(), mj.methods.build(method, "mj_paper", **own))
    if method == "mjlora":
        mj.initialize_centers(model)
    disturb(model)
    found = collect(model.eval(), rows, sample=60)
    assert found.usage.blocks
    for task, some in rows.items():
        with mj.record_routing(model) as trace, torch.no_grad():
            for batch in some:
                model(**{name: value for name, value in batch.items() if name != "labels"})
        assert found.usage.loads[task].keys() == set(trace.blocks())
        for block, load in found.usage.loads[task].items():
            assert load.experts == trace.load(block).experts
            assert load.share == pytest.approx(trace.load(block).share)
            assert load.mean_gate == pytest.approx(trace.load(block).mean_gate)
    for _, _, outputs, gates in groups(model, found):
        ranks = check_ranks(outputs, gates)
        assert max(ranks.hard, ranks.soft) <= ranks.reached <= ranks.full


@pytest.mark.parametrize(
    ("method", "can"), [("mjlora", True), ("moelora", True), ("mjlora_oracle", False), ("lime", False)]
)
def test_routers_that_have_something_to_permute(method: str, can: bool) -> None:
    """Of one without, the figure would say that permutations change nothing."""
    assert can_permute(get_peft_model(make_model(), mj.methods.build(method, "mj_paper"))) == can


def test_permuted_experts_exchange_their_centres_and_the_loss_is_the_models_own(
    model: Any, rows: dict[str, Rows]
) -> None:
    before = centers_of(model)
    permute_experts(model, torch.Generator().manual_seed(1))
    after = centers_of(model)
    for block in ("layers.0.", "layers.1."):
        stacks = [
            sorted(tensor.tolist() for path, tensor in found.items() if block in path) for found in (before, after)
        ]
        assert stacks[0] == stacks[1]
    assert any(not torch.equal(before[path], after[path]) for path in before)
    some = rows["first"]
    with torch.no_grad():
        loss = model(**some.collate(some.sequences)).loss
    assert answer_nll(model, {"first": some})["first"] == pytest.approx(float(loss), rel=1e-4)


def test_the_model_of_step_0_is_the_base_and_is_put_back(model: Any, rows: dict[str, Rows]) -> None:
    kept = {name: tensor.clone() for name, tensor in adapter_tensors(model).items()}
    permute_experts(model, torch.Generator().manual_seed(1))
    centers = centers_of(model)
    batch = {"input_ids": next(iter(rows["first"]))["input_ids"]}
    with torch.no_grad():
        trained = model(**batch).logits
        with model.disable_adapter():
            base = model(**batch).logits
        with before_training(model, None, None, rows) as words:
            torch.testing.assert_close(model(**batch).logits, base)
        torch.testing.assert_close(model(**batch).logits, trained)
    assert words == "random with seed 0"
    assert not torch.allclose(trained, base)
    assert_same(adapter_tensors(model), kept)
    assert_same(centers_of(model), centers)
