# PEFT types its models as unions of tensors and modules; tests look inside.
# mypy: disable-error-code="arg-type, attr-defined, operator, union-attr"
"""PEFT's other ways in: injection after the keys of a state dict, compiled models, and its helpers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import get_peft_model, get_peft_model_state_dict, inject_adapter_in_model
from peft.helpers import disable_input_dtype_casting
from torch import nn

import monkeyjump as mj
from tests.contract.common import logits
from tests.helpers import COMPILING, adapted, assert_same, layers_of, mj_config, routed_layers, tiny_llama, wrap


def injected(**kwargs: Any) -> nn.Module:
    return inject_adapter_in_model(mj_config(), tiny_llama(), **kwargs)


def compiled_llama(layers: int = 2) -> Any:
    return torch.compile(tiny_llama(layers), backend="eager")


def test_injection_after_a_state_dict_with_fewer_modules() -> None:
    """The tensors say which modules are adapted; the configuration says how, and PEFT warns of the difference."""
    full = get_peft_model_state_dict(injected())
    absent = ("layers.1.mlp", "layers.0.self_attn.v")
    fewer = {key: value for key, value in full.items() if not any(part in key for part in absent)}
    with pytest.warns(RuntimeWarning, match="The PEFT config contained these additional target modules"):
        model = injected(state_dict=fewer)
    found = get_peft_model_state_dict(model)
    assert found.keys() == fewer.keys()
    assert "model.layers.0.self_attn.v_proj" not in layers_of(model)
    assert [len([path for path in routed_layers(model) if f"layers.{i}." in path]) for i in (0, 1)] == [2, 3]
    model.eval()
    assert torch.equal(logits(model), logits(tiny_llama()))


def test_injection_after_a_state_dict_that_leaves_too_little_to_route() -> None:
    full = get_peft_model_state_dict(injected())
    fewer = {key: value for key, value in full.items() if "layers.0.self_attn.v" not in key and ".k_proj" not in key}
    with pytest.raises(mj.ConfigError, match=r"top_k=2 is larger than the 1 routed projection\(s\) \['q_proj'\]"):
        injected(state_dict=fewer)


@pytest.mark.parametrize("from_compiled", [False, True])
def test_injection_into_a_compiled_model(from_compiled: bool) -> None:
    saved = get_peft_model_state_dict(injected())
    if from_compiled:
        model = inject_adapter_in_model(mj_config(), compiled_llama())
        compiled = get_peft_model_state_dict(model)
        assert {key.removeprefix("_orig_mod.") for key in compiled} == set(saved)
        saved = compiled
    model = inject_adapter_in_model(mj_config(), compiled_llama(), state_dict=saved)
    found = {key.removeprefix("_orig_mod."): value.shape for key, value in get_peft_model_state_dict(model).items()}
    assert found == {key.removeprefix("_orig_mod."): value.shape for key, value in saved.items()}
    assert set(layers_of(model._orig_mod)) == set(layers_of(injected()))


class TestCompiled:
    pytestmark = COMPILING

    def test_a_compiled_model_routes(self) -> None:
        plain = adapted(tiny_llama(1))
        model: Any = get_peft_model(compiled_llama(1), mj_config())
        model.base_model.model._orig_mod.load_state_dict(plain.base_model.model.state_dict())
        torch.testing.assert_close(logits(model.eval()), logits(plain.eval()))
        ids = torch.tensor([[5, 6, 7]])
        tokens = [m.generate(input_ids=ids, max_new_tokens=4, do_sample=False, pad_token_id=0) for m in (model, plain)]
        assert torch.equal(*tokens)


def test_input_dtype_casting_may_be_disabled() -> None:
    """PEFT's helper switches off what these layers never do: their input is not cast."""
    model = adapted().eval()
    expected = logits(model)
    with disable_input_dtype_casting(model):
        assert torch.equal(logits(model), expected)
        assert not any(layer.cast_input_dtype_enabled for layer in layers_of(model).values())
    assert all(layer.cast_input_dtype_enabled for layer in layers_of(model).values())


def test_weighted_adapters_are_refused_with_a_way_out() -> None:
    model = adapted()
    model.add_adapter("second", mj_config())
    with pytest.raises(mj.ConfigError, match=r"add_weighted_adapter is not offered.*set_adapter\(\[\.\.\.\]\)"):
        model.add_weighted_adapter(["default", "second"], [0.5, 0.5], "both")
    assert set(model.peft_config) == {"default", "second"}


def test_a_quantised_layer_says_so() -> None:
    class Backend:
        backend_name = "int8"

    layer = next(iter(layers_of(wrap(tiny_llama())).values()))
    assert "quantization_backend" not in repr(layer)
    layer.quantization_backend = Backend()  # type: ignore[assignment]
    assert "quantization_backend='int8'" in repr(layer)


class FlatBlocks(nn.Module):
    """A model whose blocks are called with tokens in one row: [tokens, width]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)}) for _ in range(2)])
        for block in self.layers:
            block.forward = lambda x, block=block: block["b"](block["a"](x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.layers:
            x = block(x)
        return x


def test_blocks_with_flat_states_run_while_the_adapter_is_disabled() -> None:
    """They cannot be routed, which is said when they are, and only then."""
    torch.manual_seed(0)
    base, x = FlatBlocks(), torch.randn(5, 8)
    expected = base(x)
    config = mj.MonkeyJumpConfig(target_modules=["a", "b"], center_init="random_normalized")
    model: Any = get_peft_model(base, config).eval()
    with pytest.raises(mj.ConfigError, match=r"not called with a \[batch, tokens, width\] hidden state"):
        model(x)
    with model.disable_adapter():
        assert torch.equal(model(x), expected)
    model.delete_adapter("default")
    assert torch.equal(model.base_model(x), expected)
    assert_same(dict(base.named_parameters()), dict(model.base_model.model.named_parameters()))
