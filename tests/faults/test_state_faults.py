"""Faults of the authors' published code in state and the training loop (B10 to B18)."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import Trainer, TrainingArguments

import monkeyjump as mj
from tests.helpers import (
    ROUTED,
    TARGETS,
    adapted,
    assert_same,
    batches,
    centers,
    disturb,
    gradients,
    lm_batch,
    mj_config,
    routed_layers,
    routing_state,
    tiny_llama,
    train_steps,
    wrap,
)


class Rows(torch.utils.data.Dataset):
    def __init__(self, count: int = 16) -> None:
        self.batch = lm_batch(count, 8)

    def __len__(self) -> int:
        return len(self.batch["input_ids"])

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {key: value[i] for key, value in self.batch.items()}


def trainer(model: PeftModel, folder: Path, **settings: object) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        logging_strategy="no",
        dataloader_pin_memory=False,
        **settings,  # type: ignore[arg-type]
    )
    return Trainer(model=model, args=arguments, train_dataset=Rows())


def steps(model: PeftModel) -> set[int]:
    return {int(layer.monkeyjump_step["default"]) for layer in routed_layers(model).values()}


@pytest.mark.parametrize("reentrant", [True, False])
def test_b10_checkpointing_does_not_double_the_updates(reentrant: bool) -> None:
    results = []
    for checkpointing in (False, True):
        model = adapted(tiny_llama(use_cache=False), ema_interval=1)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        train_steps(model, batches(3))
        assert steps(model) == {3}
        results.append((gradients(model), routing_state(model)))
    assert_same(results[0][0], results[1][0], rtol=1e-5, atol=1e-7)
    assert_same(results[0][1], results[1][1])


def test_b11_centres_exist_before_the_first_forward_and_load_into_a_fresh_model() -> None:
    model = adapted(ema_interval=1)
    train_steps(model, batches(3))
    fresh = wrap(tiny_llama(seed=5))
    missing, unexpected = fresh.load_state_dict(model.state_dict(), strict=True)
    assert not missing
    assert not unexpected
    assert_same(routing_state(model), routing_state(fresh))
    assert steps(fresh) == {3}


def test_b12_random_centres_are_the_same_on_every_rank() -> None:
    """A function of seed and module name, not of the process. Two processes: tests/equivalence/test_distributed.py."""
    torch.manual_seed(1)
    one = wrap(tiny_llama())
    torch.manual_seed(2)
    torch.randn(17)
    two = wrap(tiny_llama())
    assert_same(centers(one), centers(two))
    values = list(centers(one).values())
    assert all(not torch.equal(values[0], other) for other in values[1:])


def test_b13_centres_move_under_the_plain_trainer(tmp_path: Path) -> None:
    """No hook of the trainer is needed: the model drives its own schedule."""
    model = adapted(ema_interval=1)
    before = centers(model)
    trainer(model, tmp_path, max_steps=3).train()
    assert steps(model) == {3}
    assert all(not torch.equal(before[path], after) for path, after in centers(model).items())


def test_b14_interval_and_stop_count_the_same_thing_and_the_counter_is_saved(tmp_path: Path) -> None:
    model = adapted(ema_interval=2, ema_stop=4)
    history = [centers(model)]
    model.train()
    for batch in batches(9):
        model(**batch).loss.backward()
        history.append(centers(model))
    moved = [
        number
        for number in range(1, 10)
        if any(not torch.equal(history[number][p], history[number - 1][p]) for p in history[0])
    ]
    assert moved == [3, 5]  # the forward after each second one, until four have been counted
    assert steps(model) == {9}
    model.save_pretrained(str(tmp_path))
    again = PeftModel.from_pretrained(tiny_llama(), tmp_path, is_trainable=True)
    assert steps(again) == {9}
    frozen = centers(again)
    train_steps(again, batches(4))
    assert_same(frozen, centers(again))  # stopped centres do not thaw


def test_b14_the_trainer_resumes_the_schedule(tmp_path: Path) -> None:
    model = adapted(ema_interval=2)
    trainer(model, tmp_path, max_steps=3, gradient_accumulation_steps=2).train()
    assert steps(model) == {6}  # the unit is one training forward, with accumulation too


def test_b15_gradients_do_not_grow_with_accumulation(tmp_path: Path) -> None:
    """The Trainer's own loss scaling is untouched: no training_step is replaced."""
    norms = []
    for size, accumulation in ((4, 1), (1, 4)):
        model = adapted(ema_stop=0, dropout=0.0)
        run = trainer(model, tmp_path, max_steps=1, learning_rate=0.1, lr_scheduler_type="constant", optim="sgd",
                      gradient_accumulation_steps=accumulation, max_grad_norm=0.0, seed=3)  # fmt: skip
        run.args.per_device_train_batch_size = size
        run._train_batch_size = size
        before = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
        run.train()
        norms.append({n: p.detach() - before[n] for n, p in model.named_parameters() if n in before})
    assert_same(norms[0], norms[1], rtol=1e-2, atol=1e-5)
    assert max(float(v.abs().max()) for v in norms[0].values()) > 1e-4


@pytest.mark.parametrize("adapter", ["lora", "lora_fa", "adalora", "propulsion"])
def test_b16_an_expert_that_nobody_chose_has_a_zero_gradient_not_none(adapter: str) -> None:
    quiet: Any = {"adapter_options": {"orth_reg_weight": 0.0}} if adapter == "adalora" else {}
    model = adapted(tiny_llama(1), adapter=adapter, top_k=1, **quiet).train()
    batch = lm_batch()
    layers = routed_layers(model)
    with torch.no_grad():
        h = torch.nn.functional.normalize(model.get_input_embeddings()(batch["input_ids"]).mean((0, 1)), dim=-1)
        model.get_input_embeddings().weight.add_(5 * h)
        for layer, sign in zip(layers.values(), (1, -1, -1), strict=True):
            layer.monkeyjump_center["default"].copy_(sign * h)
    model(**batch).loss.backward()
    found = gradients(model)  # asserts that none is missing
    chosen, unchosen = next(iter(layers)), list(layers)[1:]
    assert any(g.abs().max() > 0 for name, g in found.items() if name.startswith(chosen))
    for path in unchosen:
        for name, gradient in found.items():
            if name.startswith(path):
                assert torch.equal(gradient, torch.zeros_like(gradient))


def test_b17_a_second_adapter_keeps_the_first_and_heads_stay_trainable() -> None:
    model = adapted(modules_to_save=["lm_head"])
    before = {n: p.requires_grad for n, p in model.named_parameters()}
    assert any("lm_head" in n for n, trained in before.items() if trained)
    model.add_adapter("plain", mj_config(layers_to_route=[], target_modules=["up_proj"], shared_modules=None))
    after = {n: p.requires_grad for n, p in model.named_parameters()}
    assert {n: after[n] for n in before if n in after} == {n: before[n] for n in before if n in after}
    count = len([n for n, p in model.named_parameters() if p.requires_grad and "default" in n])
    assert count == 2 * len(TARGETS) * 2 + 1


def test_b17_routed_and_plain_blocks_live_in_one_adapter() -> None:
    model = wrap(tiny_llama(3), layers_to_route=[1])
    assert {path.split("layers.")[1][0] for path in routed_layers(model)} == {"1"}
    assert mj.count_parameters(model).trainable == mj.count_parameters(wrap(tiny_llama(3))).trainable


def test_b18_a_deep_copy_routes_with_its_own_centres() -> None:
    model = adapted(ema_interval=1)
    twin = copy.deepcopy(model)
    original = routing_state(model)
    with torch.no_grad():
        expected = model.eval()(**lm_batch()).logits
    disturb(twin, seed=9)
    train_steps(twin, batches(3))
    assert_same(original, routing_state(model))
    assert steps(twin) == {3}
    with torch.no_grad():
        assert torch.equal(model.eval()(**lm_batch()).logits, expected)
    for layer in routed_layers(twin).values():
        layer.monkeyjump_center["default"].copy_(torch.randn(32))
    with torch.no_grad():
        assert torch.equal(model(**lm_batch()).logits, expected)
        assert not torch.allclose(twin.eval()(**lm_batch()).logits, expected)


def test_b18_a_pickled_model_routes_with_its_own_centres() -> None:
    model = adapted(ema_interval=1)
    twin = pickle.loads(pickle.dumps(model))
    train_steps(twin, batches(2))
    assert steps(twin) == {2}
    assert steps(model) == {0}
    assert [path.rpartition(".")[2] for path in routed_layers(twin)] == ROUTED * 2
