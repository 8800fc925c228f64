# PEFT and Transformers type their models as unions of tensors and modules, and folders as str; tests look inside.
# mypy: disable-error-code="arg-type, attr-defined, call-overload, index, misc, operator, union-attr"
"""Transformers' own adapter calls: add_adapter, load_adapter, folders that load by themselves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import monkeyjump as mj
from tests.contract.common import centers_of, logits, state_of, train
from tests.helpers import (
    ADAPTER_NAMES,
    REORDERED,
    adapted,
    assert_same,
    disturb,
    layers_of,
    lm_batch,
    mj_config,
    tiny_llama,
)

every_adapter = pytest.mark.parametrize("adapter", ADAPTER_NAMES)


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    tiny_llama().save_pretrained(folder)
    return folder


def native(adapter: str, name: str = "a", folder: Path | None = None, **changes):
    model = tiny_llama() if folder is None else AutoModelForCausalLM.from_pretrained(folder)
    model.add_adapter(mj_config(adapter=adapter, **changes), name)
    disturb(model)
    return model.eval()


def wrapped_keys(state: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    """Keys of a natively adapted model as a PeftModel with adapter `default` would have them."""
    return {f"base_model.model.{key.replace(f'.{name}', '.default')}": value for key, value in state.items()}


@every_adapter
def test_native_equals_wrapped(adapter: str) -> None:
    model = native(adapter, "default")
    wrapped = adapted(adapter=adapter)
    with torch.no_grad():
        for key, value in wrapped_keys(state_of(model, "default"), "default").items():
            wrapped.state_dict()[key].copy_(value)
    wrapped.eval()
    assert torch.equal(logits(model), logits(wrapped))
    for parameter_model in (model, wrapped):
        for name, parameter in parameter_model.named_parameters():
            parameter.requires_grad_(".monkeyjump_adapter." in name)
    assert train(model, steps=5) == train(wrapped, steps=5)
    assert_same(wrapped_keys(state_of(model, "default"), "default"), state_of(wrapped))


@every_adapter
def test_centres_are_initialised_natively(adapter: str) -> None:
    model = tiny_llama()
    model.add_adapter(mj_config(adapter=adapter, center_init="kmeans"), "a")
    model.train()
    with pytest.raises(mj.ConfigError, match="initialize_centers"):
        model(**lm_batch())
    data = [lm_batch(seed=seed) for seed in range(4)]
    report = mj.initialize_centers(model, data, num_tokens=60, restarts=2, progress=False)
    assert (report.adapter, report.tokens_kept) == ("a", 60)
    wrapped = adapted(adapter=adapter, center_init="kmeans")
    mj.initialize_centers(wrapped, data, num_tokens=60, restarts=2, progress=False)
    assert_same(wrapped_keys(centers_of(state_of(model, "a")), "a"), centers_of(state_of(wrapped)))


@every_adapter
def test_switching_adapters(adapter: str) -> None:
    base = logits(tiny_llama())
    model = native(adapter, "a")
    with pytest.warns(UserWarning, match="multiple adapters"):  # PEFT's, for every method
        model.add_adapter(mj_config(adapter=adapter, top_k=1), "b")
    disturb(model, seed=4)
    model.eval()
    assert model.active_adapters() == ["b"]
    second = logits(model)
    model.set_adapter("a")
    first = logits(model)
    assert not torch.equal(first, second)
    model.disable_adapters()
    assert torch.equal(logits(model), base)
    model.enable_adapters()
    assert torch.equal(logits(model), first)
    model.delete_adapter("b")
    assert list(model.peft_config) == ["a"]
    assert torch.equal(logits(model), first)
    assert not any(key.endswith(".b") or ".b." in key for key in model.state_dict())
    train(model)
    model.delete_adapter("a")
    assert torch.equal(logits(model), base)
    assert not any("monkeyjump_" in key for key in model.state_dict())
    model.add_adapter(mj_config(adapter=adapter), "a")
    disturb(model)
    again = logits(model.eval())
    assert torch.equal(again, logits(native(adapter, "a")))


@every_adapter
def test_trained_adapter_saves_and_comes_back(adapter: str, base_folder: Path, tmp_path: Path) -> None:
    model = native(adapter, "a", base_folder)
    train(model, steps=5)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base_folder)
    assert not (tmp_path / "model.safetensors").exists()
    assert any(key.endswith("q_proj.monkeyjump_center") for key in load_file(tmp_path / "adapter_model.safetensors"))
    expected, state = logits(model), state_of(model, "a")
    assert any(value.any() for key, value in state.items() if "staged_count" in key)

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same({k.replace(".default", ".a"): v for k, v in state_of(loaded).items()}, state)
    torch.testing.assert_close(logits(loaded), expected, **REORDERED)

    other = AutoModelForCausalLM.from_pretrained(base_folder)
    other.load_adapter(str(tmp_path), adapter_name="x")
    assert_same({k.replace(".x", ".a"): v for k, v in state_of(other, "x").items()}, state)
    torch.testing.assert_close(logits(other.eval()), expected, **REORDERED)

    through_peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base_folder), tmp_path)
    assert_same(state_of(through_peft), wrapped_keys(state, "a"))
    torch.testing.assert_close(logits(through_peft), expected, **REORDERED)


@every_adapter
def test_peft_folder_loads_natively(adapter: str, base_folder: Path, tmp_path: Path) -> None:
    model = adapted(AutoModelForCausalLM.from_pretrained(base_folder), adapter=adapter)
    train(model, steps=5)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same(wrapped_keys(state_of(loaded), "default"), state_of(model))
    torch.testing.assert_close(logits(loaded), logits(model), **REORDERED)
    assert len(layers_of(loaded)) == 10


@every_adapter
def test_loading_needs_every_tensor(adapter: str, tmp_path: Path) -> None:
    """A folder whose centres are missing is refused, not silently routed with zeros."""
    model = adapted(adapter=adapter, center_init="kmeans")
    mj.initialize_centers(model, [lm_batch(seed=seed) for seed in range(4)], 60, restarts=1, progress=False)
    model.save_pretrained(tmp_path)
    state = get_peft_model_state_dict(model)
    save_file({k: v for k, v in state.items() if "monkeyjump_center" not in k}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(mj.ConfigError, match="no centres"):
        PeftModel.from_pretrained(tiny_llama(), tmp_path)
    native = tiny_llama()
    native.load_adapter(str(tmp_path))
    with pytest.raises(mj.ConfigError, match="6 of the centres"):
        logits(native)


@pytest.mark.slow
def test_without_the_import_loading_fails_and_the_card_says_what_is_missing(base_folder: Path, tmp_path: Path) -> None:
    native("lora", "a", base_folder).save_pretrained(tmp_path / "native")
    adapted(AutoModelForCausalLM.from_pretrained(base_folder)).save_pretrained(tmp_path / "peft")
    for kind in ("native", "peft"):
        assert (tmp_path / kind / "README.md").read_text().count("import monkeyjump\n") == 1
    program = "import sys; from peft import PeftConfig; PeftConfig.from_pretrained(sys.argv[1])"
    arguments = [sys.executable, "-c", program, str(tmp_path / "peft")]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1] == "KeyError: 'MONKEYJUMP'"
    card = (tmp_path / "peft" / "README.md").read_text()
    assert "KeyError: 'MONKEYJUMP'" in card
