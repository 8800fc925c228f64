"""Groups under the compiler: what was found in eager mode is traced as one op, and one graph serves all blocks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from monkeyjump.ops.dispatch import implementation
from monkeyjump.training.compile import compiled
from tests.helpers import COMPILING, adapted, assert_same, disturb, gradients, tiny_llama
from tests.tuner.sharing_models import ATTENTION, DEVICE, batch

kernels = pytest.importorskip("monkeyjump.ops.kernels.lora")
few = pytest.importorskip("monkeyjump.ops.kernels.few")

pytestmark = [*COMPILING, pytest.mark.usefixtures("fresh_compiler")]


def routed(layers: int, **changes: Any) -> Any:
    settings = {"target_modules": ATTENTION, "shared_modules": [], "dropout": 0.0, **changes}
    model = adapted(tiny_llama(layers), **settings).to(DEVICE).train()
    disturb(model)
    return model


def step(model: Any, seed: int) -> None:
    model(**batch(seed), use_cache=False).loss.backward()


@pytest.mark.parametrize(("what", "adapter"), [("blocks", "adalora"), ("model", "lora_fa")])
def test_compiled_groups_equal_eager(what: str, adapter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps; from the second on q, k, v are one pass over their input in the compiled graph too."""
    model = routed(2, adapter=adapter)
    twin = copy.deepcopy(model)
    passes: list[int] = []
    for module, name in ((kernels, "down"), (few, "at_once")):
        original = getattr(module, name)

        def spy(x: torch.Tensor, As: Any, *rest: Any, _original: Any = original) -> torch.Tensor:
            passes.append(len(As))
            return _original(x, As, *rest)

        monkeypatch.setattr(module, name, spy)
    with implementation("triton"), compiled(model, what, backend="aot_eager") as report:
        for seed in range(3):
            for one in (model, twin):
                one.zero_grad()
                passes.clear()
                step(one, seed)
                assert passes == ([1, 1, 1, 1] if seed == 0 else [3, 1]) * 2
            assert_same(gradients(model), gradients(twin), rtol=1e-5, atol=1e-6)
    assert report.graphs == (2 if what == "blocks" else 1)


def test_dropout_of_a_compiled_group_is_the_same_in_backward() -> None:
    """The gradient is that of the loss at the mask of its forward: a finite difference at the same seed agrees."""
    model = routed(1, dropout=0.5, layers_to_route=[])  # centres that follow the tokens would change the loss too
    parameter = next(p for name, p in model.named_parameters() if "q_proj" in name and name.endswith(".A"))
    direction = torch.randn_like(parameter)

    def loss() -> torch.Tensor:
        torch.manual_seed(7)
        return model(**batch(1), use_cache=False).loss

    with implementation("triton"), compiled(model, "blocks", backend="aot_eager"):
        for seed in range(2):
            step(model, seed)
        model.zero_grad()
        loss().backward()
        assert parameter.grad is not None
        slope, values, size = float((parameter.grad * direction).sum()), [], 3e-3
        for sign in (1, -1):
            parameter.data.add_(direction, alpha=sign * size)
            values.append(float(loss().detach()))
            parameter.data.sub_(direction, alpha=sign * size)
    assert abs(slope) > 1e-4
    assert (values[0] - values[1]) / (2 * size) == pytest.approx(slope, rel=0.05)


def test_after_compiling_eager_mode_goes_on() -> None:
    """What was prepared for the compiler is no longer taken for granted, and gradients are those of a fresh copy."""
    model = routed(1)
    twin = copy.deepcopy(model)
    with implementation("triton"), compiled(model, "blocks", backend="aot_eager"):
        for seed in range(2):
            step(model, seed)
    with implementation("torch"):
        for seed in range(2):
            step(twin, seed)
    for one in (model, twin):
        one.zero_grad()
    with implementation("triton"):
        step(model, 5)
    with implementation("torch"):
        step(twin, 5)
    assert_same(gradients(model), gradients(twin), rtol=1e-3, atol=1e-5)
