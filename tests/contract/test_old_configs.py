# PEFT and Transformers type their models as unions of tensors and modules; tests look inside.
# mypy: disable-error-code="arg-type"
"""An adapter_config.json that was written before a setting existed means what it meant then; one from later warns."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftConfig, PeftModel

import monkeyjump as mj
from monkeyjump.config_options import OPTION_NAMES
from tests.contract.common import state_of
from tests.helpers import assert_same, gradients, routing_state
from tests.methods.common import base_of, batch_for, moved

FIRST = {
    *("adapter", "r", "alpha", "dropout", "target_modules", "exclude_modules", "shared_modules", "top_k"),
    *("temperature", "similarity", "renormalize", "jitter", "granularity", "sequence_token", "task_experts"),
    *("route_space", "center_init", "init_tokens", "ema_momentum", "ema_interval", "ema_stop", "ema_assign"),
    *("ema_space", "layers_to_transform", "layers_pattern", "layers_to_route", "modules_to_save"),
}
FIRST_OPTIONS = {
    **{"degree": 15, "target_r": None, "tinit": 0, "tfinal": 0, "deltaT": 1, "beta1": 0.85, "beta2": 0.85},
    **{"total_step": None, "orth_reg_weight": 0.5},
}
# What was added later, oldest first, with the value that a file without it means. These values never change: a new
# default would give another meaning to every adapter that was saved before.
ADDED: list[dict[str, Any]] = [
    {"router": "centroid", "uniform_gate": 1.0},
    {
        **{"placement": "block", "experts": 4, "share_A": False, "router_scope": "projection"},
        **{"router_init": "normal", "router_hidden": None, "threshold": None, "threshold_grad": "none"},
        **{"aux_loss_weight": 0.0, "lb_norm": "switch", "lb_reduce": "mean", "contrastive_weight": 0.0},
        **{"tasks": 8, "task_width": None, "rank_scale": "code", "task_rep": "mean"},
    },
    {"adapter_options": None, "mean_gate": None},
    {"extra_experts": None, "parallel_width": 16, "prompt_length": 10},
    {"router_input": "block", "noise": "gaussian", "score_per_token": False, "project_gradient": False},
    {"method_options": None},  # from here on options are no fields any more
    {"balance_kinds": True},
    {"expert_unit": "adapter"},
    {"gamma": 0.7, "theta": 0.5, "softness": 0.5},
]
MIXTURES = ["moelora", "mixlora", "hydralora", "mola", "more", "moa", "moe_lora_fa", "moe_adalora", "moe_propulsion"]
# how many of these sets each method knew when it came
CASES: dict[str, int] = {
    **dict.fromkeys(["lora", "lora_fa", "adalora", "propulsion", "mjlora", "mjlorafa", "mjadalora", "mjpropulsion"], 0),
    "mjlora_uniform": 1,
    **dict.fromkeys([*MIXTURES, "mixlora published"], 2),
    "moa published": 4,
}


def test_every_setting_is_listed() -> None:
    own = {field.name for field in fields(mj.MonkeyJumpConfig)} - {field.name for field in fields(PeftConfig)}
    assert len(own) <= 35
    later = [name for added in ADDED for name in added]
    assert len(later) == len(set(later))
    assert own | set(OPTION_NAMES) == FIRST | FIRST_OPTIONS.keys() | set(later), (
        "enter a new setting in ADDED, with the value that a file without it means"
    )


def flat(written: dict[str, Any]) -> dict[str, Any]:
    """What a version in which every option was a field wrote for this configuration."""
    assert not written.keys() & set(OPTION_NAMES)
    options = {**(written.get("adapter_options") or {}), **(written.get("method_options") or {})}
    defaults = {name: value for added in (FIRST_OPTIONS, *ADDED) for name, value in added.items()}
    return {**defaults, **written, "adapter_options": None, "method_options": None, **options}


@pytest.mark.parametrize("case", CASES)
def test_an_old_file_means_what_it_meant(case: str, tmp_path: Path) -> None:
    """The same adapter with every later setting said out loud, and read from a file that knows none of them."""
    later = {name: value for added in ADDED[CASES[case] :] for name, value in added.items()}
    model = moved(case, **later)
    model.save_pretrained(str(tmp_path))
    file = tmp_path / "adapter_config.json"
    written = flat(json.loads(file.read_text()))
    assert later.keys() <= written.keys()
    file.write_text(json.dumps({name: value for name, value in written.items() if name not in later}))
    loaded = PeftModel.from_pretrained(base_of(case), tmp_path, is_trainable=True)
    assert_same(state_of(loaded), state_of(model))
    batch = batch_for(case)
    with torch.no_grad():
        expected = model.eval()(**batch).logits
        assert torch.equal(loaded.eval()(**batch).logits, expected)
    found = []
    for each in (model, loaded):
        torch.manual_seed(5)
        loss = each.train()(**batch).loss
        loss.backward()
        found.append({"loss": loss.detach(), **gradients(each), **routing_state(each)})
    assert_same(found[0], found[1])


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("case", ["mjlora", "moelora", "moa published"])
def test_settings_of_the_future_are_dropped_with_a_warning(case: str, is_old: bool, tmp_path: Path) -> None:
    model = moved(case).eval()
    model.save_pretrained(str(tmp_path))
    file = tmp_path / "adapter_config.json"
    written = json.loads(file.read_text())
    file.write_text(json.dumps({**(flat(written) if is_old else written), "from_the_future": {"a": 1}}))
    with pytest.warns(UserWarning, match=r"Unexpected keyword arguments \['from_the_future'\]"):
        loaded = PeftModel.from_pretrained(base_of(case), tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(loaded(**batch_for(case)).logits, model(**batch_for(case)).logits)


def test_a_file_may_hold_settings_that_its_method_never_read(tmp_path: Path) -> None:
    mj.methods.build("mjlora").save_pretrained(str(tmp_path))
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps({**flat(json.loads(file.read_text())), "degree": 3, "threshold_grad": "ste"}))
    loaded = PeftConfig.from_pretrained(tmp_path)
    assert (loaded.adapter_options, loaded.method_options) == (None, None)
