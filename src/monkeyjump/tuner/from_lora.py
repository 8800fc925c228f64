"""Monkey Jump routing for a model that already carries PEFT's own LoRA layers, trained or not.

The LoRA layers become Monkey Jump layers with the same A, B, scale and dropout; centres, EMA, saving and generation
then work as for any Monkey Jump adapter. With `layers_to_route=[]` the outputs and gradients are those of the PEFT
model up to the order of two roundings (PEFT scales after B, we scale before it).
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from peft import PeftModel, get_peft_model
from peft.tuners.lora import LoraConfig, LoraLayer, LoraModel
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer, check_target_module_exists
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import nn

from monkeyjump.config import MonkeyJumpConfig
from monkeyjump.config_options import OPTION_NAMES
from monkeyjump.errors import ConfigError
from monkeyjump.registry import did_you_mean
from monkeyjump.tuner.module_paths import is_linear
from monkeyjump.tuner.placement import place

# Settings that the LoRA adapter itself decides, each with the reason.
FIXED = {
    "adapter": "its layers are LoRA",
    "r": "the rank is that of its matrices",
    "placement": "each of its projections holds one adapter",
    "target_modules": "the modules are those it adapts",
    "exclude_modules": "the modules are those it adapts",
    "layers_to_transform": "the modules are those it adapts; layers_to_route chooses the blocks that route",
    "layers_pattern": "the modules are those it adapts",
    "modules_to_save": "these modules come with it",
    "task_type": "it comes with the adapter",
    "peft_type": "the result is a Monkey Jump adapter",
}
# Initialisations that also change the base weights: saved without the change, A and B would mean something else.
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
# Settings of LoraConfig under which the forward, or what is trained, is not that of plain LoRA.
NOT_PLAIN = ("lora_bias", "layer_replication", "trainable_token_indices", "target_parameters", "megatron_config")


def from_lora(
    model: PeftModel, adapter_name: str | None = None, *, shared_modules: list[str] | None = None, **settings: Any
) -> PeftModel:
    """Add Monkey Jump routing to a PEFT LoRA model; use the model that is returned from then on.

    `adapter_name` is the LoRA adapter to route (default: the active one) and the name of the result; other LoRA
    adapters of the model are dropped. `shared_modules` stay always on. `settings` are fields of `MonkeyJumpConfig`:
    `top_k`, `temperature`, `granularity`, ... An adapter that was trained without gates keeps its strength on average
    with `mean_gate=1.0`; `alpha=...` rescales it as a whole. `inference_mode=False` makes a loaded adapter trainable.

    The base weights are not touched, and a problem leaves the model as it was: one ConfigError holds every problem.
    """
    name = _adapter_to_route(model, adapter_name)
    base = model.get_base_model()
    lora: LoraConfig = model.peft_config[name]  # type: ignore[assignment]
    layers = {path: layer for path, layer in base.named_modules() if isinstance(layer, LoraLayer)}
    chosen = {path: layer for path, layer in layers.items() if name in layer.lora_A}
    problems = _setting_problems(settings) + _config_problems(lora) + _layer_problems(layers, chosen, name)
    common, uncommon = _common_settings(chosen, name)
    problems += uncommon
    if problems:
        raise ConfigError(problems, title=f"LoRA adapter {name!r} cannot be routed")
    config = _configuration(base, lora, set(chosen), {**common, "shared_modules": shared_modules, **settings})
    place(base, config, lambda path: path in chosen)  # raises what does not fit, before anything is changed
    return _convert(model, base, config, name, chosen)


def _adapter_to_route(model: nn.Module, adapter_name: str | None) -> str:
    if not isinstance(model, PeftModel) or not isinstance(model.base_model, LoraModel):
        kind = type(model.base_model).__name__ if isinstance(model, PeftModel) else type(model).__name__
        raise ConfigError(
            f"from_lora takes a PeftModel with LoRA layers, not a {kind}: make one with "
            "peft.get_peft_model(model, LoraConfig(...)) or PeftModel.from_pretrained, or put a MonkeyJumpConfig on "
            "the plain model."
        )
    names = list(model.peft_config)
    if adapter_name is None:
        active = model.active_adapters
        if len(active) != 1:
            raise ConfigError(f"{len(active)} adapters are active {active}: say which to route, adapter_name=...")
        return active[0]
    if adapter_name not in names:
        hint = did_you_mean(adapter_name, names)
        raise ConfigError(f"the model has no adapter {adapter_name!r}: it has {', '.join(names)}.{hint}")
    return adapter_name


def _setting_problems(settings: dict[str, Any]) -> list[str]:
    known = [*(field.name for field in fields(MonkeyJumpConfig)), *OPTION_NAMES]
    found = []
    for key in settings:
        if key in FIXED:
            found.append(f"{key!r} cannot be set: {FIXED[key]}.")
        elif key not in known:
            found.append(f"{key!r} is no setting of MonkeyJumpConfig.{did_you_mean(key, known)}")
    return found


def _config_problems(lora: LoraConfig) -> list[str]:
    found = [
        f"{name}={getattr(lora, name)!r} is not plain LoRA, which is all that can be routed."
        for name in NOT_PLAIN
        if getattr(lora, name, None)
    ]
    if lora.bias != "none":
        found.append(f"bias={lora.bias!r} trains biases of the base model, which a Monkey Jump adapter does not save.")
    init = lora.init_lora_weights
    if isinstance(init, str) and init.lower().startswith(CHANGES_BASE):
        found.append(
            f"init_lora_weights={init!r} changed the base weights, and the routed adapter would be saved without that "
            "change: convert it to plain LoRA first (PEFT: path_initial_model_for_weight_conversion)."
        )
    return found


def _layer_problems(layers: dict[str, LoraLayer], chosen: dict[str, LoraLayer], name: str) -> list[str]:
    found = [] if chosen else [f"adapter {name!r} is on no linear layer."]
    for path, layer in layers.items():
        if layer.merged:
            found.append(f"module {path!r} is merged with {layer.merged_adapters}: call model.unmerge_adapter() first.")
        elif name in layer.lora_variant:
            variant = type(layer.lora_variant[name]).__name__.removesuffix("Variant")
            found.append(f"module {path!r} carries the LoRA variant {variant}, not plain LoRA: it cannot be routed.")
        elif name in layer.lora_embedding_A or name in layer.lora_A:
            base = layer.get_base_layer()
            if name in layer.lora_embedding_A or not is_linear(base) or isinstance(layer, ParamWrapper):
                found.append(f"module {path!r} is a {type(base).__name__}; only LoRA on linear layers can be routed.")
        if isinstance(layer.base_layer, BaseTunerLayer):
            found.append(f"module {path!r} carries two tuners, one on the other: unload one of them first.")
    return found[:5] + ([f"... and {len(found) - 5} more modules."] if len(found) > 5 else [])


def _common_settings(chosen: dict[str, LoraLayer], name: str) -> tuple[dict[str, float], list[str]]:
    """The settings that all layers have in common, and a problem for each of the others."""
    found: dict[str, dict[float, str]] = {"r": {}, "alpha": {}, "dropout": {}}  # setting -> value -> a path with it
    for path, layer in chosen.items():
        r, scaling = layer.r[name], layer.scaling[name]
        plain = layer.lora_alpha[name] / r == scaling
        found["r"].setdefault(r, path)
        # rsLoRA divides by sqrt r, and `scale_layer` changes the scale later: what counts is the scale in use
        found["alpha"].setdefault(layer.lora_alpha[name] if plain else scaling * r, path)
        found["dropout"].setdefault(float(getattr(layer.lora_dropout[name], "p", 0.0)), path)
    problems = [
        f"its modules do not have one {setting}: "
        + ", ".join(f"{value:g} in {path!r}" for value, path in values.items())
        + ". A Monkey Jump adapter has one (rank_pattern and alpha_pattern cannot be routed): train it without them."
        for setting, values in found.items()
        if len(values) > 1
    ]
    return {setting: next(iter(values), 1) for setting, values in found.items()}, problems


def _configuration(base: nn.Module, lora: LoraConfig, chosen: set[str], settings: dict[str, Any]) -> MonkeyJumpConfig:
    """The configuration that finds the same modules: LoRA's own names where they do, else every path."""
    own = {name: getattr(lora, name) for name in ("target_modules", "exclude_modules", "layers_to_transform")}
    own["layers_pattern"] = lora.layers_pattern or None
    inside = tuple(f"{path}." for path in chosen)
    paths = [path for path, _ in base.named_modules() if not path.startswith(inside)]
    if {path for path in paths if check_target_module_exists(lora, path)} != chosen:
        own = {"target_modules": sorted(chosen)}
    kept = ("modules_to_save", "task_type", "inference_mode", "base_model_name_or_path", "revision")
    own |= {name: getattr(lora, name) for name in kept}
    return MonkeyJumpConfig(**{"adapter": "lora", **own, **settings})


def _convert(
    model: PeftModel, base: nn.Module, config: MonkeyJumpConfig, name: str, chosen: dict[str, LoraLayer]
) -> PeftModel:
    """Take the LoRA layers out, put Monkey Jump in with their factors; put everything back if that fails."""
    trained = {parameter: parameter.requires_grad for parameter in base.parameters()}
    configs = base.__dict__.pop("peft_config", None)  # PEFT warns about a second one
    replaced = _take_out(base)
    try:
        routed = get_peft_model(base, config, adapter_name=name)
        assert isinstance(routed, PeftModel)
        _fill(base, name, chosen, replaced)
    except BaseException:
        for path, module in replaced.items():
            base.set_submodule(path, module)
        base.peft_config = configs
        for parameter, needed in trained.items():
            parameter.requires_grad_(needed)
        raise
    return routed.train(model.training)


def _take_out(base: nn.Module) -> dict[str, nn.Module]:
    """Put the plain module back wherever PEFT wrapped one; return the wrappers by path."""
    wrappers = {
        path: module
        for path, module in base.named_modules()
        if isinstance(module, (LoraLayer, AuxiliaryTrainingWrapper))
    }
    for path, module in wrappers.items():
        base.set_submodule(path, module.base_layer if isinstance(module, LoraLayer) else module.original_module)
    return wrappers  # type: ignore[return-value]


@torch.no_grad()
def _fill(base: nn.Module, name: str, chosen: dict[str, LoraLayer], replaced: dict[str, nn.Module]) -> None:
    for path, lora in chosen.items():
        adapter: Any = base.get_submodule(path).monkeyjump_adapter[name]  # type: ignore[index]
        adapter.A.copy_(lora.lora_A[name].weight)
        adapter.B.copy_(lora.lora_B[name].weight)
    for path, head in replaced.items():
        if isinstance(head, ModulesToSaveWrapper) and name in head.modules_to_save:
            target: Any = base.get_submodule(path)
            target.modules_to_save[name].load_state_dict(head.modules_to_save[name].state_dict())


route = from_lora  # its older name
