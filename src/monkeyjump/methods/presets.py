"""Methods as presets: `build` turns a name and a few overrides into a configuration for `get_peft_model`.

Every preset exists in two protocols. `published` is the method as its own authors run it; `mj_paper` is the matched
comparison of the Monkey Jump paper: the same targets, rank, scale and dropout for every method.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import fields
from typing import Any

from monkeyjump.config import MonkeyJumpConfig
from monkeyjump.config_options import OPTION_NAMES, reads_option
from monkeyjump.errors import ConfigError
from monkeyjump.registry import Registry, did_you_mean

PRESETS = ("published", "mj_paper")
PAPER_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj"]
PAPER_SHARED = ["o_proj", "gate_proj"]

METHODS: Registry[Callable[..., dict[str, Any]]] = Registry("method")


COMPARED = (
    *("lora", "lora_fa", "adalora", "propulsion"),
    *("moelora", "mixlora", "hydralora", "mola", "more", "moa", "moe_lora_fa", "moe_adalora", "moe_propulsion"),
    *("mjlora", "mjlorafa", "mjadalora", "mjpropulsion"),
)
PEERS = ("lime", "flylora")  # parameter-free routing that came after the paper; not in its table
OURS = ("mjlora_prompt", "mjlora_task")  # Monkey Jump in other settings than the paper's
CONTROLS = (
    *("mjlora_uniform", "mjlora_random", "mjlora_shuffled", "mjlora_oracle"),
    *("mjlora_prompt_uniform", "mjlora_prompt_random"),
)


def names() -> list[str]:
    """Every method that `build` knows: those of the comparison, ours, the controls, then what was added elsewhere."""
    first = [*COMPARED, *PEERS, *OURS, *CONTROLS]
    return [*first, *(name for name in METHODS if name not in first)]


def describe(name: str) -> str:
    """The description of a method: its paper, what of it is matched, and what is not."""
    return inspect.getdoc(METHODS.get(name)) or ""


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
    known = [*(field.name for field in fields(MonkeyJumpConfig)), *OPTION_NAMES]
    unknown = [key for key in overrides if key not in known]
    if unknown:
        raise ConfigError([f"{key!r} is no setting of {name}.{did_you_mean(key, known)}" for key in unknown])
    for options in (overrides.get("adapter_options"), overrides.get("method_options")):
        given = options if isinstance(options, dict) else {}
        settings = {key: value for key, value in settings.items() if key not in given}
    settings.update(overrides)
    targets, shared = settings.get("target_modules"), settings.get("shared_modules")
    if shared and "shared_modules" not in overrides and isinstance(targets, list | tuple | set | None):
        settings["shared_modules"] = None if targets is None else [module for module in shared if module in targets]
    settings.setdefault("task_type", "CAUSAL_LM")
    return MonkeyJumpConfig(**settings)


def overrides_of_each(names: Sequence[str], preset: str, overrides: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The overrides of several methods: an option that only some of them read is left out for the others."""
    shared = {key: value for key, value in overrides.items() if key not in OPTION_NAMES}
    configs = {name: build(name, preset, **shared) for name in names}
    readers = {key: [name for name in names if reads_option(configs[name], key)] for key in overrides.keys() - shared}
    return {
        name: {key: value for key, value in overrides.items() if not readers.get(key) or name in readers[key]}
        for name in names
    }


def _add(name: str, about: str, adapter: str, **settings: Any) -> None:
    """Add a method whose published form is the matched one: the paper's own, or one whose authors name no setting."""

    def preset(protocol: str) -> dict[str, Any]:
        return {"adapter": adapter, "target_modules": list(PAPER_TARGETS), **deepcopy(settings)}

    preset.__doc__ = about
    METHODS.add(name, preset)


for _name, _about in {
    "lora": "LoRA (Hu et al., 2021): B A beside every target.",
    "lora_fa": "LoRA-FA (Zhang et al., 2023): LoRA with a frozen A. `project_gradient=True` is PEFT's correction of "
    "the gradient of B, which the comparison does not use.",
    "adalora": "AdaLoRA (Zhang et al., 2023): a trained diagonal between B and A; no rank is taken away by default.",
    "propulsion": "Propulsion (Kowsher et al., 2024): every output scaled by p ** 15.",
}.items():
    _about += "\n\nAlways on, nothing routed. Both presets are the Monkey Jump paper's setting."
    _add(_name, _about, _name, layers_to_route=[])
_ROUTED = "\n\nq, k, v routed, o and gate shared. Both presets are the paper's setting."
for _adapter in ("lora", "lora_fa", "adalora", "propulsion"):
    _about = f"Monkey Jump with {_adapter} adapters: tokens routed by k-means centres.{_ROUTED}"
    _add(f"mj{_adapter.replace('_', '')}", _about, _adapter, shared_modules=PAPER_SHARED)

_add(
    "flylora",
    "FlyLoRA (arXiv 2510.08396): the k largest of 32 ranks of a frozen, sparse, random A; only B is trained.\n\n"
    "Both presets have the authors' 32 ranks, 8 of them active, on the paper's targets: its size is not matched. "
    "alpha / r is that of the comparison; the density of A and the step of the bias, k / r and 0.001, are ours.",
    "flylora",
    layers_to_route=[],
    r=32,
    alpha=80.0,
)

_TWO_GROUPS: dict[str, Any] = {"expert_unit": "rank", "task_experts": 2, "shared_modules": []}
_BY_PROMPT: dict[str, Any] = {
    **{"granularity": "sequence", "sequence_token": "mean", "route_space": "centered"},
    **{"top_k": 1, "renormalize": True, "ema_stop": 0},
    **_TWO_GROUPS,
}
_add(
    "mjlora_prompt",
    "Monkey Jump by the prompt: the mean state of a prompt chooses one of two groups for the whole text. The ranks of "
    "every projection are dealt out to the groups (`task_experts` of them); those of the chosen one have a gate of 1, "
    "all others are off, and centres stay where k-means left them. For tasks that oppose each other and that their "
    "prompts tell apart (`monkeyjump forecast`).\n\nNot of the paper. Nothing is shared; both presets are alike.",
    "lora",
    **_BY_PROMPT,
)

_add(
    "mjlora_task",
    "Monkey Jump by the task: the `task_ids` of a batch choose one of two groups of ranks (`task_experts` of them), as "
    "the prompt does in mjlora_prompt, whose oracle it is. For tasks that oppose each other and are known; it exports "
    "as a plain LoRA for each task.\n\nNot of the paper. Nothing is shared; both presets are alike.",
    "lora",
    granularity="task",
    **_TWO_GROUPS,
)

for _name, _about, _settings in (
    (
        "mjlora_prompt_uniform",
        "the mean gate of its groups for every text, without routing",
        {"router": "uniform", "uniform_gate": 0.5, "shared_modules": []},
    ),
    (
        "mjlora_prompt_random",
        "the same with random centres, never fitted to data",
        {**_BY_PROMPT, "center_init": "random_normalized"},
    ),
):
    _about = f"Control of mjlora_prompt: {_about}.\n\nNot of the paper. Both presets are alike."
    _add(_name, _about, "lora", **_settings)

# Controls: what a comparison needs before it may say that routing helps.
for _name, _about, _settings in (
    (
        "mjlora_uniform",
        "Control without routing: q, k, v at a constant gate (0.23, the mean gate of a trained one).",
        {"router": "uniform", "uniform_gate": 0.23},
    ),
    ("mjlora_random", "Control: random centres, never fitted to data.", {"center_init": "random_normalized"}),
    ("mjlora_shuffled", "Control: the gates of other tokens of the batch, at random.", {"router": "shuffled"}),
    ("mjlora_oracle", "Control: the task id decides; needs `task_ids`.", {"granularity": "task"}),
):
    _add(_name, _about + _ROUTED, "lora", shared_modules=PAPER_SHARED, **_settings)
