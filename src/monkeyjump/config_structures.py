"""What the methods that are a structure of their own (MixLoRA, MoRE, MoA) ask of a configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from monkeyjump.config import MonkeyJumpConfig

EXTRAS = ("parallel", "prompt")
RANKED = ("lora", "lora_fa", "adalora")  # adapters whose ranks can be used one by one


def structure_problems(config: MonkeyJumpConfig, learned_routers: tuple[str, ...]) -> list[str]:
    """What whole feed-forwards (MixLoRA), nested ranks (MoRE) and further experts (MoA) ask for."""
    found = []
    extras = config.extra_experts or []
    if not isinstance(extras, list) or len(set(extras)) < len(extras) or not set(extras) <= set(EXTRAS):
        found.append(f"extra_experts={extras!r} must be a list of {' and '.join(EXTRAS)}, each once at most.")
    elif extras and (config.placement != "block" or config.router not in learned_routers):
        found.append(
            f"extra_experts={extras} are experts of a block with a learned router, not of placement="
            f"{config.placement!r} with router={config.router!r}: set router='sigmoid', or drop them."
        )
    elif extras and config.layers_to_route == []:
        found.append(f"extra_experts={extras} have no router with layers_to_route=[]: drop one of the two.")
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
    if config.placement == "nested" and config.task_width is not None and config.contrastive_weight:
        found.append(
            f"task_width={config.task_width} embeddings cannot be compared with states, which contrastive_weight="
            f"{config.contrastive_weight} does: set contrastive_weight=0, or task_width=None."
        )
    return found
