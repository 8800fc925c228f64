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
    many = config.placement in ("projection", "ffn") and config.router in learned_routers
    if config.score_per_token and not (many and config.adapter == "adalora"):
        found.append(
            f"score_per_token=True compares the experts of a mixture of AdaLoRA adapters under a learned router, not "
            f"adapter={config.adapter!r} with placement={config.placement!r} and router={config.router!r}: drop it."
        )
    if config.project_gradient and config.adapter != "lora_fa":
        found.append(
            f"project_gradient=True needs a frozen A, which adapter={config.adapter!r} has not: use adapter='lora_fa', "
            "or drop it."
        )
    per_block = config.placement == "block" or (config.placement == "projection" and config.router_scope == "block")
    if config.router_input == "norm" and not (per_block and config.router in learned_routers):
        found.append(
            f"router_input='norm' is for a learned router that a whole block has, not for router={config.router!r}, "
            f"placement={config.placement!r}, router_scope={config.router_scope!r}: drop it."
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
    if config.placement == "nested" and config.task_width is not None and config.contrastive_weight:
        found.append(
            f"task_width={config.task_width} embeddings cannot be compared with states, which contrastive_weight="
            f"{config.contrastive_weight} does: set contrastive_weight=0, or task_width=None."
        )
    return found
