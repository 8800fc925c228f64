"""LoRA-FA's projected gradient: the step of B that changes the weight as the full gradient would, as far as A can."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer

import monkeyjump as mj
from tests.contract.trainer_runs import arguments, callback, rows
from tests.helpers import assert_same, gradients, layers_of, lm_batch
from tests.methods.common import fresh, moved


def projector(A: torch.Tensor) -> torch.Tensor:
    """Onto the rows of A, [D, D]."""
    basis = torch.linalg.qr(A.T).Q
    return basis @ basis.T


def test_the_change_of_the_weight_is_the_full_gradient_projected_on_the_rows_of_a() -> None:
    model = moved("lora_fa", project_gradient=True).double().train()
    layers = layers_of(model)
    for layer in layers.values():
        layer.base_layer.weight.requires_grad_(True)
    model(**lm_batch()).loss.backward()
    assert mj.project_gradients(model) == len(layers) == 10
    for path, layer in layers.items():
        adapter: Any = layer.monkeyjump_adapter["default"]
        full: Any = layer.base_layer.weight.grad
        torch.testing.assert_close(adapter.scaling * adapter.B.grad @ adapter.A, full @ projector(adapter.A), msg=path)


@pytest.mark.parametrize("share_A", [False, True])
def test_every_expert_is_projected_by_its_own_a(share_A: bool) -> None:
    model = moved("moe_lora_fa", project_gradient=True, share_A=share_A).double().train()
    model(**lm_batch()).loss.backward()
    before = gradients(model)
    mj.project_gradients(model)
    for path, layer in layers_of(model).items():
        adapter: Any = layer.monkeyjump_adapter["default"]
        g = before[f"{path}.monkeyjump_adapter.default.B"]
        for n in range(4):
            ranks = slice(2 * n, 2 * n + 2)
            A = adapter.A if share_A else adapter.A[ranks]
            expected = torch.linalg.solve(A @ A.T, g[:, ranks].T).T / 2.5**2
            torch.testing.assert_close(adapter.B.grad[:, ranks], expected)
    after = gradients(model)
    rest = [name for name in before if not name.endswith(".B")]
    assert rest  # the routers, which keep theirs
    assert_same({name: before[name] for name in rest}, {name: after[name] for name in rest})


def test_off_unless_asked_for_and_only_with_a_frozen_a() -> None:
    model = moved("mjlorafa").train()
    model(**lm_batch()).loss.backward()
    before = gradients(model)
    assert mj.project_gradients(model) == 0
    assert_same(before, gradients(model))
    with pytest.raises(
        mj.ConfigError, match=r"'project_gradient', which adapter 'lora' does not have.*use adapter='lora_fa'"
    ):
        mj.methods.build("lora", project_gradient=True)


def test_the_callback_does_it(tmp_path: Path) -> None:
    """One SGD step of the Trainer is the learning rate times the projected gradient."""
    moves = []
    for project in (False, True):
        torch.manual_seed(0)
        model = fresh("mjlorafa", project_gradient=project)
        args = arguments(tmp_path, max_steps=1, optim="sgd", learning_rate=0.1, max_grad_norm=0.0)
        Trainer(model, args, train_dataset=rows(), callbacks=[callback()]).train()
        adapters: dict[str, Any] = {
            path: layer.monkeyjump_adapter["default"] for path, layer in layers_of(model).items()
        }
        moves.append(adapters)
    for path, plain in moves[0].items():  # B starts at zero
        expected = plain.B @ torch.linalg.inv(plain.A @ plain.A.T) / 2.5**2
        assert plain.B.abs().max() > 0
        torch.testing.assert_close(moves[1][path].B, expected, rtol=1e-3, atol=1e-6, msg=path)
