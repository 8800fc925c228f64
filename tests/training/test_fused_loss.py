"""A training forward without logits: the ordinary loss and gradients, on every model it accepts, and nothing else."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from contextlib import nullcontext
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
import torch
from peft import PeftModel

from monkeyjump.errors import ConfigError
from monkeyjump.ops.linear_cross_entropy import linear_cross_entropy
from monkeyjump.training.fused_loss import FusedLoss, choose_kernel, fused_loss
from tests.architectures.test_architectures import MODELS
from tests.architectures.test_architectures import SIZE as ARCHITECTURE
from tests.helpers import adapted, assert_same, gradients, lm_batch, mj_config, routing_state, tiny_llama, wrap
from tests.methods.test_mixlora import adapted_mixlora

TOLERANCE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6}


def of(architecture: str) -> PeftModel:
    make, targets, shared, _ = MODELS[architecture]
    torch.manual_seed(0)
    return adapted(make(), target_modules=targets, shared_modules=shared)


def step(model: PeftModel, **more: Any) -> tuple[torch.Tensor, Any]:
    """Loss and output of one training step on a padded batch with a prompt."""
    model.train()
    batch = lm_batch(3, 9, seed=4)
    batch["attention_mask"][1, -3:] = 0
    batch["labels"][1, -3:] = -100
    output = model(**batch, **more)
    output.loss.backward()
    return output.loss.detach(), output


def compare(model: PeftModel, **more: Any) -> None:
    twin = copy.deepcopy(model)
    expected, _ = step(twin, **more)
    with fused_loss(model, "torch", on_gpu=False) as chosen:
        assert chosen == "torch"
        found, output = step(model, **more)
        assert output.logits is None  # hidden states must not pass for them
    torch.testing.assert_close(found, expected, **TOLERANCE)
    assert_same(gradients(model), gradients(twin), **TOLERANCE)
    assert_same(routing_state(model), routing_state(twin), **TOLERANCE)


@pytest.mark.parametrize("items", [None, torch.tensor(23), 23], ids=["mean", "tensor", "number"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gpt2", "phi3"])
def test_loss_and_gradients_are_the_ordinary_ones(architecture: str, items: Any) -> None:
    compare(of(architecture), **({} if items is None else {"num_items_in_batch": items}))


def test_only_tokens_with_a_label_go_through_the_head() -> None:
    model = adapted(ema_stop=0).train()
    batch = lm_batch(3, 9, seed=4)
    batch["labels"][:, :-2] = -100
    batch["labels"][1] = -100
    rows: list[int] = []

    def kernel(hidden: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
        rows.append(hidden.shape[0])
        return linear_cross_entropy(hidden, *others, **options)

    found = []
    for fuses in (False, True):
        with FusedLoss(model, kernel).installed() if fuses else nullcontext():
            loss = model(**batch).loss
            loss.backward()
        found.append({"loss": loss.detach(), **gradients(model)})
        model.zero_grad()
    assert rows == [4]
    assert_same(*found, **TOLERANCE)


def test_gradients_without_dropout_are_the_ordinary_ones_too() -> None:
    """Where it is asked for in evaluation: dropout would change them."""
    model, found = adapted(dropout=0.5).eval(), []
    for fuses in (False, True):
        with fused_loss(model, "torch", on_gpu=False, evaluation=True) if fuses else nullcontext():
            output = model(**lm_batch(3, 9, seed=4))
            output.loss.backward()
        assert (output.logits is None) == fuses
        found.append({"loss": output.loss.detach(), **gradients(model)})
        model.zero_grad()
    assert_same(*found, **TOLERANCE)


def test_losses_of_routers_and_adapters_are_still_added() -> None:
    compare(adapted_mixlora(aux_loss_weight=0.7), num_items_in_batch=torch.tensor(23))
    model = adapted(adapter="adalora", orth_reg_weight=0.7)
    without = copy.deepcopy(model)
    compare(model)
    without.peft_config["default"].adapter_options["orth_reg_weight"] = 0.0  # type: ignore[attr-defined]
    model.zero_grad()
    assert not torch.allclose(step(model)[0], step(without)[0])


def test_a_head_with_bias() -> None:
    base = tiny_llama()
    base.lm_head.bias = torch.nn.Parameter(torch.randn(base.lm_head.out_features), requires_grad=False)
    compare(adapted(base))


def test_labels_that_are_already_shifted() -> None:
    shifted = lm_batch(3, 9, seed=8)["labels"]
    compare(adapted(), shift_labels=shifted)


def test_everything_else_sees_logits() -> None:
    model = adapted()
    twin = copy.deepcopy(model)
    batch = lm_batch()
    with fused_loss(model, "torch", on_gpu=False):
        for training, labelled, enabled in [(False, True, True), (True, False, True), (True, True, False)]:
            given = batch if labelled else {k: v for k, v in batch.items() if k != "labels"}
            with torch.set_grad_enabled(enabled):
                found, expected = model.train(training)(**given), twin.train(training)(**given)
            torch.testing.assert_close(found.logits, expected.logits)
            assert (found.loss is None) == (not labelled)
        model.eval()
        ids = batch["input_ids"]
        settings: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(model.generate(ids, **settings), twin.eval().generate(ids, **settings))


def test_nothing_is_left_behind_even_by_a_failed_forward() -> None:
    model = adapted()
    base: Any = model.get_base_model()
    before = set(vars(base.lm_head)), base.loss_function, len(base._forward_hooks)

    def fail(*_: Any) -> None:
        raise ValueError("boom")

    with fused_loss(model, "torch", on_gpu=False):
        handle = base.model.norm.register_forward_pre_hook(fail)
        with pytest.raises(ValueError, match="boom"):
            step(model)
        handle.remove()
        assert model.eval()(**lm_batch()).logits is not None
    assert (set(vars(base.lm_head)), base.loss_function, len(base._forward_hooks)) == before
    assert step(model)[1].logits is not None


def test_installing_moves_nothing() -> None:
    """The three tokens that the model is checked with leave no trace: no centre, no counter, no random number."""
    model = adapted(ema_interval=1).train()
    before, state = routing_state(model), torch.get_rng_state()
    with fused_loss(model, "torch", on_gpu=False):
        assert_same(routing_state(model), before)
        assert torch.equal(torch.get_rng_state(), state)
        assert all(module.training for module in model.modules())


@pytest.mark.parametrize("settings", [{"granularity": "task"}, {"granularity": "sequence"}, {"router": "shuffled"}])
def test_every_routing_can_be_checked(settings: dict[str, Any]) -> None:
    model = wrap(tiny_llama(), mj_config(**settings))
    with fused_loss(model, "torch", on_gpu=False) as chosen:
        assert chosen == "torch"


# --- what is refused ------------------------------------------------------------------------------------------------


def softcapped() -> PeftModel:
    import transformers as tf

    size: Any = {**ARCHITECTURE, "num_key_value_heads": 2, "head_dim": 8, "final_logit_softcapping": 5.0}
    return adapted(tf.Gemma2ForCausalLM(tf.Gemma2Config(**size)))


def trained_head() -> PeftModel:
    return adapted(modules_to_save=["lm_head"])


def adapted_head() -> PeftModel:
    return adapted(target_modules=["q_proj", "k_proj", "lm_head"], shared_modules=["lm_head"])


def unfrozen_head() -> PeftModel:
    model = adapted()
    base: Any = model.get_base_model()
    base.lm_head.weight.requires_grad_()
    return model


def own_loss() -> PeftModel:
    model = adapted()
    base: Any = model.get_base_model()
    base.loss_function = lambda *args, **kwargs: None
    return model


REFUSED: dict[str, tuple[Any, str]] = {
    "softcapped": (softcapped, "changes the logits between lm_head and the loss"),
    "modules_to_save": (trained_head, "no plain linear layer but a ModulesToSaveWrapper"),
    "adapted head": (adapted_head, "no plain linear layer but a MonkeyJumpLayer"),
    "trained head": (unfrozen_head, "is trained"),
    "own loss": (own_loss, "not that of a causal language model"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_models_that_do_not_fit_are_refused_and_auto_leaves_them_alone(
    case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make, reason = REFUSED[case]
    model = make()
    with pytest.raises(ConfigError, match=reason), fused_loss(model, "torch", on_gpu=False):
        pass
    with fused_loss(model, "auto", on_gpu=True) as chosen:
        assert chosen == "off"
    assert reason in capsys.readouterr().out


def test_a_kernel_that_is_wrong_is_found_before_training() -> None:
    def doubled(hidden: Any, weight: Any, targets: Any, bias: Any, divisor: Any) -> torch.Tensor:
        return 2 * linear_cross_entropy(hidden, weight, targets, bias, divisor=divisor)

    with pytest.raises(Exception, match="fused and ordinary loss differ"):
        FusedLoss(adapted(), doubled).check()


# --- liger ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def liger(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A stand-in for liger-kernel with the call of the real one, and a list of what it was called with."""
    calls: list[dict[str, Any]] = []

    class Loss(torch.nn.Module):
        def __init__(self, ignore_index: int = -100, reduction: str = "mean") -> None:
            super().__init__()
            self.ignore_index, self.reduction = ignore_index, reduction

        def forward(self, lin_weight: Any, _input: Any, target: Any, bias: Any = None) -> torch.Tensor:
            calls.append({"reduction": self.reduction, "rows": len(_input), "weight": lin_weight})
            logits = torch.nn.functional.linear(_input, lin_weight, bias).float()
            return torch.nn.functional.cross_entropy(
                logits, target, ignore_index=self.ignore_index, reduction=self.reduction
            )

    package, inner = ModuleType("liger_kernel"), ModuleType("liger_kernel.transformers")
    package.__spec__ = ModuleSpec("liger_kernel", None)
    inner.LigerFusedLinearCrossEntropyLoss = Loss  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "liger_kernel", package)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", inner)
    return calls


@pytest.mark.parametrize("setting", ["liger", "auto", True])
def test_liger_is_called_where_it_is_installed(setting: bool | str, liger: list[dict[str, Any]]) -> None:
    model = adapted()
    twin = copy.deepcopy(model)
    expected, _ = step(twin, num_items_in_batch=torch.tensor(23))
    with fused_loss(model, setting, on_gpu=True) as chosen:
        assert chosen == "liger"
        del liger[:]
        found, _ = step(model, num_items_in_batch=torch.tensor(23))
        assert len(liger) == 1
        assert liger[0]["reduction"] == "sum"
        assert liger[0]["rows"] == 12  # those that have a label
        assert liger[0]["weight"] is model.get_base_model().lm_head.weight  # type: ignore[union-attr]
    torch.testing.assert_close(found, expected, **TOLERANCE)
    assert_same(gradients(model), gradients(twin), **TOLERANCE)


def test_which_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monkeyjump.training.fused_loss.find_spec", lambda name: None)
    assert [choose_kernel(setting, False) for setting in (False, "off", "auto", "torch", True)] == [
        "off", "off", "torch", "torch", "torch",
    ]  # fmt: skip
    assert choose_kernel("auto", True) == choose_kernel(True, True) == "torch"
    with pytest.raises(ConfigError, match="needs the package liger-kernel"):
        choose_kernel("liger", True)
    monkeypatch.setattr("monkeyjump.training.fused_loss.find_spec", lambda name: object())
    assert choose_kernel("auto", True) == choose_kernel("liger", True) == "liger"
    assert choose_kernel("torch", True) == choose_kernel(True, False) == "torch"
    with pytest.raises(ConfigError, match="needs a GPU"):
        choose_kernel("liger", False)


LIGER = """
import torch
from monkeyjump.ops.linear_cross_entropy import linear_cross_entropy
from monkeyjump.training.fused_loss import liger_kernel
torch.manual_seed(0)
hidden, weight, bias = torch.randn(12, 16, requires_grad=True), torch.randn(33, 16), torch.randn(33)
targets = torch.randint(0, 33, (12,))
targets[3] = -100
for b in (None, bias):
    for divisor in (None, torch.tensor(7)):
        found, expected = liger_kernel(hidden, weight, targets, b, divisor=divisor), linear_cross_entropy(
            hidden, weight, targets, b, divisor=divisor)
        torch.testing.assert_close(found, expected)
        a, b_ = (torch.autograd.grad(loss, hidden)[0] for loss in (found, expected))
        torch.testing.assert_close(a, b_, rtol=1e-4, atol=1e-5)
print("equal")
"""


@pytest.mark.skipif(find_spec("liger_kernel") is None, reason="liger-kernel is not installed")
def test_liger_itself_in_the_interpreter_of_triton() -> None:
    """The real kernels, on a CPU: TRITON_INTERPRET must be set before triton is imported, hence the process."""
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", LIGER], capture_output=True, text=True, env=env, check=False)
    assert done.stdout.strip().endswith("equal"), done.stderr
