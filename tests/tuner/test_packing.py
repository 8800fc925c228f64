"""Frozen weights side by side in memory: the same numbers, nothing held twice, and let go when somebody moves them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from monkeyjump.ops.dispatch import implementation
from tests.helpers import layers_of
from tests.tuner.sharing_models import CLOSE, always_on, assert_torch_agrees, batch, logits

pytest.importorskip("triton")
from monkeyjump.tuner.fast.packed_weights import PackedWeights


@pytest.fixture(autouse=True)
def triton() -> Iterator[None]:
    with implementation("triton"):
        yield


def bases(model: Any) -> dict[str, Any]:
    return {path.rpartition(".")[2]: layer.base_layer for path, layer in layers_of(model).items()}


def storages(model: Any, *names: str) -> set[int]:
    return {bases(model)[name].weight.untyped_storage().data_ptr() for name in names}


def found(model: Any) -> Any:
    """The model after the forwards in which its groups are found."""
    for _ in range(2):
        logits(model)
    return model


def test_weights_of_one_input_lie_together() -> None:
    model = always_on().eval()
    before = {name: linear.weight.clone() for name, linear in bases(model).items()}
    expected = logits(model)
    found(model)
    assert len(storages(model, "q_proj", "k_proj", "v_proj")) == 1
    assert len(storages(model, "q_proj", "o_proj")) == 2
    for name, linear in bases(model).items():
        assert torch.equal(linear.weight, before[name])
        assert type(linear.weight) is nn.Parameter
    torch.testing.assert_close(logits(model), expected, **CLOSE)
    assert_torch_agrees(model)


def test_nothing_is_held_twice() -> None:
    model = always_on().eval()
    own = sum(linear.weight.nbytes for linear in bases(model).values())
    found(model)
    unique = {
        linear.weight.untyped_storage().data_ptr(): linear.weight.untyped_storage().nbytes()
        for linear in bases(model).values()
    }
    assert sum(unique.values()) == own


@pytest.mark.parametrize("what", ["replaced", "cast there and back"])
def test_who_moves_a_weight_takes_it_out(what: str) -> None:
    """The next forward uses the new weight, and does not put it back."""
    model = found(always_on().eval())
    if what == "replaced":
        weight = bases(model)["k_proj"].weight
        weight.data = weight.data * 2
    else:
        model.double().float()
    assert_torch_agrees(model)
    assert len(storages(model, "q_proj", "k_proj", "v_proj")) > 1


def test_writing_into_a_weight_writes_into_the_common_one() -> None:
    model = found(always_on().eval())
    state = {name: 2 * tensor for name, tensor in model.state_dict().items()}
    model.load_state_dict(state)
    assert len(storages(model, "q_proj", "k_proj", "v_proj")) == 1
    assert_torch_agrees(model)


def test_a_copy_has_weights_of_its_own() -> None:
    model = found(always_on().eval())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        bases(twin)["q_proj"].weight.mul_(3)
    assert not torch.equal(logits(twin), logits(model))
    assert_torch_agrees(twin)
    assert_torch_agrees(model)


def test_the_base_model_is_saved_as_it_was(tmp_path: Path) -> None:
    model = always_on().eval()
    state = {name: tensor.clone() for name, tensor in bases(model)["q_proj"].state_dict().items()}
    merged = found(model).merge_and_unload()
    merged.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    weight = saved["model.layers.0.self_attn.q_proj.weight"]
    assert weight.shape == state["weight"].shape
    assert torch.equal(weight, merged.state_dict()["model.layers.0.self_attn.q_proj.weight"].cpu())


def linears(*kinds: dict[str, Any]) -> list[nn.Linear]:
    made = [nn.Linear(4, 3, **kind) for kind in kinds]
    for linear in made:
        linear.requires_grad_(False)
    return made


def test_only_what_is_alike_frozen_and_alone_is_packed() -> None:
    plain: dict[str, Any] = {}
    assert PackedWeights.possible(linears(plain, plain))
    assert not PackedWeights.possible(linears(plain, {"bias": False}))
    assert not PackedWeights.possible(linears(plain, {"dtype": torch.float64}))
    trained = linears(plain, plain)
    trained[1].weight.requires_grad_()
    assert not PackedWeights.possible(trained)
    views = linears(plain, plain)
    views[0].weight.data = torch.zeros(9, 4)[2:5]
    assert not PackedWeights.possible(views)


def test_biases_lie_together_too() -> None:
    """With whole numbers, whose sums are exact in every order: one product need not add up as two do."""
    pair, x = linears({}, {}), torch.randint(-8, 9, (2, 4)).float()
    for parameter in (parameter for linear in pair for parameter in linear.parameters()):
        parameter.copy_(torch.randint(-8, 9, parameter.shape))
    expected = torch.cat([linear(x) for linear in pair], 1)
    packed = PackedWeights(pair)
    weight, bias = packed.frozen.weights[0], packed.frozen.biases[0]
    assert torch.equal(nn.functional.linear(x, weight, bias), expected)
    assert packed.intact()
    pair[1].bias.data = pair[1].bias.data.clone()
    assert not packed.intact()


def test_weights_that_lie_together_already_stay_where_they_are() -> None:
    """As after an adapter was taken off: the next one finds its group, or a part of it, in order."""
    three = linears({}, {}, {})
    first = PackedWeights(three)
    for again in (three, three[:2], three[1:]):
        places = [linear.weight.data_ptr() for linear in three]
        assert PackedWeights.possible(again)
        packed = PackedWeights(again)
        assert torch.equal(packed.frozen.weights[0], torch.cat([linear.weight for linear in again]))
        assert torch.equal(packed.frozen.biases[0], torch.cat([linear.bias for linear in again]))  # type: ignore[arg-type]
        assert packed.intact()
        assert places == [linear.weight.data_ptr() for linear in three]
    assert first.intact()
    assert not PackedWeights.possible([three[0], three[2]])


def test_training_equals_torch() -> None:
    """Gradients of the adapters with the weights together, and with torch alone."""
    model = always_on().train()
    results = []
    for how in ("triton", "torch"):
        with implementation(how):
            for _ in range(3):
                model.zero_grad()
                model(**batch()).loss.backward()
            results.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert results[0].keys() == results[1].keys()
    for name, gradient in results[0].items():
        torch.testing.assert_close(gradient, results[1][name], **CLOSE)


def test_without_kernels_weights_stay_where_they_are() -> None:
    """Generation prepares for a compiler; where torch computes there is nothing to prepare."""
    model = always_on().eval()
    places = storages(model, "q_proj", "k_proj", "v_proj")
    with implementation("torch"):
        ids = batch()["input_ids"]
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False)
    assert storages(model, "q_proj", "k_proj", "v_proj") == places
    assert len(places) == 3
