# PEFT and Transformers type their models as unions of tensors and modules, and folders as str; tests look inside.
# mypy: disable-error-code="arg-type, attr-defined, call-overload, index, misc, operator, union-attr"
"""granularity='task': `task_ids` reach the router on every road into the model, and their absence is an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration, Trainer

import monkeyjump as mj
from monkeyjump.tuner.trace import RoutingTrace
from tests.contract.common import logits, state_of, train
from tests.contract.trainer_runs import arguments, rows
from tests.helpers import ADAPTER_NAMES, adapted, disturb, lm_batch, mj_config, tiny_llama, token_ids, wrap

every_adapter = pytest.mark.parametrize("adapter", ADAPTER_NAMES)
TASKS = torch.tensor([2, 0, 1])


def task_model(adapter: str = "lora", **changes: Any):
    return adapted(adapter=adapter, granularity="task", **changes).eval()


def native_model(adapter: str = "lora"):
    model = tiny_llama()
    model.add_adapter(mj_config(adapter=adapter, granularity="task"), "default")
    disturb(model)
    return model.eval()


def assert_one_hot(trace: RoutingTrace, tasks: torch.Tensor) -> None:
    for block in ("0", "1"):
        gates = trace.gates(block)
        assert torch.equal(gates, torch.eye(3)[tasks].unsqueeze(1).expand_as(gates))


@every_adapter
@pytest.mark.parametrize("road", ["causal", "plain", "native", "base"])
def test_forward(adapter: str, road: str) -> None:
    if road == "native":
        model = native_model(adapter)
    else:
        model = task_model(adapter, task_type="CAUSAL_LM" if road == "causal" else None)
    target = model.get_base_model() if road == "base" else model
    with mj.record_routing(model) as trace:
        mixed = logits(target, task_ids=TASKS)
    assert_one_hot(trace, TASKS)
    for row, task in enumerate(TASKS):  # each row as if its whole batch were of its task
        alone = logits(target, task_ids=task.expand(3))
        torch.testing.assert_close(alone[row], mixed[row], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(logits(target, task_ids=TASKS.roll(1)), mixed, atol=1e-3)


@pytest.mark.parametrize("road", ["causal", "plain", "native"])
def test_missing_task_ids(road: str) -> None:
    model = native_model() if road == "native" else task_model(task_type="CAUSAL_LM" if road == "causal" else None)
    logits(model, task_ids=TASKS)  # those of an earlier call do not linger
    with pytest.raises(mj.ConfigError, match="task_ids"):
        logits(model)
    with pytest.raises(mj.ConfigError, match="task_ids"):
        model.generate(token_ids(), max_new_tokens=1)
    with pytest.raises(mj.ConfigError, match="task_ids"):
        train(model, steps=1)


@pytest.mark.parametrize("road", ["causal", "plain", "native"])
def test_failed_call_leaves_no_task_ids(road: str) -> None:
    model = native_model() if road == "native" else task_model(task_type="CAUSAL_LM" if road == "causal" else None)
    with pytest.raises(mj.ConfigError, match="2 entries for a batch of 3"):
        logits(model, task_ids=TASKS[:2])
    with pytest.raises(mj.ConfigError, match="needs `task_ids`"):
        logits(model)
    with pytest.raises(mj.ConfigError, match="2 entries for a batch of 3"):
        model.generate(token_ids(), task_ids=TASKS[:2], max_new_tokens=1)
    with pytest.raises(mj.ConfigError, match="needs `task_ids`"):
        logits(model)


@every_adapter
@pytest.mark.parametrize("road", ["causal", "plain", "native"])
def test_generate(adapter: str, road: str) -> None:
    if road == "native":
        model = native_model(adapter)
    else:
        model = task_model(adapter, task_type="CAUSAL_LM" if road == "causal" else None)
    ids = token_ids()
    expected = ids
    for _ in range(4):
        with torch.no_grad():
            step = model(input_ids=expected, task_ids=TASKS).logits[:, -1:].argmax(-1)
        expected = torch.cat([expected, step], 1)
    for cached in (True, False):
        settings = {"max_new_tokens": 4, "do_sample": False, "use_cache": cached}
        assert torch.equal(model.generate(ids, task_ids=TASKS, **settings), expected)
    beams = model.generate(ids, task_ids=TASKS, num_beams=3, max_new_tokens=4, do_sample=False)
    for row, task in enumerate(TASKS):
        alone = model.generate(ids[row : row + 1], task_ids=task[None], num_beams=3, max_new_tokens=4, do_sample=False)
        assert torch.equal(alone[0], beams[row])


@every_adapter
@pytest.mark.parametrize("road", ["causal", "plain", "native"])
def test_trainer(adapter: str, road: str, tmp_path: Path) -> None:
    """All rows of one task: only that task's expert learns."""
    if road == "native":
        model = native_model(adapter)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".monkeyjump_adapter." in name)
    else:
        model = task_model(adapter, task_type="CAUSAL_LM" if road == "causal" else None)
    before = state_of(model)
    data = [{**row, "task_ids": torch.tensor(1)} for row in rows()]
    settings = arguments(tmp_path, max_steps=2, remove_unused_columns=False, max_grad_norm=0.0)
    Trainer(model, settings, train_dataset=data, callbacks=[mj.MonkeyJumpCallback()]).train()
    changed = {
        key.split(".monkeyjump_")[0].rpartition(".")[2]
        for key, value in state_of(model).items()
        if not torch.equal(value, before[key])
    }
    regularized = {"q_proj", "v_proj"} if adapter == "adalora" else set()  # by AdaLoRA's loss on its own factors
    assert changed == {"k_proj", "o_proj", "gate_proj"} | regularized


def test_trainer_that_drops_the_column_says_what_to_set(tmp_path: Path) -> None:
    data = pytest.importorskip("datasets").Dataset.from_list(
        [{k: v.tolist() for k, v in row.items()} | {"task_ids": 1} for row in rows()]
    )
    trainer = Trainer(task_model(), arguments(tmp_path), train_dataset=data, callbacks=[mj.MonkeyJumpCallback()])
    with pytest.raises(mj.ConfigError, match="remove_unused_columns=False"):
        trainer.train()


def test_encoder_decoder_generates_with_tasks() -> None:
    """The ids stay for every decoding step, also where no prompt width is known."""
    torch.manual_seed(0)
    settings: dict[str, Any] = {"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    base = T5ForConditionalGeneration(
        T5Config(
            **settings | {"pad_token_id": 0, "eos_token_id": None, "decoder_start_token_id": 0, "bos_token_id": None}
        )
    ).eval()
    config = mj_config(
        granularity="task", target_modules=["q", "k", "v"], shared_modules=None, task_type="SEQ_2_SEQ_LM"
    )
    model = wrap(base, config).eval()
    disturb(model)
    ids = torch.randint(1, 50, (3, 5))
    out = model.generate(input_ids=ids, task_ids=TASKS, max_new_tokens=4, do_sample=False)
    for row, task in enumerate(TASKS):
        alone = model.generate(input_ids=ids[row : row + 1], task_ids=task[None], max_new_tokens=4, do_sample=False)
        assert torch.equal(alone[0], out[row])


def test_labels_do_not_matter() -> None:
    model = task_model()
    batch = lm_batch()
    with torch.no_grad():
        one = model(**batch, task_ids=TASKS).logits
        batch["labels"][:] = -100
        other = model(**batch, task_ids=TASKS).logits
    assert torch.equal(one, other)
