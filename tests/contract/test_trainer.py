# PEFT and Transformers type their models as unions of tensors and modules, and folders as str; tests look inside.
# mypy: disable-error-code="arg-type, attr-defined, call-overload, index, misc, operator, union-attr"
"""Transformers' Trainer with MonkeyJumpCallback: start, log, save, resume, keep the best."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback

import monkeyjump as mj
from monkeyjump.adapters import AdaLoraAdapter
from tests.contract.common import centers_of, logits, state_of
from tests.contract.trainer_runs import SAVED, STEPS, arguments, callback, model_for, resume, rows, run
from tests.helpers import ADAPTER_NAMES, assert_same, tiny_llama
from tests.processes import in_new_processes

every_adapter = pytest.mark.parametrize("adapter", ADAPTER_NAMES)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, Any]]]:
    """All adapters trained without interruption, with a checkpoint on the way."""
    folder = tmp_path_factory.mktemp("runs")
    return folder, {adapter: run(adapter, folder / adapter) for adapter in ADAPTER_NAMES}


@pytest.fixture(scope="module")
def resumed(uninterrupted, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The same runs from those checkpoints on, in a process that knows nothing else."""
    out = tmp_path_factory.mktemp("resumed") / "results.pt"
    in_new_processes(resume, out, uninterrupted[0])
    return torch.load(out)


@every_adapter
def test_resumed_in_a_new_process_is_uninterrupted(adapter: str, uninterrupted, resumed) -> None:
    whole, rest = uninterrupted[1][adapter], resumed[adapter]
    assert_same(rest["state"], whole["state"])
    assert sorted(whole["losses"]) == list(range(1, STEPS + 1))
    assert rest["losses"] == whole["losses"]  # those before the checkpoint come from its log
    assert {int(v) for k, v in rest["state"].items() if "monkeyjump_step" in k} == {STEPS}


@every_adapter
def test_training_moved_everything(adapter: str, uninterrupted) -> None:
    """The equality above would be empty if nothing had happened."""
    torch.manual_seed(3)
    start = model_for(adapter)
    before, after = state_of(start), uninterrupted[1][adapter]["state"]
    frozen = {key for key in before if adapter == "lora_fa" and key.endswith(".A")}
    # AdaLoRA may take every rank of a projection away
    same = {key for key in before if torch.equal(before[key], after[key]) and not key.endswith(".diagonal")}
    assert same == frozen


class Logger(TrainerCallback):
    """Stands where TensorBoard's callback and others are: before those of the user."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))


@every_adapter
@pytest.mark.parametrize("late", [False, True])
def test_logs_show_the_routing(adapter: str, late: bool, tmp_path: Path) -> None:
    """To the history and to every logger, also where the callback comes last."""
    logger, model = Logger(), model_for(adapter, ema_interval=1)
    trainer = Trainer(model, arguments(tmp_path), train_dataset=rows(), callbacks=[logger])
    if late:
        trainer.add_callback(callback())
    else:
        trainer = Trainer(model, arguments(tmp_path), train_dataset=rows(), callbacks=[logger, callback()])
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(entries) == STEPS
    for entry, logged in zip(entries, logger.logs, strict=False):
        assert 0 < entry["router/load_entropy"] <= 1
        assert 0 < entry["router/largest_share"] <= 1
        assert entry["router/dead_experts"] >= 0
        assert {key: entry[key] for key in logged} == logged
        assert "router/center_drift" in logged
    drifts = [entry["router/center_drift"] for entry in entries]
    assert drifts[0] == 0 < drifts[-1]
    assert drifts == sorted(drifts)


@every_adapter
def test_centres_are_those_of_initialize_centers(adapter: str, tmp_path: Path) -> None:
    """ema_stop=0 keeps them where the callback put them; a second model initialised by hand agrees."""
    model = model_for(adapter, ema_stop=0)
    own = callback()
    Trainer(model, arguments(tmp_path, max_steps=2), train_dataset=rows(), callbacks=[own]).train()
    assert own.report is not None
    assert own.report.tokens_kept == 60
    by_hand = model_for(adapter, ema_stop=0)
    generator = torch.Generator().manual_seed(0)
    loader: Any = torch.utils.data.DataLoader(rows(), batch_size=3, shuffle=True, generator=generator)
    mj.initialize_centers(by_hand, loader, 60, seed=0, progress=False)
    assert_same(centers_of(state_of(model)), centers_of(state_of(by_hand)))


def test_without_callback_the_trainer_stops_with_the_reason(tmp_path: Path) -> None:
    trainer = Trainer(model_for("lora"), arguments(tmp_path), train_dataset=rows())
    with pytest.raises(mj.ConfigError, match="MonkeyJumpCallback"):
        trainer.train()


def test_data_order_is_that_of_a_run_without_callback(tmp_path: Path) -> None:
    """The sample for the centres is drawn beside the training data, and dropout draws the same numbers."""
    seen: list[list[torch.Tensor]] = []
    states = []
    for callbacks in ([], [callback()]):
        torch.manual_seed(3)
        model = model_for("lora", center_init="random_normalized", ema_interval=1)
        batches: list[torch.Tensor] = []
        trainer = Trainer(model, arguments(tmp_path), train_dataset=rows(), callbacks=callbacks)
        model.register_forward_pre_hook(
            lambda module, args, kwargs, batches=batches: batches.append(kwargs["input_ids"].clone()), with_kwargs=True
        )
        trainer.train()
        seen.append(batches)
        states.append(state_of(model))
    assert len(seen[0]) == STEPS
    assert_same(*states)

    torch.manual_seed(3)
    model = model_for("lora")  # k-means: the callback runs the model before the training does
    batches = []
    trainer = Trainer(model, arguments(tmp_path), train_dataset=rows(), callbacks=[callback()])
    model.register_forward_pre_hook(
        lambda module, args, kwargs: batches.append(kwargs["input_ids"].clone()) if module.training else None,
        with_kwargs=True,
    )
    trainer.train()
    for orders in (seen[1], batches):
        assert all(torch.equal(one, other) for one, other in zip(seen[0], orders, strict=True))


@every_adapter
def test_best_model_comes_back_whole(adapter: str, tmp_path: Path) -> None:
    """An earlier checkpoint than the last is chosen and comes back, centres included."""
    model = model_for(adapter, ema_interval=1)
    kept: dict[int, tuple[dict[str, torch.Tensor], float]] = {}

    class Watch(mj.MonkeyJumpCallback):
        def on_evaluate(self, args, state, control, metrics=None, **kwargs):
            kept[state.global_step] = (state_of(model), metrics["eval_loss"])

    trainer = Trainer(
        model,
        arguments(
            tmp_path,
            learning_rate=0.3,
            eval_strategy="steps",
            eval_steps=2,
            save_strategy="steps",
            save_steps=2,
            load_best_model_at_end=True,
        ),
        train_dataset=rows(),
        eval_dataset=rows(count=6, seed=5),
        callbacks=[Watch(num_tokens=60, progress=False)],
    )
    trainer.train()
    best = min(kept, key=lambda step: kept[step][1])
    assert trainer.state.best_global_step == best
    assert best != max(kept), "the last checkpoint is the best, so nothing was tested"
    assert_same(state_of(model), kept[best][0])
    assert trainer.evaluate()["eval_loss"] == kept[best][1]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_rank_allocation_reaches_its_target(accumulation: int, tmp_path: Path) -> None:
    """r 4 to an average of 2: half of the diagonal entries of the whole model are exactly zero at the end."""
    model = model_for("adalora")
    budgets: list[int] = []

    class Watch(mj.MonkeyJumpCallback):
        def on_step_end(self, args, state, control, **kwargs):
            budgets.append(sum(int((a.diagonal != 0).sum()) for a in adapters))

    adapters = [module for module in model.modules() if isinstance(module, AdaLoraAdapter)]
    settings = arguments(tmp_path, gradient_accumulation_steps=accumulation)
    Trainer(model, settings, train_dataset=rows(count=48), callbacks=[Watch(num_tokens=60, progress=False)]).train()
    assert len(adapters) == 10
    # after steps 1..7: all until tinit=1, then target + (start - target) * left^3, then the target for tfinal=2
    expected = [40, *(int(20 + 20 * (1 - (step - 1) / 4) ** 3) for step in (2, 3, 4)), 20, 20, 20]
    assert budgets == expected
    assert {int(a.allocations) for a in adapters} == {STEPS}


def test_allocation_survives_a_checkpoint(uninterrupted, resumed) -> None:
    state = resumed["adalora"]["state"]
    diagonals = torch.cat([value for key, value in state.items() if key.endswith(".diagonal")])
    assert int((diagonals != 0).sum()) == 20
    assert_same(
        {k: v for k, v in state.items() if "sensitivity" in k or "uncertainty" in k or "allocations" in k},
        {
            k: v
            for k, v in uninterrupted[1]["adalora"]["state"].items()
            if "sensitivity" in k or "uncertainty" in k or "allocations" in k
        },
    )


@every_adapter
def test_checkpoint_folder_is_an_adapter_folder(adapter: str, uninterrupted) -> None:
    from peft import PeftModel

    folder = uninterrupted[0] / adapter / f"checkpoint-{SAVED}"
    loaded = PeftModel.from_pretrained(tiny_llama(), folder)
    assert {int(v) for k, v in state_of(loaded).items() if "monkeyjump_step" in k} == {SAVED}
    assert torch.isfinite(logits(loaded)).all()


@pytest.mark.parametrize("accumulation", [1, 2])
def test_orthogonality_loss_counts_once_a_step(accumulation: int, tmp_path: Path) -> None:
    """At the first step AdaLoRA's diagonal is zero: the factors move by the gradient of the regulariser alone."""
    model = model_for("adalora", orth_reg_weight=0.7, dropout=0.0)
    adapters = [module for module in model.modules() if isinstance(module, AdaLoraAdapter)]
    before = [(a.A.detach().clone(), a.B.detach().clone()) for a in adapters]
    loss = 0.7 * torch.stack([a.auxiliary_loss() for a in adapters]).mean()
    expected = torch.autograd.grad(loss, [tensor for a in adapters for tensor in (a.A, a.B)])
    settings = arguments(
        tmp_path,
        max_steps=1,
        gradient_accumulation_steps=accumulation,
        optim="sgd",
        learning_rate=0.1,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
    )
    Trainer(model, settings, train_dataset=rows(), callbacks=[callback()]).train()
    factors = [(a.A, a.B) for a in adapters]
    moved = [(old - new) / 0.1 for o, n in zip(before, factors, strict=True) for old, new in zip(o, n, strict=True)]
    for gradient, step in zip(expected, moved, strict=True):
        torch.testing.assert_close(step.detach(), gradient, rtol=1e-3, atol=1e-5)
