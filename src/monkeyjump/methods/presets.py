"""Methods as presets: a name and a few overrides in, a configuration for `get_peft_model` out.

Every preset exists in two protocols. `published` is the method as its own authors run it; `mj_paper` is the matched
comparison of the Monkey Jump paper: the same targets, rank, scale and dropout for every method.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from monkeyjump.config import MonkeyJumpConfig
from monkeyjump.errors import ConfigError
from monkeyjump.registry import Registry, did_you_mean

PRESETS = ("published", "mj_paper")
PAPER_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj"]
PAPER_SHARED = ["o_proj", "gate_proj"]

METHODS: Registry[Callable[..., dict[str, Any]]] = Registry("method")


def names() -> list[str]:
    """Every method that `build` knows."""
    return METHODS.names()


def build(name: str, preset: str = "published", **overrides: Any) -> MonkeyJumpConfig:
    """The configuration of a method: its preset with `overrides` (and the method's own options) on top.

    Shared modules that a narrower `target_modules` no longer adapts are dropped, so that
    `build("mjlora", target_modules=["q_proj", "v_proj"])` means what it says.
    """
    if preset not in PRESETS:
        raise ConfigError(f"preset={preset!r} is not known: choose one of {', '.join(PRESETS)}.")
    try:
        method = METHODS.get(name)
    except KeyError as error:
        raise ConfigError(str(error.args[0])) from None
    own = [key for key in list(inspect.signature(method).parameters)[1:] if key in overrides]
    settings = method(preset, **{key: overrides.pop(key) for key in own})
    known = [field.name for field in fields(MonkeyJumpConfig)]
    unknown = [key for key in overrides if key not in known]
    if unknown:
        raise ConfigError([f"{key!r} is no setting of {name}.{did_you_mean(key, known)}" for key in unknown])
    settings.update(overrides)
    targets, shared = settings.get("target_modules"), settings.get("shared_modules")
    if isinstance(targets, list) and shared and "shared_modules" not in overrides:
        settings["shared_modules"] = [module for module in shared if module in targets]
    settings.setdefault("task_type", "CAUSAL_LM")
    return MonkeyJumpConfig(**settings)


def _plain(adapter: str) -> Callable[[str], dict[str, Any]]:
    def preset(protocol: str) -> dict[str, Any]:
        return {"adapter": adapter, "target_modules": list(PAPER_TARGETS), "layers_to_route": []}

    return preset


def _monkey_jump(adapter: str, **settings: Any) -> Callable[[str], dict[str, Any]]:
    """The paper's own setting: q, k, v routed, o and gate shared; its published form is the matched one."""

    def preset(protocol: str) -> dict[str, Any]:
        return {
            "adapter": adapter,
            "target_modules": list(PAPER_TARGETS),
            "shared_modules": list(PAPER_SHARED),
            **settings,
        }

    return preset


for _adapter in ("lora", "lora_fa", "adalora", "propulsion"):
    METHODS.add(_adapter, _plain(_adapter))
for _name, _adapter in (
    ("mjlora", "lora"),
    ("mjlorafa", "lora_fa"),
    ("mjadalora", "adalora"),
    ("mjpropulsion", "propulsion"),
):
    METHODS.add(_name, _monkey_jump(_adapter))

# Controls: what a comparison needs before it may say that routing helps.
METHODS.add("mjlora_uniform", _monkey_jump("lora", router="uniform", uniform_gate=0.23))
METHODS.add("mjlora_random", _monkey_jump("lora", center_init="random_normalized"))
