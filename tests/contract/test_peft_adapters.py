# PEFT and Transformers type their models as unions of tensors and modules, and folders as str; tests look inside.
# mypy: disable-error-code="arg-type, attr-defined, call-overload, index, misc, operator, union-attr"
"""PEFT's promises about adapters on a live model: add, choose, switch off, delete, take out again."""

from __future__ import annotations

import pytest
import torch
from peft import PeftModel, get_peft_model

import monkeyjump as mj
from monkeyjump.tuner.model import MonkeyJumpModel
from tests.contract.common import HOOKS, anatomy, centers_of, logits, state_of, train
from tests.helpers import (
    ADAPTER_NAMES,
    SHARED,
    adapted,
    assert_same,
    disturb,
    layers_of,
    lm_batch,
    mj_config,
    tiny_llama,
)

pytestmark = pytest.mark.parametrize("adapter", ADAPTER_NAMES)


def pair(adapter: str) -> PeftModel:
    """Two adapters side by side, `default` active."""
    model = adapted(adapter=adapter)
    model.add_adapter("second", mj_config(adapter=adapter, top_k=1))
    disturb(model, seed=2)
    return model.eval()


def test_attributes(adapter: str) -> None:
    model = get_peft_model(tiny_llama(), mj_config(adapter=adapter), adapter_name="mine")
    assert isinstance(model, PeftModel)
    assert isinstance(model.base_model, MonkeyJumpModel)
    assert model.active_adapter == "mine"
    assert model.active_adapters == ["mine"]
    assert list(model.peft_config) == ["mine"]
    assert model.config.model_type == "llama"
    for name in ("save_pretrained", "from_pretrained", "push_to_hub", "generate", "get_input_embeddings"):
        assert hasattr(model, name)
    text = repr(model.base_model.model.model.layers[0].self_attn.q_proj)
    assert "MonkeyJump" in text or "monkeyjump" in text
    assert "(mine)" in text
    assert "base_layer" in text
    status = model.get_model_status()
    assert status.adapter_model_type == "MonkeyJumpModel"
    assert status.num_adapter_layers == 10
    assert status.available_adapters == ["mine"]
    assert model.get_layer_status()[0].requires_grad == {"mine": True}
    layer = layers_of(model)["base_model.model.model.layers.0.self_attn.q_proj"]
    assert layer.weight is layer.get_base_layer().weight


def test_only_adapter_parameters_train(adapter: str) -> None:
    model = adapted(adapter=adapter)
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trainable == {name for name, _ in model.named_parameters() if ".monkeyjump_adapter.default." in name}
    assert model.get_nb_trainable_parameters()[0] == mj.count_parameters(model).trainable


def test_second_adapter_has_its_own_centres(adapter: str) -> None:
    model = pair(adapter)
    before = {name: state_of(model, name) for name in ("default", "second")}
    train(model, steps=5)
    assert_same(state_of(model, "second"), before["second"])
    trained = state_of(model, "default")
    assert all(not torch.equal(trained[key], before["default"][key]) for key in centers_of(trained))
    model.set_adapter("second")
    train(model, steps=5)
    assert_same(state_of(model, "default"), trained)
    moved = centers_of(state_of(model, "second"))
    assert all(not torch.equal(value, before["second"][key]) for key, value in moved.items())


def test_inactive_adapter_gets_no_gradient(adapter: str) -> None:
    model = pair(adapter)
    model.train()
    model(**lm_batch()).loss.backward()
    for name, parameter in model.named_parameters():
        if ".monkeyjump_adapter.default." in name:
            assert parameter.requires_grad, name
            assert parameter.grad is not None, name
        else:
            assert not parameter.requires_grad, name
            assert parameter.grad is None, name


def test_set_adapter_moves_requires_grad(adapter: str) -> None:
    model = pair(adapter)

    def trainable() -> set[str]:
        names = {name for name, p in model.named_parameters() if p.requires_grad}
        return {"second" if ".second." in name else "default" if ".default." in name else name for name in names}

    assert trainable() == {"default"}
    model.set_adapter("second")
    assert trainable() == {"second"}
    model.set_adapter("default", inference_mode=True)
    assert trainable() == set()
    model.set_requires_grad("second")
    assert trainable() == {"second"}


def test_each_adapter_answers_for_itself(adapter: str) -> None:
    model = pair(adapter)
    first = logits(model)
    model.set_adapter("second")
    second = logits(model)
    assert not torch.allclose(first, second, atol=1e-3)
    model.set_adapter("default")
    assert torch.equal(logits(model), first)


def test_both_at_once_add_their_deltas(adapter: str) -> None:
    """The delta of the first block's q with both adapters active is the sum of the two alone."""
    model = pair(adapter)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    seen: list[torch.Tensor] = []
    handle = layer.register_forward_hook(lambda module, args, output: seen.append(output.detach()))
    for names in (["default"], ["second"], ["default", "second"]):
        model.base_model.set_adapter(names)
        logits(model)
    model.base_model.set_adapter("default")
    with model.disable_adapter():
        logits(model)
    handle.remove()
    first, second, both, base = seen
    torch.testing.assert_close(both - base, (first - base) + (second - base), rtol=1e-4, atol=1e-5)
    assert not torch.equal(first, base)


def test_disable_gives_the_base_and_enable_restores(adapter: str) -> None:
    base = logits(tiny_llama())
    model = adapted(adapter=adapter).eval()
    before = logits(model)
    assert not torch.allclose(before, base, atol=1e-3)
    with model.disable_adapter():
        assert torch.equal(logits(model), base)
    assert torch.equal(logits(model), before)
    model.base_model.disable_adapter_layers()
    assert torch.equal(logits(model), base)
    model.base_model.enable_adapter_layers()
    assert torch.equal(logits(model), before)


def test_disabled_adapters_do_not_learn(adapter: str) -> None:
    """A training forward of the base, as a reference model makes them, moves no centre and counts no step."""
    model = adapted(adapter=adapter)
    train(model, steps=3)
    before = state_of(model)
    model.train()
    with model.disable_adapter():
        model(**lm_batch())
    assert_same(state_of(model), before)


@pytest.mark.parametrize("active", [True, False])
def test_delete(adapter: str, active: bool) -> None:
    model = pair(adapter)
    kept, gone = ("default", "second")
    expected = logits(model)
    if active:
        model.set_adapter(gone)
        with pytest.warns(UserWarning, match="Setting active adapter to default"):
            model.delete_adapter(gone)
    else:
        model.delete_adapter(gone)
    assert list(model.peft_config) == [kept]
    assert not any(f".{gone}" in key for key in model.state_dict())
    for layer in layers_of(model).values():
        assert [name for name, table in vars(layer).items() if isinstance(table, dict) and gone in table] == []
        assert gone not in layer.active_adapters
    for router in model.base_model.routing.routers():
        assert gone not in router.layers
        assert gone not in router.configs
    if active:
        model.set_adapter(kept)
    assert torch.equal(logits(model), expected)
    train(model)


def test_deleted_name_can_be_used_again(adapter: str) -> None:
    model = pair(adapter)
    model.delete_adapter("second")
    model.add_adapter("second", mj_config(adapter=adapter, center_init="kmeans"))
    model.set_adapter("second")
    model.train()
    with pytest.raises(mj.ConfigError, match="not initialised"):
        model(**lm_batch())


def test_delete_unknown(adapter: str) -> None:
    model = pair(adapter)
    with pytest.raises(ValueError, match="unknown does not exist"):
        model.delete_adapter("unknown")
    assert list(model.peft_config) == ["default", "second"]


def test_failed_add_changes_nothing(adapter: str) -> None:
    model = pair(adapter)
    before, expected = anatomy(model), logits(model)
    with pytest.raises(mj.ConfigError, match="nowhere_proj"):
        model.add_adapter("third", mj_config(adapter=adapter, target_modules=["nowhere_proj"], shared_modules=None))
    assert list(model.peft_config) == ["default", "second"]
    assert anatomy(model) == before
    assert torch.equal(logits(model), expected)


def test_failed_first_injection_changes_nothing(adapter: str) -> None:
    base = tiny_llama()
    before = anatomy(base)
    with pytest.raises(mj.ConfigError, match="top_k"):
        get_peft_model(base, mj_config(adapter=adapter, top_k=4))
    assert anatomy(base) == before


def test_unload_leaves_nothing_behind(adapter: str) -> None:
    base = tiny_llama()
    before, weights, expected = anatomy(base), dict(base.state_dict()), logits(base)
    model = adapted(base, adapter=adapter)
    model.add_adapter("second", mj_config(adapter=adapter))
    train(model)
    with mj.record_routing(model):
        logits(model)
    model.generate(torch.ones(1, 3, dtype=torch.long), max_new_tokens=2, do_sample=False)
    bare = model.unload()
    assert bare is base
    assert anatomy(bare) == before
    assert_same(dict(bare.state_dict()), weights)
    assert torch.equal(logits(bare), expected)
    assert not any(getattr(model, name) for name in HOOKS)
    again = adapted(bare, adapter=adapter).eval()
    assert torch.equal(logits(again), logits(adapted(adapter=adapter).eval()))


def test_names_of_tensors_are_no_adapter_names(adapter: str) -> None:
    """PEFT tells adapters apart by parts of keys: an adapter called like a tensor would take it from all others."""
    model = adapted(adapter=adapter)
    name = {"propulsion": "offset", "adalora": "diagonal"}.get(adapter, "A")
    with pytest.raises(mj.ConfigError, match=name):
        model.add_adapter(name, mj_config(adapter=adapter))
    assert list(model.peft_config) == ["default"]


def test_shared_projections_have_no_centre(adapter: str) -> None:
    model = adapted(adapter=adapter)
    for path, layer in layers_of(model).items():
        shared = path.rpartition(".")[2] in SHARED
        assert ("default" in layer.monkeyjump_center) is not shared
        assert ("default" in layer.routers) is not shared
