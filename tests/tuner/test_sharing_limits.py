"""What a shared pass must not skip: changed inputs, switches, hooks, trained bases, adapters of other formulas."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch

from monkeyjump.adapters import ADAPTERS, register
from monkeyjump.adapters.lora import LoraAdapter
from monkeyjump.ops.dispatch import implementation
from tests.helpers import adapted, assert_same, gradients, layers_of, tiny_llama
from tests.tuner.sharing_models import ATTENTION, CLOSE, DEVICE, always_on, assert_torch_agrees, batch, logits

pytest.importorskip("triton")


@pytest.fixture
def triton() -> Iterator[None]:
    with implementation("triton"):
        yield


@pytest.mark.usefixtures("triton")
def test_a_tensor_that_changes_in_place_is_another_tensor() -> None:
    """What was made from the old values must not be handed out."""
    model = always_on().eval()
    attention = model.get_base_model().model.layers[0].self_attn
    logits(model)
    x = torch.randn(2, 5, 32, device=DEVICE)
    with torch.no_grad():
        attention.q_proj(x)
        x.mul_(-2.0)
        found = attention.k_proj(x)
        with implementation("torch"):
            torch.testing.assert_close(found, attention.k_proj(x), **CLOSE)


@pytest.mark.usefixtures("triton")
def test_adapters_switched_off_between_two_projections() -> None:
    model = always_on().eval()
    attention = model.get_base_model().model.layers[0].self_attn
    logits(model)
    x = torch.randn(2, 5, 32, device=DEVICE)
    with torch.no_grad():
        attention.q_proj(x)
        with model.disable_adapter():
            assert torch.equal(attention.k_proj(x), attention.k_proj.base_layer(x))


def test_nothing_is_held_after_a_step() -> None:
    """No input of a projection outlives the step."""
    model = always_on().train()
    attention = model.get_base_model().model.layers[0].self_attn
    seen: list[weakref.ref[torch.Tensor]] = []
    hook = attention.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(weakref.ref(kwargs["hidden_states"])), with_kwargs=True
    )
    with implementation("triton"):
        model(**batch()).loss.backward()
    hook.remove()
    gc.collect()
    assert [ref() is None for ref in seen] == [True]


@pytest.mark.parametrize("choice", ["torch", "triton"])
def test_a_replica_of_a_layer_computes_by_itself(choice: str) -> None:
    """`nn.DataParallel` makes shallow copies, which are members of nothing."""
    model = always_on().eval()
    logits(model)
    attention, x = model.get_base_model().model.layers[0].self_attn, torch.randn(2, 5, 32, device=DEVICE)
    with implementation(choice), torch.no_grad():
        for name in ATTENTION:
            layer = getattr(attention, name)
            replica = layer._replicate_for_data_parallel()
            torch.testing.assert_close(replica(x), layer(x), **CLOSE)


def test_a_merged_adapter_is_in_the_weights() -> None:
    model = always_on().eval()
    assert_torch_agrees(model)
    with implementation("triton"):
        before = logits(model)
        model.merge_adapter()
        torch.testing.assert_close(logits(model), before, **CLOSE)
        model.unmerge_adapter()
        torch.testing.assert_close(logits(model), before, **CLOSE)


@pytest.mark.parametrize("trained", ["weight", "bias"])
def test_a_base_that_is_trained_too_gets_its_gradients(trained: str) -> None:
    """BitFit beside LoRA, or a projection that is trained in full."""
    results = []
    for choice in ("torch", "triton"):
        model = adapted(
            tiny_llama(1, attention_bias=True), target_modules=ATTENTION, shared_modules=[], layers_to_route=[]
        )
        model = model.to(DEVICE).train()
        for layer in layers_of(model).values():
            getattr(layer.base_layer, trained).requires_grad_()
        with implementation(choice):
            model(**batch()).loss.backward()
        results.append(gradients(model))
    assert any(name.endswith(f"base_layer.{trained}") for name in results[0])
    assert_same(results[1], results[0], **CLOSE)


def test_hooks_on_a_base_linear_are_called() -> None:
    """Tools that look at activations hook the frozen linear."""
    model = always_on().eval()
    called: list[torch.Size] = []
    layer = model.get_base_model().model.layers[0].self_attn.k_proj
    with implementation("triton"):
        expected = logits(model)
        layer.base_layer.register_forward_hook(lambda module, args, out: called.append(out.shape))
        torch.testing.assert_close(logits(model), expected, **CLOSE)
    assert len(called) == 1


def test_hooks_on_an_adapter_are_called() -> None:
    model = always_on().eval()
    called: list[torch.Size] = []
    adapter = model.get_base_model().model.layers[0].self_attn.k_proj.monkeyjump_adapter["default"]
    adapter.register_forward_hook(lambda module, args, out: called.append(out.shape))
    with implementation("triton"):
        logits(model)
    assert len(called) == 1


def test_an_adapter_of_the_users_own_keeps_its_formula() -> None:
    """A subclass of LoRA that changes the delta is not what the kernels compute."""

    @register
    class SquashedLora(LoraAdapter):
        name = "squashed"

        def delta(self, x: torch.Tensor, base: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
            return torch.tanh(super().delta(x, base, gate))

    try:
        assert_torch_agrees(always_on(adapter="squashed").eval())
    finally:
        ADAPTERS.remove("squashed")


def test_two_forwards_before_a_backward_with_checkpointing() -> None:
    """Each block is computed again with the dropout masks of its own forward."""
    found = []
    for checkpointing in (False, True):
        model = always_on(layers=2, dropout=0.5).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(4)
        with implementation("triton"):
            (model(**batch(0)).loss + model(**batch(1)).loss).backward()
        found.append(gradients(model))
    assert_same(found[1], found[0], **CLOSE)
