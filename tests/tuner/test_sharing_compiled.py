"""Groups under the compiler: each is traced as one op, and one graph serves all blocks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from monkeyjump.ops.dispatch import implementation
from monkeyjump.training.compile import compiled
from monkeyjump.tuner.call import Generation
from tests.helpers import COMPILING, adapted, assert_same, disturb, gradients, layers_of, tiny_llama
from tests.tuner.sharing_models import ATTENTION, CLOSE, DEVICE, always_on, batch, logits, spied_passes

lora = pytest.importorskip("monkeyjump.ops.kernels.lora")

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
    """Three steps: q, k, v are one pass over their input in the compiled graph too."""
    model = routed(2, adapter=adapter)
    twin = copy.deepcopy(model)
    passes = spied_passes(monkeypatch)
    with implementation("triton"), compiled(model, what, backend="aot_eager") as report:
        for seed in range(3):
            for one in (model, twin):
                one.zero_grad()
                passes.clear()
                step(one, seed)
                assert passes == [3, 1] * 2
            assert_same(gradients(model), gradients(twin), rtol=1e-5, atol=1e-6)
    assert report.graphs == 1


def test_compiled_groups_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a Trainer with bf16=True calls a model that was loaded in bf16: groups, and the gradients of eager mode."""
    model = routed(1, adapter="lora").to(torch.bfloat16)
    twin = copy.deepcopy(model)
    passes = spied_passes(monkeypatch)
    with implementation("triton"), compiled(model, "blocks", backend="aot_eager"):
        for seed in range(3):
            for one in (model, twin):
                one.zero_grad()
                passes.clear()
                with torch.autocast(DEVICE, dtype=torch.bfloat16):
                    loss = one(**batch(seed), use_cache=False).loss
                loss.backward()
                assert passes == [3, 1]
            assert_same(gradients(model), gradients(twin), rtol=1e-5, atol=1e-6)


def in_another_order() -> Any:
    """A block that defines q last and calls it first."""
    base = tiny_llama(1)
    projections = base.model.layers[0].self_attn._modules
    projections["q_proj"] = projections.pop("q_proj")
    return base


ROUNDS: dict[str, dict[str, Any]] = {
    "one family": {"target_modules": ATTENTION, "shared_modules": [], "layers_to_route": []},
    # centres that follow the tokens would change the loss too
    "two families": {"target_modules": ATTENTION, "shared_modules": ["v_proj", "o_proj"], "ema_stop": 0},
    "in another order": {"target_modules": ATTENTION, "shared_modules": [], "layers_to_route": []},
    "recomputed": {"target_modules": ATTENTION, "shared_modules": ["v_proj", "o_proj"], "ema_stop": 0},
}


@pytest.mark.parametrize("name", ROUNDS)
def test_dropout_of_compiled_groups_is_the_same_in_backward(name: str) -> None:
    """Seeds are drawn before the blocks run, and a block that is computed again has those of its forward.

    The gradient is that of the loss at the mask of its forward: a finite difference at the same seed agrees.
    """
    base = in_another_order() if name == "in another order" else tiny_llama(1)
    model = adapted(base, dropout=0.5, **ROUNDS[name]).to(DEVICE).train()
    disturb(model)
    if name == "recomputed":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    directions = [torch.randn_like(parameter) for parameter in trained]
    drawn: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        from torch._dynamo.backends.registry import lookup_backend

        calls = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        drawn.append(sum("drawn_seed" in call for call in calls))
        return lookup_backend("aot_eager")(graph, inputs)

    def loss() -> torch.Tensor:
        torch.manual_seed(7)
        return model(**batch(1), use_cache=False).loss

    with implementation("triton"), compiled(model, "blocks", backend=backend):
        for seed in range(2):
            step(model, seed)
        model.zero_grad()
        loss().backward()
        slopes = [float((p.grad * d).sum()) for p, d in zip(trained, directions, strict=True) if p.grad is not None]
        values, size = [], 1e-3
        for sign in (1, -1):
            for parameter, direction in zip(trained, directions, strict=True):
                parameter.data.add_(direction, alpha=sign * size)
            values.append(float(loss().detach()))
            for parameter, direction in zip(trained, directions, strict=True):
                parameter.data.sub_(direction, alpha=sign * size)
    assert set(drawn) == {0}
    assert len(drawn) == 1 or name == "recomputed"
    assert len(slopes) == len(trained)
    assert abs(sum(slopes)) > 1e-2
    assert (values[0] - values[1]) / (2 * size) == pytest.approx(sum(slopes), rel=0.05)


@pytest.mark.parametrize("tokens", ["few", "many"])
def test_compiled_inference_takes_groups_in_generation(tokens: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they are known: one pass for q, k and v, and the logits of eager mode."""
    if tokens == "many":
        monkeypatch.setattr(lora, "FEW_TOKENS", 4)
    passes = spied_passes(monkeypatch)
    model = routed(1, shared_modules=["o_proj"]).eval()
    base, context = model.get_base_model(), next(iter(layers_of(model).values())).context
    with implementation("triton"):
        for _ in range(2):
            expected = logits(model)
        base.model.compile(backend="aot_eager", fullgraph=True)
        for _ in range(2):
            with context.generating(Generation(None)):
                passes.clear()
                torch.testing.assert_close(logits(model), expected, **CLOSE)
                assert passes == [3, 1]


def test_after_generation_weights_may_change() -> None:
    """Merged weights that a compiler then reads are not added to once more."""
    model = always_on().eval()
    context = next(iter(layers_of(model).values())).context
    with implementation("triton"):
        for _ in range(2):
            expected = logits(model)
        with context.generating(Generation(None)):
            logits(model)
        model.merge_adapter()
        model.get_base_model().model.compile(backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(logits(model), expected, rtol=1e-3, atol=1e-4)


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


def test_two_forwards_before_a_backward_with_checkpointing() -> None:
    """Compiled blocks, too, are computed again with the masks of their own forward."""
    found = []
    for checkpointing in (False, True):
        model = always_on(layers=2, dropout=0.5).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(4)
        with implementation("triton"), compiled(model, "blocks", backend="aot_eager"):
            losses = [model(**batch(seed), use_cache=False).loss for seed in range(2)]
            torch.stack(losses).sum().backward()
        found.append(gradients(model))
    assert_same(found[1], found[0], **CLOSE)
