# PEFT and Transformers type their models as unions of tensors and modules, and folders as str; tests look inside.
# mypy: disable-error-code="arg-type, attr-defined, call-overload, index, misc, operator, union-attr"
"""PEFT's promises about files: what is saved, what comes back, under which names."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
import torch
from peft import (
    AutoPeftModelForCausalLM,
    PeftConfig,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    inject_adapter_in_model,
    set_peft_model_state_dict,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import monkeyjump as mj
from monkeyjump.card import MANIFEST
from monkeyjump.config import PEFT_TYPE
from monkeyjump.training.shared import Shared
from tests.contract.common import centers_of, logits, state_of, train
from tests.helpers import ADAPTER_NAMES, REORDERED, adapted, assert_same, layers_of, mj_config, tiny_llama

pytestmark = pytest.mark.parametrize("adapter", ADAPTER_NAMES)

TENSORS = {
    "lora": {"monkeyjump_adapter.A", "monkeyjump_adapter.B"},
    "lora_fa": {"monkeyjump_adapter.A", "monkeyjump_adapter.B"},
    "adalora": {"monkeyjump_adapter.A", "monkeyjump_adapter.B", "monkeyjump_adapter.diagonal"},
    "propulsion": {"monkeyjump_adapter.offset"},
}
ROUTING = {"monkeyjump_center", "monkeyjump_staged_sum", "monkeyjump_staged_count", "monkeyjump_step"}


def trained(adapter: str, **changes) -> PeftModel:
    """Five training forwards: the centres have moved twice and statistics are staged."""
    model = adapted(adapter=adapter, **changes)
    train(model, steps=5)
    return model


def test_saved_and_loaded_are_the_same_bits(adapter: str, tmp_path: Path) -> None:
    model = trained(adapter)
    model.save_pretrained(tmp_path)
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md"} <= {p.name for p in tmp_path.iterdir()}
    loaded = PeftModel.from_pretrained(tiny_llama(), tmp_path)
    state = state_of(model)
    assert_same(state_of(loaded), state)
    assert torch.equal(logits(loaded), logits(model))
    assert any(value.any() for key, value in state.items() if "staged_count" in key)
    assert {int(value) for key, value in state.items() if "monkeyjump_step" in key} == {5}


def test_training_continues_as_if_never_saved(adapter: str, tmp_path: Path) -> None:
    """Staged statistics and the schedule counter come back too: the next commits are the same."""
    model = trained(adapter)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(tiny_llama(), tmp_path, is_trainable=True)
    assert train(loaded) == train(model)
    assert_same(state_of(loaded), state_of(model))
    assert {int(v) for k, v in state_of(loaded).items() if "monkeyjump_step" in k} == {9}


def test_file_keys_hold_no_adapter_name(adapter: str, tmp_path: Path) -> None:
    model = get_peft_model(tiny_llama(), mj_config(adapter=adapter), adapter_name="zebra")
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "zebra" / "adapter_model.safetensors")
    stem = "base_model.model.model.layers"
    expected = set()
    for i in range(2):
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
            expected |= {f"{stem}.{i}.{name}.{tensor}" for tensor in TENSORS[adapter] | ROUTING}
        for name in ("self_attn.o_proj", "mlp.gate_proj"):
            expected |= {f"{stem}.{i}.{name}.{tensor}" for tensor in TENSORS[adapter]}
    assert set(saved) == expected
    assert saved[f"{stem}.1.self_attn.q_proj.monkeyjump_center"].shape == (32,)


def test_config_file_round_trip(adapter: str, tmp_path: Path) -> None:
    config = mj_config(adapter=adapter, top_k=1, temperature=0.5, layers_to_route=[1], ema_stop=7, similarity="dot")
    get_peft_model(tiny_llama(), config).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    assert written["peft_type"] == "MONKEYJUMP"
    assert written["adapter"] == adapter
    assert written["inference_mode"] is True
    assert written["target_modules"] == config.target_modules
    read = PeftConfig.from_pretrained(tmp_path)
    assert type(read) is mj.MonkeyJumpConfig
    assert read.peft_type is PEFT_TYPE
    different = {k for k, v in config.to_dict().items() if read.to_dict()[k] != v}
    assert different <= {"inference_mode", "peft_version"}


def test_unknown_keys_in_the_config_file_are_dropped_with_a_warning(adapter: str, tmp_path: Path) -> None:
    model = adapted(adapter=adapter)
    model.save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "from_the_future": 1}))
    with pytest.warns(UserWarning, match="from_the_future"):
        loaded = PeftModel.from_pretrained(tiny_llama(), tmp_path)
    assert not hasattr(loaded.peft_config["default"], "from_the_future")
    assert_same(state_of(loaded), state_of(model))


def test_load_with_a_config_object(adapter: str, tmp_path: Path) -> None:
    model = adapted(adapter=adapter)
    model.save_pretrained(tmp_path)
    config = PeftConfig.from_pretrained(tmp_path)
    config.temperature = 0.25
    loaded = PeftModel.from_pretrained(tiny_llama(), tmp_path, config=config)
    assert loaded.peft_config["default"].temperature == 0.25
    assert_same(state_of(loaded), state_of(model))
    assert not torch.equal(logits(loaded), logits(model))


def test_load_under_another_name(adapter: str, tmp_path: Path) -> None:
    model = trained(adapter)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(tiny_llama(), tmp_path, adapter_name="other")
    assert list(loaded.peft_config) == ["other"]
    renamed = {key.replace(".other", ".default"): value for key, value in state_of(loaded, "other").items()}
    assert_same(renamed, state_of(model))
    assert torch.equal(logits(loaded), logits(model))


def test_selected_adapters_are_saved(adapter: str, tmp_path: Path) -> None:
    model = adapted(adapter=adapter)
    for name in ("one", "two"):
        model.add_adapter(name, mj_config(adapter=adapter))
    model.save_pretrained(tmp_path, selected_adapters=["default", "two"])
    assert (tmp_path / "adapter_model.safetensors").is_file()
    assert (tmp_path / "two" / "adapter_model.safetensors").is_file()
    assert not (tmp_path / "one").exists()
    with pytest.raises(ValueError, match="selected_adapters"):
        model.save_pretrained(tmp_path, selected_adapters=["nobody"])


def test_names_that_are_parts_of_each_other(adapter: str, tmp_path: Path) -> None:
    names = ["other", "other_adapter", "adapter", "center"]
    model = get_peft_model(tiny_llama(), mj_config(adapter=adapter), adapter_name=names[0])
    for name in names[1:]:
        model.add_adapter(name, mj_config(adapter=adapter))
    for steps, name in enumerate(names, start=2):
        model.set_adapter(name)
        train(model, steps=steps)
    states = {name: state_of(model, name) for name in names}
    outputs = {}
    for name in names:
        model.set_adapter(name)
        outputs[name] = logits(model)
    assert not any(torch.equal(outputs[names[0]], outputs[name]) for name in names[1:])
    model.save_pretrained(tmp_path)

    loaded = PeftModel.from_pretrained(tiny_llama(), tmp_path / names[0], adapter_name=names[0])
    for name in names[1:]:
        loaded.load_adapter(tmp_path / name, name)
    for name in names:
        assert_same(state_of(loaded, name), states[name])
        loaded.set_adapter(name)
        assert torch.equal(logits(loaded), outputs[name])


def test_low_cpu_mem_usage_is_the_same(adapter: str, tmp_path: Path) -> None:
    model = trained(adapter)
    model.save_pretrained(tmp_path)
    normal = PeftModel.from_pretrained(tiny_llama(), tmp_path)
    lean = PeftModel.from_pretrained(tiny_llama(), tmp_path, low_cpu_mem_usage=True)
    assert not any(t.is_meta for t in (*lean.parameters(), *lean.buffers()))
    assert_same(state_of(lean), state_of(normal))
    torch.testing.assert_close(logits(lean), logits(normal), **REORDERED)  # mapped memory lies elsewhere
    flags = {name: p.requires_grad for name, p in normal.named_parameters()}
    assert {name: p.requires_grad for name, p in lean.named_parameters()} == flags
    lean.load_adapter(tmp_path, "second", low_cpu_mem_usage=True)
    lean.set_adapter("second")
    torch.testing.assert_close(logits(lean), logits(normal), **REORDERED)  # mapped memory lies elsewhere


@pytest.mark.parametrize("is_trainable", [False, True])
def test_is_trainable(adapter: str, tmp_path: Path, is_trainable: bool) -> None:
    adapted(adapter=adapter).save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(tiny_llama(), tmp_path, is_trainable=is_trainable)
    trainable = {name for name, p in loaded.named_parameters() if p.requires_grad}
    expected = {name for name, _ in loaded.named_parameters() if ".monkeyjump_adapter." in name}
    assert trainable == (expected if is_trainable else set())
    assert loaded.peft_config["default"].inference_mode is not is_trainable


def test_state_dict_functions(adapter: str) -> None:
    model = trained(adapter)
    state = get_peft_model_state_dict(model)
    assert not any("default" in key for key in state)
    other = get_peft_model(tiny_llama(), mj_config(adapter=adapter), adapter_name="b")
    result = set_peft_model_state_dict(other, state, adapter_name="b")
    assert result.unexpected_keys == []
    assert_same(get_peft_model_state_dict(other, adapter_name="b"), state)
    assert torch.equal(logits(other), logits(model))


def test_inject_with_a_state_dict(adapter: str) -> None:
    model = trained(adapter)
    state = get_peft_model_state_dict(model)
    bare = {key.removeprefix("base_model.model."): value for key, value in state.items()}
    base = inject_adapter_in_model(mj_config(adapter=adapter), tiny_llama(), state_dict=bare)
    assert len(layers_of(base)) == 10
    set_peft_model_state_dict(base, bare)
    assert torch.equal(logits(base), logits(model))
    assert_same(
        centers_of(state_of(base)),
        {k.removeprefix("base_model.model."): v for k, v in centers_of(state_of(model)).items()},
    )


def test_card_names_the_import(adapter: str, tmp_path: Path) -> None:
    model = adapted(adapter=adapter)
    for _ in range(2):  # a second save must not repeat the note
        model.save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert card.count("import monkeyjump\n") == 1
    assert card.startswith("---\nlibrary_name: peft\n")
    assert "More Information Needed" not in card


@pytest.mark.parametrize("manifest", [None, "", '{"hub_id": "owner/model"}'])
def test_card_names_no_folder_of_this_machine(adapter: str, manifest: str | None, tmp_path: Path) -> None:
    """A bundled model says its id on the hub; of another folder nothing is said."""
    tiny_llama().save_pretrained(tmp_path / "base")
    if manifest is not None:
        (tmp_path / "base" / MANIFEST).write_text(manifest)
    model = adapted(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), adapter=adapter)
    for _ in range(2):
        model.save_pretrained(tmp_path / "saved")
        card = (tmp_path / "saved" / "README.md").read_text()
        assert str(tmp_path) not in card
        assert ('\nbase_model: "owner/model"\n' in card) == bool(manifest)
        written = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
        assert written["base_model_name_or_path"] == ("owner/model" if manifest else str(tmp_path / "base"))
        assert model.peft_config["default"].base_model_name_or_path == str(tmp_path / "base")  # it lies there still


def test_a_card_that_somebody_wrote_stays(adapter: str, tmp_path: Path) -> None:
    model = adapted(adapter=adapter)
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n# Mine\n\nWhat I made.\n")
    for _ in range(2):
        model.save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert "license: mit" in card
    assert "# Mine\n\nWhat I made.\n" in card
    assert card.count("import monkeyjump\n") == 1


def test_modules_to_save(adapter: str, tmp_path: Path) -> None:
    model = adapted(adapter=adapter, modules_to_save=["lm_head"])
    before = model.base_model.model.lm_head.modules_to_save["default"].weight.detach().clone()
    train(model)
    after = model.base_model.model.lm_head.modules_to_save["default"].weight
    assert not torch.equal(before, after)
    assert torch.equal(model.base_model.model.lm_head.original_module.weight, before)
    model.save_pretrained(tmp_path)
    assert "base_model.model.lm_head.weight" in load_file(tmp_path / "adapter_model.safetensors")
    loaded = PeftModel.from_pretrained(tiny_llama(), tmp_path)
    assert torch.equal(loaded.base_model.model.lm_head.modules_to_save["default"].weight, after)
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize("wrapped", [False, True])
def test_modules_to_save_and_the_model_without_them(adapter: str, wrapped: bool) -> None:
    """`unload` leaves the trained module, as PEFT does, also where it has no weight; the runs of a grid share the
    model as it was."""
    found = []
    for leave in ("unload", "give_back"):
        base = tiny_llama()
        if wrapped:
            base.lm_head = torch.nn.Sequential(base.lm_head)
        original = {key: value.clone() for key, value in base.state_dict().items()}
        model = adapted(base, adapter=adapter, modules_to_save=["lm_head"])
        train(model, steps=2)
        trained = {f"lm_head.{k}": v for k, v in base.lm_head.modules_to_save["default"].state_dict().items()}
        if leave == "unload":
            found.append((model.unload().state_dict(), original | trained))
        else:
            shared = Shared()
            shared.give_back(model, None)
            found.append((shared._base[0].state_dict(), original))
    for state, expected in found:
        assert_same(state, expected)


def test_base_weights_are_never_written(adapter: str, tmp_path: Path) -> None:
    base = tiny_llama()
    original = {key: value.clone() for key, value in base.state_dict().items()}
    model = adapted(base, adapter=adapter)
    train(model)
    model.save_pretrained(tmp_path)
    assert not any("base_layer" in key for key in load_file(tmp_path / "adapter_model.safetensors"))
    assert_same(model.unload().state_dict(), original)


def test_auto_model_finds_the_base(adapter: str, tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path / "base")
    model = adapted(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), adapter=adapter)
    train(model, steps=3)
    model.save_pretrained(tmp_path / "adapter")
    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    assert isinstance(loaded, PeftModel)
    assert_same(state_of(loaded), state_of(model))
    assert torch.equal(logits(loaded), logits(model))


def test_given_state_dict_is_what_is_saved(adapter: str, tmp_path: Path) -> None:
    """Sharded training hands over a gathered state dict instead of the live one."""
    model = adapted(adapter=adapter)
    state = {key: value + 1 for key, value in model.state_dict().items()}
    model.save_pretrained(tmp_path, state_dict=state)
    loaded = PeftModel.from_pretrained(tiny_llama(), tmp_path)
    assert_same(state_of(loaded), {key: state[key] for key in state_of(model)})


def test_no_address_is_asked_for(adapter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saving and loading in local folders opens no connection."""

    def refuse(*args, **kwargs):
        raise AssertionError(f"a connection was opened: {args}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    model = adapted(adapter=adapter)
    model.save_pretrained(tmp_path)
    assert_same(state_of(PeftModel.from_pretrained(tiny_llama(), tmp_path)), state_of(model))


def test_loading_the_wrong_kind_is_refused(adapter: str, tmp_path: Path) -> None:
    """Tensors of one adapter never end up in another kind, nor in another base model."""
    model = adapted(adapter=adapter)
    before = state_of(model)
    other = "lora" if adapter == "propulsion" else "propulsion"
    with pytest.raises(mj.ConfigError, match="cannot be loaded"):
        set_peft_model_state_dict(model, get_peft_model_state_dict(adapted(adapter=other)))
    with pytest.raises(mj.ConfigError, match="cannot be loaded"):
        set_peft_model_state_dict(model, get_peft_model_state_dict(adapted(tiny_llama(layers=3), adapter=adapter)))
    assert_same(state_of(model), before)
