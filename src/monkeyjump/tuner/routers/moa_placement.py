"""The modules that MoA needs in a block: the feed-forward and the attention beside which its further experts live (a
bottleneck and a prompt), and the norm that its router may read."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from monkeyjump.tuner.routers.mixlora_placement import feed_forward_of, in_attention

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
# What the norm on a block's input is called: Llama and most others, GPT-2, ViT, CLIP, OPT and Whisper, ModernBERT, T5.
INPUT_NORMS = (
    *("input_layernorm", "ln_1", "layernorm_before", "layer_norm1", "self_attn_layer_norm", "attn_norm"),
    "layer.0.layer_norm",
)


@dataclass(frozen=True)
class Extra:
    """One further expert of a block."""

    kind: str  # parallel | prompt
    module: str  # path of the feed-forward, or of the attention
    heads: int = 0  # number of heads of the attention


def plan_extras(
    home: str, linears: list[str], modules: dict[str, nn.Module], kinds: list[str]
) -> tuple[tuple[Extra, ...], list[str]]:
    """The further experts of block `home`, whose linear layers are `linears`, and what stands against them."""
    extras, problems = [], []
    for kind in kinds:
        extra = _parallel(home, linears) if kind == "parallel" else _prompt(home, linears, modules)
        if isinstance(extra, Extra):
            extras.append(extra)
        else:
            problems.append(f"extra_experts asks for {kind!r} in block {home!r}, but {extra}: take it out of the list.")
    return tuple(extras), problems


def plan_norm(home: str, modules: dict[str, nn.Module]) -> tuple[str, list[str]]:
    """The path of the norm on the input of block `home`, and what to say where there is none."""
    found = [f"{home}.{name}" for name in INPUT_NORMS if f"{home}.{name}" in modules]
    if found:
        return found[0], []
    return "", [
        f"router_input='norm' needs a norm on the input of block {home!r}, and none of {', '.join(INPUT_NORMS)} is "
        "there: use router_input='block'."
    ]


def _parallel(home: str, linears: list[str]) -> Extra | str:
    inner = [path for path in linears if not in_attention(path, home)]
    module = feed_forward_of(home, inner) if inner else None
    return Extra("parallel", module) if module is not None else "its feed-forward is not a module of its own"


def _prompt(home: str, linears: list[str], modules: dict[str, nn.Module]) -> Extra | str:
    holders = {path.rpartition(".")[0] for path in linears if in_attention(path, home)}
    for module in sorted(holders):
        head_dim = getattr(modules[module], "head_dim", None)
        if isinstance(head_dim, int) and all(f"{module}.{name}" in linears for name in PROJECTIONS):
            projection = modules[f"{module}.q_proj"]
            return Extra("prompt", module, heads=int(projection.out_features) // head_dim)  # type: ignore[arg-type]
    return f"it has no attention with {', '.join(PROJECTIONS)} and a head_dim"
