"""`method_options`: what only one kind of router or placement reads, each kind with its own settings and checks.

Every kind is a frozen dataclass and an attribute of the configuration (`config.learned.aux_loss_weight`). It holds the
defaults where the configuration is of another kind, so that code may ask without looking which kind it is.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, get_type_hints

from monkeyjump.config_rules import (
    choice,
    flag,
    fraction,
    integer,
    is_number,
    positive,
    setting,
    value_problems,
    weight,
)
from monkeyjump.registry import ADAPTERS, did_you_mean

if TYPE_CHECKING:
    from monkeyjump.config import MonkeyJumpConfig

OFF = "0 switches the loss off"
EXTRAS: tuple[list[str], ...] = ([], ["parallel"], ["prompt"], ["parallel", "prompt"], ["prompt", "parallel"])


@dataclass(frozen=True)
class MethodOptions:
    """The settings of one kind of router or placement; a subclass adds checks of what goes with what."""

    needs: ClassVar[str]  # what a configuration must say
    serves: ClassVar[staticmethod[[MonkeyJumpConfig], bool]]  # whether it says that

    def problems(self, config: MonkeyJumpConfig) -> list[str]:
        return []


@dataclass(frozen=True)
class UniformOptions(MethodOptions):
    needs = "router='uniform'"
    serves = staticmethod(lambda config: config.router == "uniform")

    uniform_gate: float = positive(
        "The gate of every routed projection.", 1.0, "1 is plain PEFT, the mean gate of a routed adapter its control"
    )


@dataclass(frozen=True)
class ProjectionOptions(MethodOptions):
    needs = "placement='projection'"
    serves = staticmethod(lambda config: config.placement == "projection")

    share_A: bool = flag("All experts of a projection share one A (HydraLoRA).")  # noqa: N815
    router_scope: str = choice("Learned routers: one per projection, or one per block.", "projection", "block")
    contrastive_weight: float = weight(
        "Weight of the contrastive loss between experts' outputs (MoELoRA, in a form of ours).", 0.0, OFF
    )

    def problems(self, config: MonkeyJumpConfig) -> list[str]:
        if self.share_A and config.adapter not in ("lora", "lora_fa"):
            return [f"share_A=True needs adapter 'lora' or 'lora_fa', not {config.adapter!r}: drop it."]
        return []


@dataclass(frozen=True)
class LearnedOptions(MethodOptions):
    needs = "router='linear' or router='sigmoid'"
    serves = staticmethod(lambda config: config.learns_router)

    router_init: str = choice("normal (std 0.02) or kaiming (uniform, a = sqrt 5).", "normal", "kaiming")
    router_input: str = choice(
        "Router of a whole block: block, it reads the state that enters the block; norm, that state after the block's "
        "first norm (as MoA's Transformers code has it).",
        *("block", "norm"),
    )
    noise: str = choice(
        "What jitter is: gaussian, the deviation of noise added to the logits; logit_mul and input_mul, logits or the "
        "router's input (MixLoRA) times a number in 1 - jitter .. 1 + jitter.",
        *("gaussian", "logit_mul", "input_mul"),
    )
    aux_loss_weight: float = weight("router='linear': weight of the load-balance loss.", 0.0, OFF)
    lb_norm: str = choice(
        "Balance loss of an even load: switch, 1; mixtral, top_k; squared (LiME), 0.", "switch", "mixtral", "squared"
    )
    lb_reduce: str = choice(
        "Over routers: mean or sum of their losses, or global: one loss on the load of all.", "mean", "sum", "global"
    )

    def problems(self, config: MonkeyJumpConfig) -> list[str]:
        found = []
        balance, scope = f"aux_loss_weight={self.aux_loss_weight}", config.projection.router_scope
        if self.aux_loss_weight and config.router not in ("linear", "lime"):
            found.append(f"{balance} balances router='linear', not router={config.router!r}: set that, or drop it.")
        elif self.aux_loss_weight and config.top_k is None and config.router != "lime":
            found.append(f"{balance} has nothing to balance with top_k=None, all experts: give a top_k, or drop it.")
        if self.lb_reduce == "global" and isinstance(config.experts, list) and len(set(config.experts)) > 1:
            found.append(
                "lb_reduce='global' adds up the load of routers that have as many experts, not "
                f"experts={config.experts}: use 'mean' or 'sum'."
            )
        if self.router_input == "norm" and "block" not in (config.placement, scope):
            found.append(
                "router_input='norm' is for a learned router that a whole block has, not for "
                f"placement={config.placement!r}, router_scope={scope!r}: drop it."
            )
        return found


@dataclass(frozen=True)
class SigmoidOptions(MethodOptions):
    needs = "router='sigmoid'"
    serves = staticmethod(lambda config: config.router == "sigmoid" and config.learns_router)

    router_hidden: str | None = choice("None is linear with bias; swiglu has a layer of 4 E.", None, "swiglu")
    threshold: float | None = setting(
        "None keeps every expert; a number G_max keeps those whose gate reaches G_max * sigmoid(w x + c).",
        None, lambda value: is_number(value) and 0 < value <= 1, "in (0, 1], or None for soft gates",
        "MoA's authors use 0.5", type="number", exclusiveMinimum=0, maximum=1,
    )  # fmt: skip
    threshold_grad: str = choice(
        "none (as published, the threshold never learns), ste (straight-through), subtract (gate minus threshold).",
        *("none", "ste", "subtract"),
    )


@dataclass(frozen=True)
class LimeOptions(MethodOptions):
    needs = "router='lime'"
    serves = staticmethod(lambda config: config.router == "lime")

    gamma: float = fraction("Weight of the delta against the frozen output.", 0.7, "LiME's authors use 0.7")
    theta: float = fraction("top_k=None keeps experts with this share of the largest one.", 0.5, "they use 0.5")
    softness: float = positive("Temperature of the sigmoid around that bar.", 0.5, "they use 0.5")


@dataclass(frozen=True)
class MoaOptions(MethodOptions):
    needs = "placement='block' with router='sigmoid' or 'linear'"
    serves = staticmethod(lambda config: config.placement == "block" and config.learns_router)

    extra_experts: list[str] | None = setting(
        "Further experts of each block: parallel, a bottleneck beside the feed-forward; prompt, learned states that "
        "every query also attends to.", None, EXTRAS.__contains__,
        "a list of parallel and prompt, each once at most", "None or [] has no further experts",
        type="array", items={"enum": ["parallel", "prompt"]}, uniqueItems=True,
    )  # fmt: skip
    parallel_width: int = integer("Width of the 'parallel' bottleneck.", 16, 1, "MoA's authors use 16")
    prompt_length: int = integer("Number of learned states of 'prompt'.", 10, 1, "MoA's authors use 10")

    def problems(self, config: MonkeyJumpConfig) -> list[str]:
        if self.extra_experts and config.layers_to_route == []:
            return [f"extra_experts={self.extra_experts} have no router with layers_to_route=[]: drop one of the two."]
        return []


@dataclass(frozen=True)
class MoreOptions(MethodOptions):
    needs = "placement='nested'"
    serves = staticmethod(lambda config: config.placement == "nested")

    tasks: int = integer("How many tasks there are.", 8, 1, "MoRE's authors use 8")
    task_width: int | None = integer("Width of a task embedding.", None, 1, "None is that of the projection's input")
    rank_scale: str = choice("Weight of rank i of r: code, (i/r)^2; linear, i/r; none, 1.", "code", "linear", "none")
    task_rep: str = choice(
        "The state that is compared with the task embeddings: mean of the prompt, its last token (prompt), or the "
        "first token (the authors' code).",
        *("mean", "prompt", "first"),
    )
    contrastive_weight: float = weight("Weight of the contrastive loss between tasks.", 0.0, OFF)

    def problems(self, config: MonkeyJumpConfig) -> list[str]:
        if self.task_width is None or not self.contrastive_weight:
            return []
        return [
            f"task_width={self.task_width} embeddings cannot be compared with states, which contrastive_weight="
            f"{self.contrastive_weight} does: set contrastive_weight=0, or task_width=None."
        ]


class OptionKinds:
    """The attributes of a configuration that hold its options; in this order, since `learned` looks at `projection`."""

    uniform: UniformOptions
    projection: ProjectionOptions
    learned: LearnedOptions
    sigmoid: SigmoidOptions
    lime: LimeOptions
    moa: MoaOptions
    more: MoreOptions


KINDS: dict[str, type[MethodOptions]] = get_type_hints(OptionKinds)
METHOD_OPTIONS = {
    field.name: [kind for kind in KINDS.values() if hasattr(kind, field.name)]
    for owner in KINDS.values()
    for field in fields(owner)
}
# Settings of adapters that were fields of the configuration once, and may still be given as such.
ADAPTER_OPTIONS: dict[str, str] = {
    "degree": "propulsion",
    "project_gradient": "lora_fa",
    **dict.fromkeys(("target_r", "tinit", "tfinal", "deltaT", "beta1", "beta2", "total_step"), "adalora"),
    **dict.fromkeys(("score_per_token", "orth_reg_weight"), "adalora"),
}
OPTION_NAMES = (*METHOD_OPTIONS, *ADAPTER_OPTIONS)


def place_options(config: MonkeyJumpConfig, given: dict[str, Any], saved: bool) -> None:
    """Move options that were `given` like fields into `adapter_options` and `method_options`.

    One that nobody reads here and that has its default says nothing and is dropped. A file that was `saved` when these
    were fields lists all of them, so there it is dropped whatever its value.
    """
    for name, value in given.items():
        if name in METHOD_OPTIONS:
            target, default = "method_options", getattr(METHOD_OPTIONS[name][0], name)
        else:
            target, default = "adapter_options", ADAPTERS.get(ADAPTER_OPTIONS[name]).default(name)
        options = getattr(config, target)
        says_something = reads_option(config, name) or not (saved or value == default)
        if says_something and isinstance(options, dict | None):
            setattr(config, target, {**(options or {}), name: value})


def reads_option(config: MonkeyJumpConfig, name: str) -> bool:
    """Whether the router, the placement or the adapter of a configuration has an option of this name."""
    if name in METHOD_OPTIONS:
        return any(kind.serves(config) for kind in METHOD_OPTIONS[name])
    return config.adapter in ADAPTERS and name in ADAPTERS.get(config.adapter).options


def read_options(config: MonkeyJumpConfig) -> list[str]:
    """Set the attribute of every kind from `method_options`; returns what is wrong with them."""
    options = {} if config.method_options is None else config.method_options
    if not isinstance(options, dict):
        found = [f"method_options={options!r} must be a dict of the method's own settings, e.g. {{'name': 1}}."]
        options = {}
    else:
        foreign = [name for name in options if name not in METHOD_OPTIONS or not reads_option(config, name)]
        found = [_owner_problem(name, options[name], config) for name in foreign]
    for attribute, kind in KINDS.items():
        known = {field.name: field for field in fields(kind)} if kind.serves(config) else {}
        values = {name: options[name] for name in known if name in options}
        wrong = value_problems(values, known)
        chosen = kind() if wrong else kind(**values)
        setattr(config, attribute, chosen)
        found += wrong or chosen.problems(config)
    return found


def _owner_problem(name: str, value: Any, config: MonkeyJumpConfig) -> str:
    here = f"router={config.router!r} with placement={config.placement!r}"
    if name not in METHOD_OPTIONS:
        known = [known for known in METHOD_OPTIONS if reads_option(config, known)]
        listed = f"it has {', '.join(known) or 'none'}.{did_you_mean(str(name), known)}"
        return f"method_options names {name!r}, which {here} does not have: {listed}"
    needs = " or ".join(kind.needs for kind in METHOD_OPTIONS[name])
    return f"{name}={value!r} needs {needs}, not {here}: set it, or drop {name}."
