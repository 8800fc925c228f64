"""Which values a MonkeyJumpConfig may hold: every check that needs no model, each with its fix."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from monkeyjump.config_structures import structure_problems
from monkeyjump.registry import ADAPTERS, did_you_mean

if TYPE_CHECKING:
    from monkeyjump.config import MonkeyJumpConfig

SIMILARITIES = ("cosine", "dot", "euclidean", "l1")
LEARNED_ROUTERS = ("linear", "sigmoid")
ROUTERS = ("centroid", "uniform", "shuffled", *LEARNED_ROUTERS)
PLACEMENTS = ("block", "projection", "ffn", "nested")
ROUTER_SCOPES = ("projection", "block")
NOISES = ("gaussian", "logit_mul", "input_mul")
ROUTER_INPUTS = ("block", "norm")
ROUTER_INITS = ("normal", "kaiming")
ROUTER_HIDDENS = (None, "swiglu")
THRESHOLD_GRADS = ("none", "ste", "subtract")
LB_NORMS = ("switch", "mixtral")
LB_REDUCES = ("mean", "sum", "global")
RANK_SCALES = ("code", "linear", "none")
TASK_REPS = ("mean", "prompt", "first")
GRANULARITIES = ("token", "sequence", "task")
SEQUENCE_TOKENS = ("prompt", "last", "mean", "max")
ROUTE_SPACES = ("raw", "centered")
CENTER_INITS = ("kmeans", "random", "random_normalized", "random_tokens")
EMA_ASSIGNS = ("topk", "top1")
EMA_SPACES = ("normalized", "raw")


def config_problems(config: MonkeyJumpConfig) -> list[str]:
    """What is wrong with the values of a configuration; empty when nothing is."""
    return [
        *_choice_problems(config),
        *_adapter_problems(config),
        *_number_problems(config),
        *_module_problems(config),
        *_mixture_problems(config),
        *structure_problems(config, LEARNED_ROUTERS),
        *_adalora_problems(config),
    ]


def _choice_problems(config: MonkeyJumpConfig) -> list[str]:
    choices = {
        "router": ROUTERS,
        "similarity": SIMILARITIES,
        "noise": NOISES,
        "granularity": GRANULARITIES,
        "sequence_token": SEQUENCE_TOKENS,
        "route_space": ROUTE_SPACES,
        "center_init": CENTER_INITS,
        "ema_assign": EMA_ASSIGNS,
        "ema_space": EMA_SPACES,
        "placement": PLACEMENTS,
        "router_scope": ROUTER_SCOPES,
        "router_input": ROUTER_INPUTS,
        "router_init": ROUTER_INITS,
        "router_hidden": ROUTER_HIDDENS,
        "threshold_grad": THRESHOLD_GRADS,
        "lb_norm": LB_NORMS,
        "lb_reduce": LB_REDUCES,
        "rank_scale": RANK_SCALES,
        "task_rep": TASK_REPS,
    }
    found = []
    for name, allowed in choices.items():
        value = getattr(config, name)
        if value not in allowed:
            hint = did_you_mean(str(value), [str(choice) for choice in allowed])
            found.append(f"{name}={value!r} is not known: choose one of {', '.join(map(str, allowed))}.{hint}")
    return found


def _adapter_problems(config: MonkeyJumpConfig) -> list[str]:
    known = ADAPTERS.names()
    if config.adapter not in known:
        return [
            f"adapter={config.adapter!r} is not known: choose one of {', '.join(known)}, or import the module that "
            f"registers an adapter of your own first.{did_you_mean(str(config.adapter), known)}"
        ]
    options = config.adapter_options
    if options is None:
        return []
    if not isinstance(options, dict):
        return [f"adapter_options={options!r} must be a dict of the adapter's own settings, e.g. {{'name': 1}}."]
    problems: list[str] = ADAPTERS.get(config.adapter).option_problems(options)
    return problems


def _number_problems(config: MonkeyJumpConfig) -> list[str]:
    found = []

    def check(name: str, ok: bool, rule: str, fix: str) -> None:
        if not ok:
            found.append(f"{name}={getattr(config, name)!r} must be {rule}: {fix}.")

    integers = {
        "r": (1, "use 1 or more"),
        "degree": (1, "use 1 or more (15 is the published value)"),
        "tasks": (1, "MoRE's authors use 8"),
        "parallel_width": (1, "MoA's authors use 16"),
        "prompt_length": (1, "MoA's authors use 10"),
        "init_tokens": (1, "the paper uses 50000"),
        "ema_interval": (1, "1 updates after every training forward"),
        "ema_stop": (0, "0 never moves the centres"),
        "deltaT": (1, "1 allocates at every optimiser step"),
    }
    for name, (least, fix) in integers.items():
        check(name, _is_int(getattr(config, name)) and getattr(config, name) >= least, f"an integer >= {least}", fix)
    check(
        "top_k",
        config.top_k is None or (_is_int(config.top_k) and config.top_k >= 1),
        "an integer >= 1",
        "use 1 or more, or None with a learned router for all experts; for always-on adapters set layers_to_route=[]",
    )
    for name in ("aux_loss_weight", "contrastive_weight"):
        value = getattr(config, name)
        check(name, _is_number(value) and value >= 0, "a number >= 0", "0 switches the loss off")
    check("alpha", _is_number(config.alpha) and config.alpha > 0, "a number > 0", "the paper uses 5")
    check("dropout", _is_number(config.dropout) and 0 <= config.dropout < 1, "in [0, 1)", "0 switches dropout off")
    check("temperature", _is_number(config.temperature) and config.temperature > 0, "a number > 0", "the paper uses 1")
    for name, fix in (
        ("uniform_gate", "1 is plain PEFT; the mean gate of a routed adapter makes the control that matches it"),
        ("mean_gate", "1 keeps the strength of plain PEFT, None leaves the gates as they come"),
    ):
        value = getattr(config, name)
        check(name, (value is None and name == "mean_gate") or (_is_number(value) and value > 0), "a number > 0", fix)
    check("jitter", _is_number(config.jitter) and config.jitter >= 0, "a number >= 0", "0 switches the noise off")
    check(
        "ema_momentum",
        _is_number(config.ema_momentum) and 0 <= config.ema_momentum < 1,
        "in [0, 1)",
        "the paper uses 0.5; to freeze the centres set ema_stop=0",
    )
    for name in ("beta1", "beta2"):
        value = getattr(config, name)
        check(name, _is_number(value) and 0 <= value < 1, "in [0, 1)", "AdaLoRA's authors use 0.85")
    check(
        "orth_reg_weight",
        _is_number(config.orth_reg_weight) and config.orth_reg_weight >= 0,
        "a number >= 0",
        "0 switches the orthogonality loss off",
    )
    return found


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
    if isinstance(config.shared_modules, str):
        found.append(
            f"shared_modules={config.shared_modules!r} must be a list of names: write [{config.shared_modules!r}]."
        )
    elif isinstance(config.target_modules, list) and config.shared_modules:
        targets = config.target_modules
        for name in config.shared_modules:
            if name not in targets and not any(t.endswith(f".{name}") or name.endswith(f".{t}") for t in targets):
                hint = did_you_mean(name, targets)
                found.append(
                    f"shared_modules names {name!r}, which is not among target_modules={targets}: "
                    f"add it to target_modules or take it out.{hint}"
                )
        if set(targets) <= set(config.shared_modules) and config.layers_to_route != []:
            found.append(
                f"shared_modules={config.shared_modules} holds every target, so nothing is left to route: "
                "take at least one out, or set layers_to_route=[] for adapters that are always on."
            )
    if isinstance(config.target_modules, str) and config.layers_to_transform is not None:
        found.append(
            f"layers_to_transform={config.layers_to_transform} has no effect on a target_modules pattern: "
            "list module names, or put the block numbers into the pattern."
        )
    for name in ("layers_to_transform", "layers_to_route"):
        value = getattr(config, name)
        if value is not None and any(not _is_int(i) or i < 0 for i in value):
            found.append(f"{name}={value!r} must hold block numbers >= 0: count blocks from 0.")
    if config.task_experts is not None and (
        not config.task_experts or any(not _is_int(e) or e < 0 for e in config.task_experts)
    ):
        found.append(
            f"task_experts={config.task_experts!r} must list one expert position >= 0 per task id, e.g. [0, 1, 2]."
        )
    return found


def _mixture_problems(config: MonkeyJumpConfig) -> list[str]:
    """Experts, placements and learned routers: what goes with what."""
    found = []
    counts = config.experts if isinstance(config.experts, list) else [config.experts]
    if not counts or any(not _is_int(count) or count < 1 for count in counts):
        return [f"experts={config.experts!r} must be an integer >= 1, or a list of them spread over the blocks."]
    mixture = config.placement in ("projection", "ffn")
    if mixture and config.router not in LEARNED_ROUTERS and config.router != "uniform":
        found.append(
            f"placement={config.placement!r} has no centres, so router={config.router!r} cannot serve it: "
            "set router='linear' or 'sigmoid' (learned), or 'uniform' (the control)."
        )
    if mixture and _is_int(config.top_k) and config.top_k > min(counts) and config.router != "uniform":  # type: ignore[operator]
        found.append(
            f"top_k={config.top_k} exceeds the {min(counts)} experts of some block (experts={config.experts!r}): "
            f"use top_k={min(counts)} or fewer, or more experts there."
        )
    if config.placement != "nested" and config.router in LEARNED_ROUTERS and config.granularity != "token":
        found.append(
            f"router={config.router!r} decides token by token: granularity={config.granularity!r} needs "
            "router='centroid'; use granularity='token'."
        )
    found += _router_problems(config)
    if config.share_A and (config.placement != "projection" or config.adapter not in ("lora", "lora_fa")):
        found.append(
            f"share_A=True needs placement='projection' and adapter 'lora' or 'lora_fa', not "
            f"placement={config.placement!r} with {config.adapter!r}: drop it."
        )
    if config.task_width is not None and (not _is_int(config.task_width) or config.task_width < 1):
        found.append(f"task_width={config.task_width!r} must be an integer >= 1, or None for the projection's width.")
    return found


def _router_problems(config: MonkeyJumpConfig) -> list[str]:
    found = []
    learned = config.router in LEARNED_ROUTERS
    if config.top_k is None and not learned and config.placement != "nested":
        found.append(f"top_k=None (all experts) needs a learned router, not router={config.router!r}: give a number.")
    if config.mean_gate is not None and not config.uses_centers:
        found.append(f"mean_gate={config.mean_gate} scales the gates of centres, which this routing has not: drop it.")
    if config.aux_loss_weight and config.router != "linear":
        found.append(
            f"aux_loss_weight={config.aux_loss_weight} balances a learned softmax router, not "
            f"router={config.router!r}: set router='linear', or drop it."
        )
    elif config.aux_loss_weight and config.top_k is None:
        found.append(
            f"aux_loss_weight={config.aux_loss_weight} with top_k=None has nothing to balance, every token uses every "
            "expert: give a top_k, or drop it."
        )
    if config.lb_reduce == "global" and isinstance(config.experts, list) and len(set(config.experts)) > 1:
        found.append(
            f"lb_reduce='global' adds up the load of routers that have as many experts, not experts={config.experts}: "
            "use 'mean' or 'sum'."
        )
    if config.contrastive_weight and config.placement not in ("projection", "nested"):
        found.append(
            f"contrastive_weight={config.contrastive_weight} compares experts of one projection: it needs "
            f"placement='projection', not {config.placement!r}."
        )
    if config.router != "sigmoid" and (config.router_hidden is not None or config.threshold is not None):
        found.append("router_hidden and threshold belong to router='sigmoid' (MoA): set it, or drop them.")
    if config.noise != "gaussian" and not config.learns_router:
        found.append(
            f"noise={config.noise!r} is for learned routers: a factor on cosines does nothing near 0; use 'gaussian'."
        )
    if config.threshold is not None and (not _is_number(config.threshold) or not 0 < config.threshold <= 1):
        found.append(
            f"threshold={config.threshold!r} must be in (0, 1], or None for soft gates: MoA's authors use 0.5."
        )
    return found


def _adalora_problems(config: MonkeyJumpConfig) -> list[str]:
    if config.target_r is None or not _is_int(config.r):
        return []
    found = []
    if not _is_int(config.target_r) or not 1 <= config.target_r <= config.r:
        return [f"target_r={config.target_r!r} must be in 1..r ({config.r}): use r for no rank allocation."]
    if config.target_r < config.r and config.adapter != "adalora":
        found.append(f"target_r={config.target_r} only applies to adapter='adalora', not {config.adapter!r}: drop it.")
    if config.allocates_rank:
        if config.total_step is None or config.total_step < 1:
            found.append(
                f"total_step={config.total_step!r} must be given when target_r < r: set it to the number of "
                "optimiser steps of the training."
            )
        elif config.tinit + config.tfinal >= config.total_step:
            found.append(
                f"tinit + tfinal = {config.tinit + config.tfinal} must be smaller than total_step={config.total_step}: "
                "the budget shrinks in between."
            )
    return found


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
