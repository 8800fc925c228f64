"""FlyLoRA: the definition by loops, what is trained, and biases that even the loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model
from transformers import Trainer

import monkeyjump as mj
from monkeyjump import methods
from monkeyjump.adapters import FlyLoraAdapter
from monkeyjump.tuner.count import count_parameters
from monkeyjump.tuner.training.regularizer import active_adapters
from tests.contract.trainer_runs import arguments, callback, rows
from tests.helpers import adapted, assert_same, gradients, layers_of, lm_batch, tiny_llama, train_steps

R, K = 6, 2
FLY: dict[str, Any] = {
    "adapter": "flylora", "r": R, "layers_to_route": [], "adapter_options": {"active_ranks": K, "balance_rate": 0.1},
}  # fmt: skip


def flies(model: PeftModel) -> list[FlyLoraAdapter]:
    return [adapter for _, adapter in active_adapters(model) if isinstance(adapter, FlyLoraAdapter)]


def test_the_definition_token_by_token() -> None:
    model = adapted(**FLY)
    layer = next(iter(layers_of(model).values()))
    adapter: Any = layer.monkeyjump_adapter["default"]
    adapter.bias.copy_(torch.linspace(-1, 1, R))
    x = torch.randn(2, 5, layer.in_features)
    found = layer.eval()(x)
    for row in range(2):
        for token in range(5):
            y = adapter.A @ x[row, token]
            kept = (y.abs() + adapter.bias).argsort(descending=True)[:K]
            update = sum(adapter.B[:, rank] * y[rank] for rank in kept.tolist())
            expected = layer.base_layer(x[row, token]) + adapter.scaling * update
            torch.testing.assert_close(found[row, token], expected, atol=1e-5, rtol=1e-4)
    assert not adapter.load.any()  # nothing is counted outside of training


def test_a_sparse_random_a_that_is_not_trained() -> None:
    torch.manual_seed(0)
    adapter = FlyLoraAdapter(2000, 8, methods.build("flylora", r=16, adapter_options={"density": 0.1}))
    assert (adapter.A != 0).sum(1).tolist() == [200] * 16
    assert adapter.A[adapter.A != 0].std() == pytest.approx(1 / 16, rel=0.05)
    assert [name for name, _ in adapter.named_parameters()] == ["B"]
    assert not adapter.B.any()


def test_loads_even_out() -> None:
    """The bias of a rank with too few tokens grows by a step, that of the others falls; then the count starts anew."""
    model = adapted(**FLY).train()
    train_steps(model, iter([lm_batch(seed=0), lm_batch(seed=1)]))
    loads = [adapter.load.clone() for adapter in flies(model)]
    assert all(load.sum() == 2 * 3 * 8 * K for load in loads)
    assert mj.balance_ranks(model) == len(loads)
    for adapter, load in zip(flies(model), loads, strict=True):
        assert torch.equal(adapter.bias, 0.1 * (load.mean() - load).sign())
        assert not adapter.load.any()
    first = torch.stack(loads).std(1).mean()
    for _ in range(30):
        train_steps(model, iter([lm_batch(seed=0), lm_batch(seed=1)]))
        later = torch.stack([adapter.load.clone() for adapter in flies(model)]).std(1).mean()
        mj.balance_ranks(model)
    assert later < 0.7 * first


def test_checkpointing_changes_no_bias_and_no_gradient() -> None:
    found = []
    for checkpointing in (False, True):
        model = adapted(**FLY).train()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            model.enable_input_require_grads()
        train_steps(model, iter([lm_batch()]))
        mj.balance_ranks(model)
        found.append(gradients(model) | {f"bias {n}": a.bias for n, a in enumerate(flies(model))})
    assert_same(found[0], found[1], atol=1e-6, rtol=1e-5)


def test_a_trainer_balances_and_a_file_keeps_it(tmp_path: Path) -> None:
    model = get_peft_model(tiny_llama(), methods.build("flylora", task_type="CAUSAL_LM"))
    count = count_parameters(model)
    assert (count.trainable, count.router) == (sum(a.B.numel() for a in flies(model)), 0)
    Trainer(model, arguments(tmp_path, max_steps=3), train_dataset=rows(), callbacks=[callback()]).train()
    assert all(adapter.bias.abs().max() > 0 for adapter in flies(model))
    model.save_pretrained(str(tmp_path / "adapter"))
    loaded = PeftModel.from_pretrained(tiny_llama(), tmp_path / "adapter")
    batch = lm_batch(seed=5)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(**batch).logits, model.eval()(**batch).logits)


def test_it_can_be_routed_too_and_never_merged() -> None:
    routed = adapted(**{**FLY, "layers_to_route": None})
    train_steps(routed, iter([lm_batch()]))
    with pytest.raises(ValueError, match="strength depends on the token"):
        adapted(**FLY).merge_adapter()
    with pytest.raises(mj.ConfigError, match=r"active_ranks=8 is more than r=4"):
        adapted(**{**FLY, "r": 4, "adapter_options": {"active_ranks": 8}})
