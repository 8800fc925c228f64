"""Where experts live: which modules are adapted, in which block, and which of them are routed.

Everything that can be wrong between a configuration and a model is found here, before anything is changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import nn

from monkeyjump.adapters.mixture import mixture_problems
from monkeyjump.config import MonkeyJumpConfig
from monkeyjump.errors import ConfigError
from monkeyjump.registry import did_you_mean
from monkeyjump.tuner.module_paths import (
    block_index,
    block_of,
    free_linears,
    inside_tuner_layers,
    is_linear,
    linear_shape,
    matches,
    owner_of,
    reads_encoder,
    short_names,
    targets_of,
)
from monkeyjump.tuner.routers.mixlora_placement import feed_forward_problem, in_attention, seen_from_feed_forward
from monkeyjump.tuner.routers.moa_placement import Extra, plan_extras, plan_norm

# Linears that are never called, by the class of their module, which hands their weights to a kernel instead.
NEVER_CALLED = {
    **dict.fromkeys(["MambaMixer", "FalconMambaMixer"], ("x_proj", "dt_proj", "out_proj")),
    "JambaMambaMixer": ("dt_proj",),
    **dict.fromkeys(["Mamba2Mixer", "NemotronHMamba2Mixer", "BambaMixer", "FalconH1Mixer"], ("out_proj",)),
    **dict.fromkeys(["GraniteMoeHybridMambaLayer", "Zamba2MambaMixer", "MultiheadAttention"], ("out_proj",)),
}


@dataclass(frozen=True)
class Block:
    """One transformer block with the modules of it that are adapted."""

    key: str  # how a user names it: "3", or "decoder.block.3" where the model has several lists of blocks
    path: str  # module path, e.g. "model.layers.3"
    owner: str  # path of the model that runs the blocks and is handed the 2-D mask
    width: int  # size of the hidden state that enters the block
    routed: tuple[str, ...]  # full paths of the routed projections, in module order
    names: tuple[str, ...]  # what to call them, e.g. ("q_proj", "k_proj", "v_proj")
    experts: int = 0  # gates of a router: the routed projections, or the experts that each of them holds
    feed_forward: str = ""  # placement="ffn": path of the module whose experts the routed projections are
    extras: tuple[Extra, ...] = ()  # further experts of the block, after the routed projections
    norm: str = ""  # router_input="norm": path of the norm on the block's input
    host: str = ""  # where nothing is routed: the projection that the router hangs on


@dataclass(frozen=True)
class Role:
    """The part that a projection plays in its block."""

    width: int  # of the state that enters the block
    experts: int  # gates of a router in this block
    first: bool  # whether what the block has once (a learned router) hangs on this projection
    plain: bool = False  # whether its own adapter is always on, although it holds the router
    extras: tuple[Extra, ...] = ()  # further experts of the block that hang on this projection


@dataclass(frozen=True)
class Placement:
    targets: tuple[str, ...]  # full paths of every adapted module
    blocks: tuple[Block, ...]  # the blocks that route

    def role(self, path: str) -> Role | None:
        """The role of the projection at `path`; None for one that is always on."""
        for block in self.blocks:
            if path in block.routed:
                first = path == block.routed[0]
                return Role(block.width, block.experts, first, extras=block.extras if first else ())
            if path == block.host:
                return Role(block.width, block.experts, first=True, plain=True)
        return None


def place(model: nn.Module, config: MonkeyJumpConfig, is_target: Callable[[str], bool]) -> Placement:
    """Plan an adapter on `model`. Raises one ConfigError that holds every problem."""
    modules = dict(model.named_modules())
    inside = inside_tuner_layers(modules)
    targets = targets_of(modules, is_target)
    problems = _name_problems(modules, targets, inside, config)
    problems += [
        f"target module {path!r} is a {type(module).__name__}; only linear layers can carry an adapter: "
        "leave it out of target_modules."
        for path in targets
        if not is_linear(module := modules[path])
    ]
    problems += [
        f"target module {path!r} is never called: {kind} hands its weight to a kernel, so an adapter would do nothing: "
        "leave it out of target_modules, or name it in exclude_modules."
        for path in targets
        if path.rpartition(".")[2] in NEVER_CALLED.get(kind := type(modules[path.rpartition(".")[0]]).__name__, ())
    ]
    problems += [
        f"{len(spread)} target modules ({spread[0]!r} first) have weights that are spread over ranks: an adapter here "
        "would read and write parts of their states. Load the model without tp_plan; with FSDP2, shard it after the "
        "adapter is added."
        for spread in [[path for path in targets if hasattr(getattr(modules[path], "weight", None), "device_mesh")]]
        if spread
    ]
    homes = {path: block_of(path, modules) for path in targets}
    problems += _layer_problems(modules, homes, config)
    blocks, block_problems = _plan_blocks(modules, targets, homes, config)
    problems += block_problems
    if problems:
        raise ConfigError(problems, title=f"this configuration does not fit {type(model).__name__}")
    return Placement(tuple(targets), tuple(blocks))


def _name_problems(
    modules: dict[str, nn.Module], targets: list[str], inside: set[str], config: MonkeyJumpConfig
) -> list[str]:
    leaves = sorted({path.rpartition(".")[2] for path, m in modules.items() if path not in inside and is_linear(m)})
    found = []
    if isinstance(config.target_modules, (list, set)):
        known = [path for path in modules if path not in inside]
        for name in config.target_modules:
            if not any(matches(path, name) for path in known):
                found.append(
                    f"target_modules names {name!r}, which no module of the model has.{did_you_mean(name, leaves)} "
                    f"Linear layers here: {', '.join(leaves)}."
                )
    elif not targets:
        found.append(
            f"target_modules={config.target_modules!r} matches no module: check the pattern. "
            f"Linear layers here: {', '.join(leaves)}."
        )
    for name in config.shared_modules or []:
        if targets and not any(matches(path, name) for path in targets):
            found.append(
                f"shared_modules names {name!r}, which is not among the adapted modules: "
                "add it to target_modules or take it out."
            )
    return found


def _layer_problems(modules: dict[str, nn.Module], homes: dict[str, str | None], config: MonkeyJumpConfig) -> list[str]:
    linears = (block_of(path, modules) for path, module in modules.items() if is_linear(module))
    blocks = {
        "layers_to_transform": ("the model's blocks", sorted({block_index(home) for home in linears if home})),
        "layers_to_route": ("the adapted blocks", sorted({block_index(home) for home in homes.values() if home})),
    }
    found = []
    for name, (what, present) in blocks.items():
        wanted = getattr(config, name)
        missing = [i for i in wanted or [] if i not in present]
        if missing and present:
            found.append(f"{name}={wanted} names blocks {missing} that are not among {what}: {_span(present)}.")
    return found


def _span(numbers: list[int]) -> str:
    contiguous = numbers == list(range(numbers[0], numbers[-1] + 1))
    return f"{numbers[0]}..{numbers[-1]}" if contiguous else str(numbers)


def _plan_blocks(
    modules: dict[str, nn.Module], targets: list[str], homes: dict[str, str | None], config: MonkeyJumpConfig
) -> tuple[list[Block], list[str]]:
    problems: list[str] = []
    if config.layers_to_route == []:
        return [], problems
    routed_by_block: dict[str, list[str]] = {}
    for path in targets:
        home = homes[path]
        shared = any(matches(path, name) for name in config.shared_modules or [])
        if home is None:
            if not shared:
                problems.append(
                    f"target module {path!r} is in no block (no nn.ModuleList above it), so it cannot be routed: "
                    "add it to shared_modules to keep it always on, or take it out of target_modules."
                )
            continue
        shared = shared or (config.placement == "ffn" and in_attention(path, home))
        if isinstance(config.layers_to_route, list) and block_index(home) not in config.layers_to_route:
            continue
        if path not in (config.shared_modules or []):  # a block may be emptied, but only by whole paths
            routed_by_block.setdefault(home, [])
        if not shared:
            routed_by_block[home].append(path)
            if reads_encoder(path, config):
                problems.append(
                    f"target module {path!r} reads the encoder's tokens, which granularity='token' of a decoder block "
                    "cannot route: use granularity='sequence' or 'task', share it, or exclude it with exclude_modules."
                )
    problems += _count_problems(routed_by_block, config)
    problems += mixture_problems(config)
    if routed_by_block and isinstance(config.experts, list) and len(config.experts) > len(routed_by_block):
        problems.append(
            f"experts={config.experts} names {len(config.experts)} parts of the depth, but only "
            f"{len(routed_by_block)} blocks route: give at most one number per block."
        )
    experts = spread_experts(config, routed_by_block)
    lists = {home.rpartition(".")[0] for home in routed_by_block}
    blocks = []
    for home, routed in routed_by_block.items():
        shown = routed or [path for path in targets if homes[path] == home][:1]
        block = replace(_block(home, shown, modules, several_lists=len(lists) > 1), experts=experts[home])
        if config.placement == "ffn":
            problems += feed_forward_problem(home, routed)
            blocks.append(seen_from_feed_forward(block, routed))
        elif routed:
            linears = [path for path in free_linears(modules) if path.startswith(f"{home}.")]
            extras, found = plan_extras(home, linears, modules, config.moa.extra_experts or [])
            norm, missing = plan_norm(home, modules) if config.learned.router_input == "norm" else ("", [])
            problems += found + missing
            names, experts_here = (*block.names, *(extra.kind for extra in extras)), block.experts + len(extras)
            blocks.append(replace(block, extras=extras, norm=norm, names=names, experts=experts_here))
    return blocks, problems


def spread_experts(config: MonkeyJumpConfig, routed_by_block: dict[str, list[str]]) -> dict[str, int]:
    """Experts per block: its routed projections, or `config.experts`, a list of which is spread in equal parts."""
    if config.placement not in ("projection", "ffn"):
        return {home: len(routed) for home, routed in routed_by_block.items()}
    if isinstance(config.experts, int):
        return dict.fromkeys(routed_by_block, config.experts)
    homes: dict[str, list[str]] = {}
    for home in routed_by_block:
        homes.setdefault(home.rpartition(".")[0], []).append(home)
    parts = len(config.experts)
    return {
        home: config.experts[position * parts // len(blocks)]
        for blocks in homes.values()
        for position, home in enumerate(sorted(blocks, key=block_index))
    }


def _count_problems(routed_by_block: dict[str, list[str]], config: MonkeyJumpConfig) -> list[str]:
    empty = [home for home, routed in routed_by_block.items() if not routed]
    if empty and config.placement == "ffn":  # attention alone: LoRA with an idle router
        return []
    if empty:
        return [
            f"shared_modules={config.shared_modules} leaves nothing to route in block {empty[0]!r}: take a projection "
            "out of it, or leave the block out of layers_to_route ([] routes none)."
        ]
    if not routed_by_block:
        return []
    home, routed = min(routed_by_block.items(), key=lambda item: len(item[1]))
    names = [path.rpartition(".")[2] for path in routed]
    found = []
    one_each = config.placement == "block" and (config.uses_centers or config.learns_router)
    experts = len(routed) * config.units
    if one_each and config.top_k is not None and config.top_k > experts:
        ranks = f", times {config.units} ranks," if config.units > 1 else ""
        found.append(
            f"top_k={config.top_k} is larger than the {len(routed)} routed projection(s) {names}{ranks} of block "
            f"{home!r}: lower top_k to {experts} or less, or route more projections."
        )
    if config.groups is not None and not (config.top_k or 1) <= config.groups <= experts:
        found.append(
            f"task_experts={config.groups} deals the {experts} experts of block {home!r} out to as many groups, of "
            f"which a token jumps to top_k={config.top_k}: use at least {config.top_k} and at most {experts} groups."
        )
    by_task = [] if isinstance(config.task_experts, int | None) else config.task_experts
    if (last := max(by_task, default=0)) >= experts:
        found.append(
            f"task_experts={config.task_experts} names expert {last}, but block {home!r} has only "
            f"experts 0..{experts - 1} ({names})."
        )
    return found


def _block(home: str, routed: list[str], modules: dict[str, nn.Module], several_lists: bool) -> Block:
    owner = owner_of(home, modules)
    return Block(
        key=home if several_lists else str(block_index(home)),
        path=home,
        owner=owner,
        width=_width(modules[owner], modules[routed[0]]),
        routed=tuple(routed),
        names=tuple(short_names(home, routed)),
    )


def _width(owner: nn.Module, first_routed: nn.Module) -> int:
    width = getattr(getattr(owner, "config", None), "hidden_size", None)
    return int(width) if isinstance(width, int) else linear_shape(first_routed)[0]
