"""Which values of a MonkeyJumpConfig go together: every check that needs no model, each with its fix."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import TYPE_CHECKING

from monkeyjump.config_rules import broken, is_int, value_problems
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
    shared, targets = config.shared_modules or [], config.target_modules
    listed = targets if isinstance(targets, list) else []
    found += [
        f"shared_modules names {name!r}, which is not among target_modules={targets}: add it to target_modules or take "
        f"it out.{did_you_mean(name, listed)}"
        for name in shared
        if listed and not any(t == name or t.endswith(f".{name}") or name.endswith(f".{t}") for t in listed)
    ]
    return found + broken(
        {
            f"shared_modules={shared} holds every target, so nothing is left to route: take at least one out, or set "
            "layers_to_route=[] for adapters that are always on.": (
                listed and set(listed) <= set(shared) and config.layers_to_route != []
            ),
            f"layers_to_transform={config.layers_to_transform} has no effect on a target_modules pattern: list module "
            "names, or put the block numbers into the pattern.": (
                isinstance(targets, str) and config.layers_to_transform is not None
            ),
            f"layers_pattern={config.layers_pattern!r} has no effect without layers_to_transform: give the block "
            "numbers, or take it out.": config.layers_pattern and config.layers_to_transform is None,
        }
    )


def _routing_problems(config: MonkeyJumpConfig) -> list[str]:
    ranks = config.expert_unit == "rank"
    rules = {
        f"top_k=None (all experts) needs a learned router, not router={config.router!r}: give a number.": (
            config.top_k is None and config.router not in LEARNED_ROUTERS and config.placement != "nested"
        ),
        f"expert_unit='rank' is for experts without router parameters, not for router={config.router!r} with "
        f"placement={config.placement!r}: use router='centroid' and placement='block', or drop it.": (
            ranks and (config.learns_router or config.placement != "block")
        ),
        f"adapter={config.adapter!r} has no ranks that expert_unit='rank' could make experts of: use one of "
        f"{', '.join(RANKED)}, or expert_unit='adapter'.": ranks and config.adapter not in RANKED,
        f"mean_gate={config.mean_gate} scales the gates of centres, which this routing has not: drop it.": (
            config.mean_gate is not None and not config.uses_centers
        ),
        f"router={config.router!r} decides token by token: granularity={config.granularity!r} needs router='centroid'; "
        "use granularity='token'.": config.learns_router and config.granularity != "token",
    }
    return broken(rules)


def _mixture_problems(config: MonkeyJumpConfig) -> list[str]:
    """What several experts on a projection, whole feed-forwards (MixLoRA) and nested ranks (MoRE) ask for."""
    fewest = min(config.experts) if isinstance(config.experts, list) else config.experts
    router, placement, top_k = config.router, config.placement, config.top_k
    mixture = placement in ("projection", "ffn")
    rules = {
        f"placement={placement!r} has no centres, so router={router!r} cannot serve it: set router='linear' or "
        "'sigmoid' (learned), 'lime', or 'uniform' (the control).": (
            mixture and router not in (*LEARNED_ROUTERS, "uniform")
        ),
        f"top_k={top_k} exceeds the {fewest} experts of some block (experts={config.experts!r}): use top_k={fewest} or "
        "fewer, or more experts there.": mixture and is_int(top_k) and (top_k or 0) > fewest and router != "uniform",
        f"router='lime' reads the outputs of adapter='lime' with placement='projection', not of "
        f"adapter={config.adapter!r} with placement={placement!r}: use methods.build('lime').": (
            router == "lime" and (config.adapter, placement) != ("lime", "projection")
        ),
        "router='sigmoid' gives no shares, which placement='ffn' needs to mix whole feed-forwards: use "
        "router='linear'.": placement == "ffn" and router == "sigmoid",
        "renormalize=False would shrink the feed-forward itself, whose outputs placement='ffn' mixes: set "
        "renormalize=True, so that the weights sum to 1.": (
            placement == "ffn" and router == "linear" and not config.renormalize
        ),
        f"adapter={config.adapter!r} has no ranks that placement='nested' could choose from: use one of "
        f"{', '.join(RANKED)}.": placement == "nested" and config.adapter not in RANKED,
    }
    return broken(rules)
