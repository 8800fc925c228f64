# PEFT and Transformers type their models as unions of tensors and modules; tests look inside.
# mypy: disable-error-code="arg-type, attr-defined, union-attr"
"""Every method under Transformers' Trainer; learned ones through PEFT's other ways in: logs, copies, names."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import Trainer

import monkeyjump as mj
from tests.contract.common import state_of
from tests.contract.trainer_runs import arguments, callback, rows
from tests.helpers import REORDERED, assert_same, lm_batch, tiny_llama
from tests.methods.common import CASES, LAYERS, base_of, batch_for, fresh, moved

LEARNED = ["moelora", "hydralora", "mola", "moa", "moe_lora_fa", "moe_propulsion"]
BALANCED = ["moelora", "mixlora", "moe_adalora"]
STEPS = 3
BUDGET: dict[str, Any] = {"r": 4, "target_r": 2, "total_step": STEPS}  # ranks are taken away on the way
OWN: dict[str, dict[str, Any]] = {
    **{name: {"center_init": "kmeans"} for name in ("mjlora", "mjlorafa", "mjpropulsion")},
    "adalora": BUDGET,
    "moe_adalora": {**BUDGET, "score_per_token": True},
    "mjadalora": {**BUDGET, "center_init": "kmeans"},
}


def data(method: str) -> list[dict[str, torch.Tensor]]:
    found = rows()
    return [{**row, "task_ids": torch.tensor(i % 3)} for i, row in enumerate(found)] if method == "more" else found


def train(method: str, folder: Path, checkpoint: str | None = None, **changes: Any) -> tuple[Any, Trainer]:
    torch.manual_seed(3)
    model = fresh(method, dropout=0.2, **{**OWN.get(method, {}), **changes})
    settings = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": 2, "logging_steps": 1}
    own_columns = {"remove_unused_columns": method != "more"}
    args = arguments(folder, **settings, **own_columns)
    trainer = Trainer(model, args, train_dataset=data(method), callbacks=[callback()])
    trainer.train(resume_from_checkpoint=checkpoint)
    return model, trainer


@pytest.mark.parametrize("method", CASES)
def test_trained_resumed_and_loaded(method: str, tmp_path: Path) -> None:
    """Finite losses; every trained tensor moves; resumed is uninterrupted; saved is loaded."""
    torch.manual_seed(3)
    start = state_of(fresh(method, **OWN.get(method, {})))
    whole, trainer = train(method, tmp_path)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == STEPS
    assert all(math.isfinite(loss) for loss in losses)
    end = state_of(whole)
    trained = [name for name, parameter in whole.named_parameters() if parameter.requires_grad]
    still = [name for name in trained if torch.equal(end[name], start[name])]
    taken = [name for name in trained if name.endswith("diagonal") and not end[name].any()]  # all its ranks
    assert trained
    assert still == (taken if "target_r" in OWN.get(method, {}) else [])
    assert all(end[name.replace("diagonal", "sensitivity_diagonal")].any() for name in still)
    rest, _ = train(method, tmp_path, str(tmp_path / "checkpoint-2"))
    assert_same(state_of(whole), state_of(rest))
    whole.save_pretrained(str(tmp_path / "adapter"))
    again = PeftModel.from_pretrained(base_of(method), tmp_path / "adapter")
    assert_same(state_of(whole), state_of(again))
    with torch.no_grad():
        expected = whole.eval()(**batch_for(method)).logits
        assert torch.equal(again.eval()(**batch_for(method)).logits, expected)


@pytest.mark.parametrize("method", BALANCED)
def test_logs_show_load_and_losses(method: str, tmp_path: Path) -> None:
    changes = {"contrastive_weight": 0.1} if method == "moelora" else {}
    _, trainer = train(method, tmp_path, **changes)
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(entries) == STEPS
    for entry in entries:
        assert entry["router/balance_loss"] > 0.9
        assert 0 < entry["router/load_entropy"] <= 1
        assert entry["router/dead_experts"] >= 0
        assert ("router/contrastive_loss" in entry) is bool(changes)


@pytest.mark.parametrize("method", LEARNED)
def test_copies_load_and_names(method: str, tmp_path: Path) -> None:
    model = moved(method).eval()
    with torch.no_grad():
        expected = model(**lm_batch()).logits
        assert torch.equal(copy.deepcopy(model)(**lm_batch()).logits, expected)
        assert torch.equal(pickle.loads(pickle.dumps(model))(**lm_batch()).logits, expected)
        model.save_pretrained(str(tmp_path))
        base = tiny_llama(LAYERS.get(method, 2))
        again = PeftModel.from_pretrained(base, tmp_path, adapter_name="other", low_cpu_mem_usage=True).eval()
        assert_same({k.replace(".other", ".default"): v for k, v in state_of(again, "other").items()}, state_of(model))
        torch.testing.assert_close(again(**lm_batch()).logits, expected, **REORDERED)
        native = tiny_llama(LAYERS.get(method, 2))
        native.load_adapter(str(tmp_path))
        assert_same({f"base_model.model.{k}": v for k, v in state_of(native).items()}, state_of(model))
        torch.testing.assert_close(native.eval()(**lm_batch()).logits, expected, **REORDERED)
    assert mj.count_parameters(again).router == 0  # loaded for inference: nothing is trained
    trainable = PeftModel.from_pretrained(tiny_llama(LAYERS.get(method, 2)), tmp_path, is_trainable=True)
    assert mj.count_parameters(trainable).router == mj.count_parameters(model).router > 0
