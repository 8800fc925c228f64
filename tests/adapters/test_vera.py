"""VeRA: PEFT's with the same random matrices, which are derived, not saved, and shared in memory."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, VeraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn

import monkeyjump as mj
from monkeyjump.adapters import VeraAdapter
from monkeyjump.adapters.vera import _SHARED
from monkeyjump.ops import reference as ops
from tests.adapters.peers import assert_equals_peft, assert_routed_by_hand, biased_llama
from tests.helpers import TARGETS, adapted, layers_of, lm_batch, mj_config, tiny_llama, wrap

R = 16
FP32 = (torch.device("cpu"), torch.float32)


def vera(**settings: Any) -> PeftModel:
    return adapted(biased_llama(), adapter="vera", r=R, **settings)


def peft_vera(model: PeftModel, dropout: float) -> nn.Module:
    config = VeraConfig(r=R, vera_dropout=dropout, target_modules=TARGETS, task_type="CAUSAL_LM")
    other: Any = get_peft_model(biased_llama(), config)
    own = layers_of(model)
    with torch.no_grad():
        for path, module in other.named_modules():
            if hasattr(module, "vera_lambda_d"):
                adapter: Any = own[path].monkeyjump_adapter["default"]
                module.vera_lambda_d["default"].copy_(adapter.lambda_d)
                module.vera_lambda_b["default"].copy_(adapter.lambda_b)
                A_T, B = adapter.projections(*FP32)
                other.base_model.vera_A["default"][:, : A_T.shape[0]].copy_(A_T.T)
                other.base_model.vera_B["default"][: B.shape[0]].copy_(B)
    return other


def peft_name(name: str) -> str:
    path, _, tensor = name.rpartition(".monkeyjump_adapter.default.")
    return f"{path}.vera_{tensor}.default"


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_always_on_equals_peft(dropout: float) -> None:
    model = vera(layers_to_route=[], dropout=dropout)
    assert_equals_peft(model, peft_vera(model, dropout), peft_name)


def by_hand(adapter: VeraAdapter, linear: nn.Linear, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    A_T, B = adapter.projections(*FP32)
    return linear(x) + gate * (adapter.lambda_b * ((adapter.lambda_d * (x @ A_T)) @ B.T))


def test_routed_by_hand() -> None:
    assert_routed_by_hand(vera(), by_hand)


def test_the_matrices_are_uniform_within_kaimings_bound_and_uncorrelated() -> None:
    adapter = VeraAdapter(600, 400, mj_config(adapter="vera", r=64))
    A_T, B = adapter.projections(*FP32)
    for matrix, bound in ((A_T, (6 / 600) ** 0.5), (B, (6 / 64) ** 0.5)):
        assert float(matrix.abs().max()) <= bound * 1.000001
        assert float(matrix.mean()) == pytest.approx(0, abs=0.02 * bound)
        assert float(matrix.var()) == pytest.approx(bound**2 / 3, rel=0.03)
        correlation = torch.corrcoef(matrix.T) - torch.eye(64)
        assert float(correlation.abs().max()) < 0.25
    both = torch.corrcoef(torch.stack([A_T[:400].flatten(), B.flatten()]))
    assert abs(float(both[0, 1])) < 0.02


def test_the_bits_are_pinned_and_a_wider_layer_sees_the_same_rows() -> None:
    """A saved adapter is worthless if these numbers ever change."""
    small = ops.hashed_uniform(torch.Size((2, 3)), torch.tensor(0))
    wide = ops.hashed_uniform(torch.Size((5, 3)), torch.tensor(0))
    assert torch.equal(wide[:2], small)
    assert ops.hashed_bits(3, torch.tensor(0)).tolist() == [0, 301794027, 3140136926]


def test_layers_of_one_width_share_one_tensor_and_it_is_forgotten_with_them() -> None:
    gc.collect()
    before = len(_SHARED)
    model = vera(adapter_options={"projection_seed": 77}).bfloat16()
    with torch.no_grad():
        model(**lm_batch())
    adapters = [layer.monkeyjump_adapter["default"] for layer in layers_of(model).values()]
    held: list[Any] = [adapter.held for adapter in adapters]
    assert len({A.data_ptr() for A, _ in held}) == 1  # all inputs here are as wide as the hidden state
    assert len({B.data_ptr() for _, B in held}) == 3  # q and o, k and v, gate
    assert {A.dtype for A, _ in held} == {torch.bfloat16}
    del model, adapters, held
    gc.collect()
    assert len(_SHARED) == before


def test_only_vectors_are_saved_and_another_seed_is_another_adapter(tmp_path: Path) -> None:
    model = vera(adapter_options={"projection_seed": 5})
    model.save_pretrained(str(tmp_path))
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert {name.rpartition(".")[2] for name in saved if "monkeyjump_adapter" in name} == {"lambda_b", "lambda_d"}
    loaded = PeftModel.from_pretrained(biased_llama(), tmp_path)
    other = vera(adapter_options={"projection_seed": 6})
    with torch.no_grad():
        expected = model(**lm_batch()).logits
        assert torch.equal(loaded(**lm_batch()).logits, expected)
        assert not torch.allclose(other(**lm_batch()).logits, expected)


def test_inference_first_training_later() -> None:
    """Matrices made in inference mode must still serve a backward."""
    model = vera(adapter_options={"projection_seed": 123})
    with torch.inference_mode():
        model.eval()(**lm_batch())
    model.train()(**lm_batch()).loss.backward()
    copied = copy.deepcopy(model)
    with torch.no_grad():
        assert torch.equal(copied.eval()(**lm_batch()).logits, model.eval()(**lm_batch()).logits)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"d_inital": 0.1}, "Did you mean 'd_initial'"),
        ({"d_initial": 0}, "nothing trains"),
        ({"projection_seed": -1}, "projection_seed=-1 must be"),
        ({"projection_seed": 1.5}, "projection_seed=1.5 must be"),
        ([1], "must be a dict"),
    ],
)
def test_bad_options(options: Any, part: str) -> None:
    with pytest.raises(mj.ConfigError, match=part):
        mj_config(adapter="vera", adapter_options=options)


def test_options_of_an_adapter_that_has_none() -> None:
    with pytest.raises(mj.ConfigError, match=r"adapter 'lora' does not have.*\(none\)"):
        mj_config(adapter_options={"d_initial": 1})


def test_d_initial() -> None:
    model = wrap(tiny_llama(1), adapter="vera", adapter_options={"d_initial": 0.5})
    adapter: Any = next(iter(layers_of(model).values())).monkeyjump_adapter["default"]
    assert torch.all(adapter.lambda_d == 0.5)
    assert torch.all(adapter.lambda_b == 0)
