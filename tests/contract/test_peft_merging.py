# PEFT and Transformers type their models as unions of tensors and modules, and folders as str; tests look inside.
# mypy: disable-error-code="arg-type, attr-defined, call-overload, index, misc, operator, union-attr"
"""PEFT's promises about merging: adapters that are always on merge and come out again, routed ones refuse."""

from __future__ import annotations

import pytest
import torch

from monkeyjump.tuner.layer import MonkeyJumpLayer
from tests.adapters.peers import biased_llama
from tests.contract.common import anatomy, logits
from tests.helpers import ADAPTER_NAMES, adapted, assert_same, disturb, layers_of, mj_config

MERGED = ["q_proj", "v_proj", "down_proj"]  # (IA)3 scales the input of the last
pytestmark = pytest.mark.parametrize("adapter", [*ADAPTER_NAMES, "dora", "ia3", "vera"])


def test_merging_a_routed_adapter_is_refused(adapter: str) -> None:
    model = adapted(adapter=adapter).eval()
    before, expected = {k: v.clone() for k, v in model.state_dict().items()}, logits(model)
    for attempt in (model.merge_adapter, model.merge_and_unload, model.base_model.merge_adapter):
        with pytest.raises(ValueError, match="routed"):
            attempt()
        assert_same(model.state_dict(), before)
        assert not any(layer.merged for layer in layers_of(model).values())
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("safe_merge", [False, True])
def test_always_on_adapters_merge(adapter: str, safe_merge: bool) -> None:
    """Weights and biases come out as they went in, for projections whose input or output is scaled."""
    base = biased_llama()
    plain, frozen = logits(base), anatomy(base)
    model = adapted(base, adapter=adapter, layers_to_route=[], target_modules=MERGED, shared_modules=None).eval()
    expected = logits(model)
    before = {key: value.clone() for key, value in model.state_dict().items() if "base_layer" in key}
    model.merge_adapter(safe_merge=safe_merge)
    assert not any(torch.equal(model.state_dict()[key], value) for key, value in before.items() if "weight" in key)
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
    model.unmerge_adapter()
    assert_same({key: model.state_dict()[key] for key in before}, before, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
    model.merge_adapter()
    with model.disable_adapter():
        torch.testing.assert_close(logits(model), plain, rtol=1e-4, atol=1e-4)
    bare = model.merge_and_unload()
    assert not any(isinstance(module, MonkeyJumpLayer) for module in bare.modules())
    assert anatomy(bare) == frozen
    torch.testing.assert_close(logits(bare), expected, rtol=1e-4, atol=1e-4)


def test_a_double_precision_base_comes_out_in_double_precision(adapter: str) -> None:
    model = adapted(adapter=adapter, layers_to_route=[]).double()
    layer = next(iter(layers_of(model).values()))
    weight = layer.get_base_weight().data.div_(3).clone()  # no longer a number of single precision
    layer.merge()
    layer.unmerge()
    torch.testing.assert_close(layer.get_base_weight().data, weight, rtol=1e-12, atol=1e-12)


def test_merge_twice_is_once(adapter: str) -> None:
    model = adapted(adapter=adapter, layers_to_route=[]).eval()
    model.merge_adapter()
    once = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.warns(UserWarning, match="[Aa]lready merged|already been merged"):
        model.merge_adapter()
    assert_same(model.state_dict(), once)


def test_a_safe_merge_that_is_refused_merges_nothing(adapter: str) -> None:
    """The last of ten layers is broken: the nine before it are not merged either."""
    model = adapted(adapter=adapter, layers_to_route=[]).eval()
    broken = model.base_model.model.model.layers[1].mlp.gate_proj
    with torch.no_grad():
        next(broken.monkeyjump_adapter.parameters()).fill_(torch.nan)
    before = {key: value.clone() for key, value in model.state_dict().items() if "base_layer" in key}
    for attempt in (model.merge_and_unload, model.merge_adapter):
        with pytest.raises(ValueError, match=r"NaNs detected.*default.*layers\.1\.mlp\.gate_proj'.*Nothing was merged"):
            attempt(safe_merge=True)
        assert_same({key: value for key, value in model.state_dict().items() if "base_layer" in key}, before)
        assert not any(layer.merged for layer in layers_of(model).values())


@pytest.mark.parametrize("one_by_one", [False, True])
def test_adapters_that_are_active_together_merge_into_what_they_compute(adapter: str, one_by_one: bool) -> None:
    """Each adds what it adds to the frozen output, in any order; taking them out gives the frozen weights back."""
    base = biased_llama()
    plain = {"adapter": adapter, "layers_to_route": [], "target_modules": MERGED, "shared_modules": None}
    model = adapted(base, **plain)
    before = {key: value.clone() for key, value in model.state_dict().items() if "base_layer" in key}
    model.add_adapter("second", mj_config(**plain))
    disturb(model, seed=3)
    model.base_model.set_adapter(["default", "second"])
    expected = logits(model.eval())
    if one_by_one:
        model.merge_adapter(adapter_names=["second"])
        with pytest.warns(UserWarning, match="additionally merging default"):
            model.merge_adapter(adapter_names=["default"])
    else:
        model.merge_adapter()
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
    model.unmerge_adapter()
    after = {key: value for key, value in model.state_dict().items() if "base_layer" in key}
    assert_same(after, before, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
    merged = model.merge_and_unload(adapter_names=["second", "default"], safe_merge=True)
    torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-4)


def test_routed_beside_always_on_merges_only_the_latter(adapter: str) -> None:
    model = adapted(adapter=adapter)
    model.add_adapter("fixed", mj_config(adapter=adapter, layers_to_route=[]))
    disturb(model, seed=3)
    model.set_adapter("fixed")
    model.eval()
    expected = logits(model)
    with pytest.raises(ValueError, match="routed"):
        model.merge_adapter(adapter_names=["default"])
    torch.testing.assert_close(logits(model.merge_and_unload(adapter_names=["fixed"])), expected, rtol=1e-4, atol=1e-4)
