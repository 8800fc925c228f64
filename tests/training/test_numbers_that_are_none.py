"""Losses that are no numbers, steps that do not fit, experts that die: what a run does about them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Trainer

from monkeyjump.errors import ConfigError, NoMemoryError
from monkeyjump.training.recipe import Recipe, load_recipe
from monkeyjump.training.run import run
from monkeyjump.training.trainer import NotFinite
from monkeyjump.tuner.centers.revive import revive_experts
from monkeyjump.tuner.layer import MonkeyJumpLayer
from monkeyjump.tuner.trace import record_routing
from tests.helpers import adapted, lm_batch, routing_state, tiny_llama
from tests.tiny_folder import save_tiny_model, write_recipe


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return write_recipe(folder, save_tiny_model(folder / "tiny"))


@pytest.fixture
def spoiled(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The loss of the sixth batch is NaN; its ids."""
    seen: list[torch.Tensor] = []
    loss_of = Trainer.compute_loss

    def compute_loss(self: Trainer, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        found: Any = loss_of(self, model, inputs, *args, **kwargs)
        if self.state.global_step == 5:
            seen.append(inputs["input_ids"])
            return found * float("nan")
        return found

    monkeypatch.setattr(Trainer, "compute_loss", compute_loss)
    return seen


def recipe(path: Path, output: Path, *settings: str) -> Recipe:
    return load_recipe(str(path), [f"output={output}", *settings])


def test_training_stops_and_names_the_rows(
    recipe_file: Path, tmp_path: Path, spoiled: list[torch.Tensor], capsys: pytest.CaptureFixture[str]
) -> None:
    """It is seen at the next log, and the batch that did it is told from the others since the last one."""
    result = run(recipe(recipe_file, tmp_path, "train.log_steps=4"), test=False)
    assert result.measurements["steps"] == result.measurements["diverged_at"] == 8
    assert result.best_validation is not None  # of step 4
    said = capsys.readouterr().out
    begin = result.tokenizer.decode(spoiled[0][0], skip_special_tokens=True).strip()[:50]
    assert f"no finite number since step 6, whose rows begin with {begin!r}"[:-1] in said
    assert all(torch.isfinite(tensor).all() for tensor in routing_state(result.model).values())


def test_a_step_is_left_out(recipe_file: Path, tmp_path: Path, spoiled: list[torch.Tensor]) -> None:
    """The run is the one without that step: the optimiser saw seven gradients, and all weights are numbers."""
    result = run(recipe(recipe_file, tmp_path, "train.not_finite=skip"), test=False)
    assert len(spoiled) == 1
    assert (result.measurements["steps"], result.measurements["skipped_steps"]) == (8, 1)
    assert all(torch.isfinite(p).all() for p in result.model.parameters())
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    assert losses[7] == losses[7]


def test_every_step_that_is_left_out_is_told_by_its_own_rows(capsys: pytest.CaptureFixture[str]) -> None:
    model, tokenizer = torch.nn.Linear(2, 1), SimpleNamespace(decode=lambda row, **_: f"row {int(row[0])}")
    finite = NotFinite(skip=True, tokenizer=tokenizer)
    for step in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, float("nan"))
        finite.recent.append((step + 1, torch.tensor(float("nan")), torch.tensor([[step]])))
        finite.on_pre_optimizer_step(None, SimpleNamespace(global_step=step), None, model=model)
        assert all(parameter.grad is None for parameter in model.parameters())
    said = capsys.readouterr().out.splitlines()
    assert [line[-8:] for line in said] == ["'row 0'.", "'row 1'.", "'row 2'."]
    assert finite.skipped == 3


def test_a_step_that_does_not_fit_says_what_to_lower(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nand more")

    monkeypatch.setattr(Trainer, "training_step", full)
    with pytest.raises(NoMemoryError, match=r"out of memory: step 1 does not fit.*20.00 GiB. Lower train.batch_size=4"):
        run(recipe(recipe_file, tmp_path), test=False)
    assert issubclass(NoMemoryError, ConfigError)


@pytest.mark.parametrize("unit", ["adapter", "rank"])
def test_a_dead_expert_is_revived_beside_the_busiest(unit: str) -> None:
    model = adapted(tiny_llama(2), ema_stop=0, ema_interval=1, top_k=1, expert_unit=unit).train()
    batch = lm_batch(batch=4, length=12)
    layers = [layer for layer in model.modules() if isinstance(layer, MonkeyJumpLayer)]
    routed = [layer for layer in layers if "default" in layer.monkeyjump_center]
    centers = {layer.path: layer.monkeyjump_center["default"] for layer in routed}
    with torch.no_grad():
        for path, center in centers.items():
            # of two equal centres the first is chosen; with one number in them the tie is exact on any machine
            if path.endswith(("q_proj", "v_proj")):
                center.copy_(torch.eye(center[..., 0].numel(), center.shape[-1]).view_as(center))

    def shares() -> dict[str, dict[str, float]]:
        with record_routing(model) as trace, torch.no_grad():
            model(**batch)
        loads = {block: trace.load(block) for block in trace.blocks()}
        return {block: dict(zip(load.experts, load.share, strict=True)) for block, load in loads.items()}

    model(**batch)  # what is staged tells the busiest
    before = shares()
    idle = {block: [name for name, share in found.items() if share == 0] for block, found in before.items()}
    assert any(idle.values())
    start = routing_state(model)
    revive_experts(model, idle)
    after = shares()
    revived = [after[block][name] for block, names in idle.items() for name in names]
    assert sum(share > 0 for share in revived) >= len(revived) / 2
    moved = [name for name, tensor in routing_state(model).items() if not torch.equal(tensor, start[name])]
    assert moved
    assert all("v_proj" in name or unit == "rank" for name in moved)
