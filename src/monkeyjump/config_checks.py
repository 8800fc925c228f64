"""Which values of a MonkeyJumpConfig go together: every check that needs no model, each with its fix."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import TYPE_CHECKING

from monkeyjump.config_rules import is_int, value_problems
from monkeyjump.registry import ADAPTERS, did_you_mean

if TYPE_CHECKING:
    from monkeyjump.config import MonkeyJumpConfig

LEARNED_ROUTERS = ("linear", "sigmoid", "lime")  # whose gates carry gradients
RANKED = ("lora", "lora_fa", "adalora")  # adapters whose ranks can be used one by one


def config_problems(config: MonkeyJumpConfig) -> list[str]:
    """What is wrong with the fields of a configuration and its adapter's options; empty when nothing is."""
    known = {field.name: field for field in fields(config)}
    found = value_problems({name: getattr(config, name) for name in known}, known)
    found += [*_adapter_problems(config), *_routing_problems(config)]
    # the other checks look into these lists
    lists = ("target_modules=", "shared_modules=", "layers_pattern=", "experts=")
    if not any(problem.startswith(lists) for problem in found):
        found += [*_module_problems(config), *_mixture_problems(config)]
    return found


def _adapter_problems(config: MonkeyJumpConfig) -> list[str]:
    known, options = ADAPTERS.names(), config.adapter_options
    if config.adapter not in known:
        return [
            f"adapter={config.adapter!r} is not known: choose one of {', '.join(known)}, or import the module that "
            f"registers an adapter of your own first.{did_you_mean(str(config.adapter), known)}"
        ]
    if options is None:
        return []
    if not isinstance(options, dict):
        return [f"adapter_options={options!r} must be a dict of the adapter's own settings, e.g. {{'name': 1}}."]
    problems: list[str] = ADAPTERS.get(config.adapter).config_problems(config)
    return problems


def _module_problems(config: MonkeyJumpConfig) -> list[str]:
    found = []
    if config.target_modules is not None and len(config.target_modules) == 0:
        found.append("target_modules=[] names no module: list the projections to adapt, e.g. ['q_proj', 'v_proj'].")
    for name in ("target_modules", "exclude_modules"):
        pattern = getattr(config, name)
        try:
            re.compile(pattern if isinstance(pattern, str) else "")
        except re.error as error:
            found.append(f"{name}={pattern!r} is no regular expression ({error}): correct it, or list module names.")
    shared, targets = config.shared_modules, config.target_modules
    if isinstance(targets, list) and shared:
        for name in shared:
            if name not in targets and not any(t.endswith(f".{name}") or name.endswith(f".{t}") for t in targets):
                found.append(
                    f"shared_modules names {name!r}, which is not among target_modules={targets}: "
                    f"add it to target_modules or take it out.{did_you_mean(name, targets)}"
                )
        if set(targets) <= set(shared) and config.layers_to_route != []:
            found.append(
                f"shared_modules={shared} holds every target, so nothing is left to route: "
                "take at least one out, or set layers_to_route=[] for adapters that are always on."
            )
    if isinstance(targets, str) and config.layers_to_transform is not None:
        found.append(
            f"layers_to_transform={config.layers_to_transform} has no effect on a target_modules pattern: "
            "list module names, or put the block numbers into the pattern."
        )
    if config.layers_pattern and config.layers_to_transform is None:
        found.append(
            f"layers_pattern={config.layers_pattern!r} has no effect without layers_to_transform: "
            "give the block numbers, or take it out."
        )
    return found


def _routing_problems(config: MonkeyJumpConfig) -> list[str]:
    found = []
    if config.top_k is None and config.router not in LEARNED_ROUTERS and config.placement != "nested":
        found.append(f"top_k=None (all experts) needs a learned router, not router={config.router!r}: give a number.")
    if config.expert_unit == "rank" and (config.learns_router or config.placement != "block"):
        found.append(
            f"expert_unit='rank' is for experts without router parameters, not for router={config.router!r} with "
            f"placement={config.placement!r}: use router='centroid' and placement='block', or drop it."
        )
    if config.expert_unit == "rank" and config.adapter not in RANKED:
        found.append(
            f"adapter={config.adapter!r} has no ranks that expert_unit='rank' could make experts of: use one of "
            f"{', '.join(RANKED)}, or expert_unit='adapter'."
        )
    if config.mean_gate is not None and not config.uses_centers:
        found.append(f"mean_gate={config.mean_gate} scales the gates of centres, which this routing has not: drop it.")
    if config.learns_router and config.granularity != "token":
        found.append(
            f"router={config.router!r} decides token by token: granularity={config.granularity!r} needs "
            "router='centroid'; use granularity='token'."
        )
    return found


def _mixture_problems(config: MonkeyJumpConfig) -> list[str]:
    """What several experts on a projection, whole feed-forwards (MixLoRA) and nested ranks (MoRE) ask for."""
    found = []
    counts = config.experts if isinstance(config.experts, list) else [config.experts]
    mixture = config.placement in ("projection", "ffn")
    if mixture and config.router not in (*LEARNED_ROUTERS, "uniform"):
        found.append(
            f"placement={config.placement!r} has no centres, so router={config.router!r} cannot serve it: "
            "set router='linear' or 'sigmoid' (learned), 'lime', or 'uniform' (the control)."
        )
    if mixture and is_int(config.top_k) and config.top_k > min(counts) and config.router != "uniform":  # type: ignore[operator]
        found.append(
            f"top_k={config.top_k} exceeds the {min(counts)} experts of some block (experts={config.experts!r}): "
            f"use top_k={min(counts)} or fewer, or more experts there."
        )
    if config.router == "lime" and (config.adapter, config.placement) != ("lime", "projection"):
        found.append(
            f"router='lime' reads the outputs of adapter='lime' with placement='projection', not of "
            f"adapter={config.adapter!r} with placement={config.placement!r}: use methods.build('lime')."
        )
    if config.placement == "ffn" and config.router == "sigmoid":
        found.append(
            "router='sigmoid' gives no shares, which placement='ffn' needs to mix whole feed-forwards: use "
            "router='linear'."
        )
    if config.placement == "ffn" and config.router == "linear" and not config.renormalize:
        found.append(
            "renormalize=False would shrink the feed-forward itself, whose outputs placement='ffn' mixes: set "
            "renormalize=True, so that the weights sum to 1."
        )
    if config.placement == "nested" and config.adapter not in RANKED:
        found.append(
            f"adapter={config.adapter!r} has no ranks that placement='nested' could choose from: use one of "
            f"{', '.join(RANKED)}."
        )
    return found
