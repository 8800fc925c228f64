"""Settings with their help and the values they may have: one vocabulary for the configuration and for its options.

Each function of the first part returns a dataclass field; an adapter may list such fields as its `options`. None is
allowed where it is the default, or where `none` says so. The second part says which values go together, as far as that
needs no model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any

from monkeyjump.registry import ADAPTERS, did_you_mean

if TYPE_CHECKING:
    from monkeyjump.config import MonkeyJumpConfig

Test = Callable[[Any], bool]
LEARNED_ROUTERS = ("linear", "sigmoid", "lime")  # whose gates carry gradients
RANKED = ("lora", "lora_fa", "adalora")  # adapters whose ranks can be used one by one


def setting(
    text: str,
    default: Any = None,
    allows: Test | None = None,
    rule: str = "",
    fix: str = "",
    none: bool = False,
    **schema: Any,
) -> Any:
    """A setting of any kind; a value that it does not allow is told the rule and the fix.

    `schema` says what is allowed in the keywords of JSON schema, which the reference page and editors read.
    """
    if "type" in schema and (none or default is None):
        schema["type"] = [schema["type"], "null"]

    def problem(value: Any) -> str:
        fine = allows is None or (value is None and (none or default is None)) or allows(value)
        return "" if fine else f"must be {rule}: {fix}."

    return field(default=default, metadata={"help": text, "problem": problem, "schema": schema})


def choice(text: str, *allowed: str | None) -> Any:
    """A setting that is one of these, the first by default; its help lists them where it does not explain them."""
    known = [str(value) for value in allowed]

    def problem(value: Any) -> str:
        fix = f"choose one of {', '.join(known)}.{did_you_mean(str(value), known)}"
        return "" if value in allowed else f"is not known: {fix}"

    text = text if text.endswith(".") else f"{text}: {', '.join(known)}."
    return field(default=allowed[0], metadata={"help": text, "problem": problem, "schema": {"enum": list(allowed)}})


def integer(text: str, default: int | None, least: int, fix: str, none: bool = False) -> Any:
    def allows(value: Any) -> bool:
        return is_int(value) and value >= least

    return setting(text, default, allows, f"an integer >= {least}", fix, none, type="integer", minimum=least)


def _number(text: str, default: float | None, fix: str, *, fits: Test, rule: str, **limits: Any) -> Any:
    return setting(text, default, lambda value: is_number(value) and fits(value), rule, fix, type="number", **limits)


positive = partial(_number, fits=lambda value: value > 0, rule="a number > 0", exclusiveMinimum=0)
weight = partial(_number, fits=lambda value: value >= 0, rule="a number >= 0", minimum=0)
fraction = partial(_number, fits=lambda value: 0 <= value < 1, rule="in [0, 1)", minimum=0, exclusiveMaximum=1)


def names(text: str, rule: str, fix: str, lone: bool = False) -> Any:
    """A list of texts, or one text by itself where it may be `lone`."""
    return _several(text, None, lambda value: isinstance(value, str), rule, fix, lone, {"type": "string"})


def numbers(
    text: str, default: int | None, least: int, rule: str, fix: str, lone: bool = False, empty: bool = True
) -> Any:
    """A list of integers, or one by itself where it may be `lone`."""
    kind = {"type": "integer", "minimum": least}
    return _several(text, default, lambda value: is_int(value) and value >= least, rule, fix, lone, kind, empty)


def _several(
    text: str, default: Any, fits: Test, rule: str, fix: str, lone: bool, kind: Any, empty: bool = True
) -> Any:
    def allows(value: Any) -> bool:
        is_list = isinstance(value, (list, tuple))
        return all(map(fits, value)) and (empty or len(value) > 0) if is_list else lone and fits(value)

    entries = {"type": "array", "items": kind} | ({} if empty else {"minItems": 1})
    null = [{"type": "null"}] if default is None else []
    return setting(text, default, allows, rule, fix, anyOf=[entries, *[kind] * lone, *null])


def flag(text: str, default: bool = False) -> Any:
    fix = f"leave it out for {default}"
    return setting(text, default, lambda value: isinstance(value, bool), "True or False", fix, type="boolean")


def value_problems(values: Mapping[str, Any], settings: Mapping[str, Field[Any]]) -> list[str]:
    """What is wrong with each value by itself: the setting, its value, the rule and the fix."""
    told = {name: settings[name].metadata.get("problem", lambda value: "")(value) for name, value in values.items()}
    return [f"{name}={values[name]!r} {words}" for name, words in told.items() if words]


def broken(rules: Mapping[str, object]) -> list[str]:
    """The problems of a table in which each has the condition that it is one."""
    return [problem for problem, found in rules.items() if found]


def described(settings: Iterable[Field[Any]]) -> str:
    """The reference of those that are settings: name, default and help."""
    own = [each for each in settings if "problem" in each.metadata]
    return "\n".join(f"  {each.name} = {each.default!r}: {each.metadata['help']}" for each in own)


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


# -- which values go together ---------------------------------------------------------------------


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
        "task_experts=0 is no number of groups: use 1 or more, or a list of experts.": config.task_experts == 0,
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
