"""The settings that PEFT's tests give to its LoRA, as settings of our methods."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from peft import LoraConfig, PeftConfig, VeraConfig

import monkeyjump as mj
from monkeyjump.registry import ADAPTERS

RENAMED = {"lora_alpha": "alpha", "lora_dropout": "dropout"}
STARTS = ("init_weights", "init_lora_weights")  # False: the adapter must not start as the identity
OURS = {field.name for field in dataclasses.fields(mj.MonkeyJumpConfig)}
LORA_DEFAULTS = LoraConfig().to_dict()
LORA_SETTINGS: dict[str, Any] = {"target_modules": None, "r": 8, "alpha": 8.0, "dropout": 0.0}
# What a method needs to fit models of two blocks, and to use what it is about where a test names no targets.
SETTINGS: dict[str, dict[str, Any]] = {
    "mixlora": {"layout": "ffn", "target_modules": "all-linear", "experts": 4},
    "mola": {"experts": [2, 3]},
}
# Models of the tests for adapters on convolutions and on whole attention modules; ours are for linear layers.
NOT_LINEAR = ("Conv1d", "Conv2d", "Conv3d", "MHA")
# Attributes of a configuration in these tests.
RANDOM_START = "peft_suite_random_start"
METHOD = "peft_suite_method"


def method_names() -> list[str]:
    """Every method, and the adapters that no method is named after, always on."""
    return [*mj.methods.names(), *(name for name in ADAPTERS if name not in mj.methods.names())]


def our_config(method: str, given: dict[str, Any]) -> mj.MonkeyJumpConfig:
    """The configuration of a method for what a test gives to `LoraConfig`; what only that has skips the test."""
    settings: dict[str, Any] = {**LORA_SETTINGS, **SETTINGS.get(method, {})}
    random_start = False
    for name, value in given.items():
        if _is_foreign(name, value):
            pytest.skip(f"{name} is a setting of PEFT's own methods")
        if name in STARTS:
            random_start = not value
        elif name in RENAMED or (name in OURS and value is not None):
            settings[RENAMED.get(name, name)] = value
    if isinstance(settings["target_modules"], str):
        settings.setdefault("shared_modules", None)  # a preset cannot know what a pattern leaves of its own
    if method in mj.methods.names():
        config = mj.methods.build(method, preset="mj_paper", **{"task_type": None, **settings})
    else:
        config = mj.MonkeyJumpConfig(adapter=method, layers_to_route=[], **settings)
    if config.uses_centers:
        config.center_init = "random_normalized"  # no test calls initialize_centers
    setattr(config, RANDOM_START, random_start)
    setattr(config, METHOD, method)
    return config


def _is_foreign(name: str, value: Any) -> bool:
    """Whether none of our settings means what this one of `LoraConfig` asks for."""
    known = name in OURS or name in RENAMED or (name in STARTS and isinstance(value, bool))
    return not known and (name not in LORA_DEFAULTS or value != LORA_DEFAULTS[name])


def translatable(value: Any) -> bool:
    """Whether a parameter of a test has no setting that only PEFT's LoRA has and no layer that is not linear."""
    if isinstance(value, LoraConfig):
        value = value.to_dict()
    if isinstance(value, dict):
        embedding = any("emb" in name for name in value.get("target_modules") or ())
        return not embedding and not any(_is_foreign(*item) for item in value.items())
    return not (isinstance(value, str) and value.startswith(NOT_LINEAR))


def config_class(method: str) -> type[mj.MonkeyJumpConfig]:
    """What stands in for the class `LoraConfig`: calling it gives a plain MonkeyJumpConfig of this method."""

    def __new__(cls: type, **given: Any) -> Any:  # noqa: N807  it returns no instance of cls, so __init__ is not called
        return our_config(method, given)

    return type(method, (mj.MonkeyJumpConfig,), {"__new__": __new__, METHOD: method})


def translated(value: Any, ours: type[mj.MonkeyJumpConfig]) -> Any:
    """A parameter of a test with PEFT's LoRA in it replaced by ours."""
    if value in (LoraConfig, VeraConfig):
        return ours
    if isinstance(value, LoraConfig):
        changed = {name: given for name, given in value.to_dict().items() if given != LORA_DEFAULTS[name]}
        return ours(**changed)
    return value


def is_peft_method(value: Any) -> bool:
    """Whether a parameter of a test is a configuration, or a class of configurations, of PEFT."""
    kind = value if isinstance(value, type) else type(value)
    return issubclass(kind, PeftConfig) and not issubclass(kind, mj.MonkeyJumpConfig)


def method_of(value: Any) -> str | None:
    """The method that a configuration, or what stands in for its class, was made for."""
    return getattr(value, METHOD, None)
