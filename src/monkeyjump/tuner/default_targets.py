"""Targets that the user did not name: which modules they are, and which of them can be routed.

A list of target modules is a decision, and what of it cannot be routed is an error. None and "all-linear" leave the
decision to the library: what cannot be routed is then always on, as it would be with PEFT's LoRA, and one warning says
so. The configuration is filled in, so that it loads as an explicit one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

from torch import nn

from monkeyjump.config import MonkeyJumpConfig
from monkeyjump.errors import MonkeyJumpWarning
from monkeyjump.tuner.module_paths import block_index, block_of, matches, reads_encoder, shortest_end, targets_of
from monkeyjump.tuner.routers.mixlora_placement import feed_forward_of, in_attention

LLAMA_LIKE = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj"]
PAPER_SHARED = ["o_proj", "gate_proj"]
DEFAULT_TARGETS: dict[str, list[str]] = {
    **dict.fromkeys(["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "smollm3"], LLAMA_LIKE),
    **dict.fromkeys(["qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text"], LLAMA_LIKE),
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "bert": ["query", "key", "value"],
    "modernbert": ["Wqkv", "Wo", "Wi"],
    "t5": ["q", "k", "v", "o"],
}


def leaves_targets_open(config: MonkeyJumpConfig) -> bool:
    targets = config.target_modules
    return targets is None or (isinstance(targets, str) and targets.lower() == "all-linear")


def shares_as_the_paper(config: MonkeyJumpConfig) -> bool:
    """Whether neither targets nor shared modules are given, for a router of the paper."""
    not_given = config.target_modules is None and config.shared_modules is None
    return not_given and config.placement == "block" and not config.learns_router


def settle(model: nn.Module, config: MonkeyJumpConfig, is_target: Callable[[str], bool], paper: bool) -> None:
    """Fill in `shared_modules`, `top_k` and `layers_to_route` for targets that the user left open.

    `paper` says that the modules which the paper shares are shared where the targets are the paper's.
    """
    modules = dict(model.named_modules())
    targets = targets_of(modules, is_target)
    if paper and set(config.target_modules or ()) == set(LLAMA_LIKE):
        config.shared_modules = [name for name in PAPER_SHARED if any(matches(path, name) for path in targets)]
    if config.layers_to_route == []:
        return
    reasons, routed = _sort(modules, targets, config)
    said = [
        f"{_short_names(paths, targets)} {why}"
        for why in dict.fromkeys(reasons.values())
        if (paths := [path for path in targets if reasons.get(path) == why])
    ]
    said = [f"always on instead of routed: {'; '.join(said)}"] if said else []
    sizes = [len(paths) * config.units for paths in routed.values() if paths]
    if not sizes and config.placement != "ffn":
        config.layers_to_route = []
        said.append("so nothing is routed here")
    elif reasons:
        emptied = [home for home, paths in routed.items() if not paths and config.placement != "ffn"]
        whole = [path for path in reasons if block_of(path, modules) in emptied]
        names = _short_names([path for path in reasons if path not in whole], targets)
        config.shared_modules = [*(config.shared_modules or []), *names, *whole]
    if sizes and _needs_several(config) and config.top_k > min(sizes):  # type: ignore[operator]
        said.append(f"top_k is {min(sizes)} instead of {config.top_k}, since a block has no more experts")
        config.top_k = min(sizes)
    if said:
        warnings.warn(
            f"target_modules is not a list, so the adapter is fitted to {type(model).__name__}: {', '.join(said)}. "
            "List target_modules and shared_modules to decide this yourself.",
            MonkeyJumpWarning,
            stacklevel=2,
        )


def _sort(
    modules: dict[str, nn.Module], targets: list[str], config: MonkeyJumpConfig
) -> tuple[dict[str, str], dict[str, list[str]]]:
    """The targets that cannot be routed, each with the reason, and the others by their block."""
    reasons: dict[str, str] = {}
    routed: dict[str, list[str]] = {}
    for path in targets:
        home = block_of(path, modules)
        if any(matches(path, name) for name in config.shared_modules or []):
            continue
        if home is None:
            reasons[path] = "(in no block)"
        elif config.layers_to_route is None or block_index(home) in config.layers_to_route:  # type: ignore[operator]
            routed.setdefault(home, [])
            if reads_encoder(path, config):
                reasons[path] = "(reads the encoder's tokens)"
            elif not (config.placement == "ffn" and in_attention(path, home)):
                routed[home].append(path)
    for home, paths in routed.items():
        if config.placement == "ffn" and paths and feed_forward_of(home, paths) is None:
            reasons |= dict.fromkeys(paths, "(in a feed-forward that is no module of its own)")
            routed[home] = []
        elif len(paths) == 1 and _needs_several(config):
            reasons[paths[0]] = "(alone in its block)"
            routed[home] = []
    return reasons, routed


def _needs_several(config: MonkeyJumpConfig) -> bool:
    """Whether a router chooses several of the projections of a block."""
    chooses = config.placement == "block" and (config.uses_centers or config.learns_router)
    return chooses and config.top_k is not None and config.top_k > 1


def _short_names(paths: list[str], targets: list[str]) -> list[str]:
    """The shortest ends of these paths that name no other target."""
    others = [path for path in targets if path not in paths]
    return list(dict.fromkeys(shortest_end(path, others) for path in paths))
