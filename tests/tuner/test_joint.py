"""The regulariser in one node with the tensors it reads: the gradients of the two-reader graph, in fewer operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from monkeyjump.tuner.training.regularizer import active_adapters
from monkeyjump.tuner.joint import JointRegularizer
from tests.helpers import COMPILING, adapted, assert_same, disturb, gradients, lm_batch, tiny_llama

pytestmark = COMPILING
SETTINGS: dict[str, Any] = {"adapter": "adalora", "r": 3, "orth_reg_weight": 0.7, "ema_stop": 0, "dropout": 0.0}
# routed and shared projections, and no more of them than that: what is traced is what takes the time
FEW: dict[str, Any] = {"target_modules": ["q_proj", "v_proj", "o_proj"], "shared_modules": ["o_proj"]}


def model_of(layers: int = 2, **changes: Any) -> Any:
    model = adapted(tiny_llama(layers), **{**SETTINGS, **changes}).train()
    disturb(model)
    return model


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a function with the regulariser as a second reader of every parameter."""

    def run(function: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(JointRegularizer, "of", classmethod(lambda cls, model: None))
            return function()

    return run


def steps(model: Any) -> dict[str, torch.Tensor]:
    """Two backwards, one of them under a loss scale, into the same gradients."""
    model(**lm_batch()).loss.backward()
    (1024 * model(**lm_batch(seed=1)).loss).backward()
    return gradients(model)


def close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert_same(expected, found, rtol=1e-4, atol=1e-5)


def test_accumulated_and_scaled_gradients(apart: Any) -> None:
    close(steps(model_of()), apart(lambda: steps(model_of())))


def test_gradients_that_are_asked_for_one_by_one(apart: Any) -> None:
    """`autograd.grad` returns them and leaves `.grad` alone; a factor also has one when nothing else is asked for."""

    def grads() -> dict[str, torch.Tensor]:
        model = model_of()
        chosen = {name: p for name, p in model.named_parameters() if p.requires_grad and "v_proj" in name}
        loss = model(**lm_batch()).loss
        found = dict(zip(chosen, torch.autograd.grad(loss, list(chosen.values()), retain_graph=True), strict=True))
        name, last = list(chosen.items())[-1]
        assert all(p.grad is None for p in model.parameters())
        torch.testing.assert_close(torch.autograd.grad(loss, last)[0], found[name])
        return found

    close(grads(), apart(grads))


def test_second_derivative(apart: Any) -> None:
    def twice() -> dict[str, torch.Tensor]:
        model = model_of()
        model.get_base_model().set_attn_implementation("eager")  # the fused one has no second derivative
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        loss = model(**lm_batch()).loss
        first = torch.autograd.grad(loss, list(parameters.values()), create_graph=True)
        norm = torch.stack([gradient.square().sum() for gradient in first]).sum()
        return dict(zip(parameters, torch.autograd.grad(norm, list(parameters.values())), strict=True))

    close(twice(), apart(twice))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("compiled", [True, False])
def test_checkpointed_blocks(compiled: bool, reentrant: bool, apart: Any) -> None:
    """The second forward of a block comes after the model's; compiled, it must save the tensors of the first."""
    if compiled and reentrant:
        pytest.skip("transformers' reentrant checkpointing calls the block by a path that is not compiled")

    def run(checkpoints: bool) -> dict[str, torch.Tensor]:
        model = model_of(**FEW if compiled else {})
        if compiled and checkpoints:
            for block in model.get_base_model().model.layers:
                block.compile(fullgraph=True, backend="aot_eager")
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        return steps(model)

    close(run(True), apart(lambda: run(False)))


def test_blocks_that_a_loop_of_its_own_recomputes(apart: Any) -> None:
    """Nobody says so beforehand: the second forward reads the parameters, the gradients go where the first read."""
    from torch.utils.checkpoint import checkpoint

    def run(checkpoints: bool) -> dict[str, torch.Tensor]:
        model = model_of(layers_to_route=[])
        for block in model.get_base_model().model.layers if checkpoints else ():
            plain = block.forward
            block.forward = lambda *args, f=plain, **kwargs: checkpoint(f, *args, use_reentrant=False, **kwargs)
        return steps(model)

    close(run(True), apart(lambda: run(False)))


def test_compiled_blocks_compile_once(apart: Any) -> None:
    from torch._dynamo.utils import counters

    def run() -> tuple[dict[str, torch.Tensor], int]:
        torch._dynamo.reset()
        counters.clear()
        model = model_of(**FEW)
        for block in model.get_base_model().model.layers:
            block.compile(fullgraph=True, backend="aot_eager")
        for _ in range(3):
            model.zero_grad()
            model(**lm_batch()).loss.backward()
        return gradients(model), counters["stats"]["unique_graphs"]

    (found, graphs), (expected, expected_graphs) = run(), apart(run)
    close(found, expected)
    assert graphs == expected_graphs


def test_nothing_is_left_on_the_adapters() -> None:
    model = model_of()
    names = set(model.state_dict())
    parameters = list(model.parameters())
    adapters = [adapter for _, adapter in active_adapters(model)]
    model(**lm_batch())
    assert not any({"A", "B", "diagonal"} & set(vars(adapter)) for adapter in adapters)
    with pytest.raises(IndexError):
        model(input_ids=torch.tensor([[10**6]]), labels=torch.tensor([[1]]))
    assert not any({"A", "B", "diagonal"} & set(vars(adapter)) for adapter in adapters)
    assert set(model.state_dict()) == names
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    model.eval()(**lm_batch())
    assert not any({"A", "B", "diagonal"} & set(vars(adapter)) for adapter in adapters)


def test_frozen_tensors_get_no_gradient() -> None:
    model = model_of()
    frozen = [p for name, p in model.named_parameters() if name.endswith(".A") or ".A." in name]
    assert frozen
    for parameter in frozen:
        parameter.requires_grad_(False)
    model(**lm_batch()).loss.backward()
    assert all(parameter.grad is None for parameter in frozen)
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_operations_do_not_grow_with_the_layers() -> None:
    """What the regulariser adds to a step, of sums and products: the same for 2 and for 5 blocks."""

    def work(layers: int, weighted: bool) -> int:
        model = model_of(layers)
        if not weighted:
            model.base_model.routing.regularized = False
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            model(**lm_batch()).loss.backward()
        kinds = ("aten::bmm", "aten::baddbmm", "aten::cat", "aten::add", "aten::add_", "aten::mul", "aten::div")
        foreach = ("aten::_foreach_add", "aten::_foreach_mul")  # on a GPU one kernel; on a CPU one op per tensor
        counts = {event.key: event.count for event in recorded.key_averages()}
        inside = sum(counts.get(kind, 0) for kind in foreach)
        adapters = 2 * len(list(active_adapters(model)))
        return sum(counts.get(kind, 0) for kind in kinds) - inside * adapters

    assert work(2, True) - work(2, False) == work(5, True) - work(5, False)
