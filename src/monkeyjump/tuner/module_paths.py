"""Questions about the modules of a model: which are linear, which block they are in, and what to call them."""

from __future__ import annotations

import re
from collections.abc import Callable

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from monkeyjump.config import MonkeyJumpConfig

# Cross-attention reads its keys and values from the encoder's tokens, which a token-wise gate of the decoder does not
# describe, and its queries from the decoder's.
CROSS_ATTENTION = re.compile(r"(EncDecAttention|encoder_attn|cross_?att(n|ention))", re.IGNORECASE)
_KEY_OR_VALUE = re.compile(r"^(k|v|k_proj|v_proj|key|value|kv|kv_proj)$")


def block_index(path: str) -> int:
    return int(path.rpartition(".")[2])


def inside_tuner_layers(modules: dict[str, nn.Module]) -> set[str]:
    roots = tuple(f"{path}." for path, module in modules.items() if isinstance(module, BaseTunerLayer))
    return {path for path in modules if path.startswith(roots)} if roots else set()


def is_linear(module: nn.Module) -> bool:
    if isinstance(module, BaseTunerLayer):
        module = module.get_base_layer()
    return isinstance(module, (nn.Linear, Conv1D)) or (
        hasattr(module, "in_features") and hasattr(module, "out_features")
    )


def free_linears(modules: dict[str, nn.Module]) -> list[str]:
    """The paths of all linear layers, adapted or not. Those inside adapted layers are left out."""
    inside = inside_tuner_layers(modules)
    return [path for path, module in modules.items() if path not in inside and is_linear(module)]


def targets_of(modules: dict[str, nn.Module], is_target: Callable[[str], bool]) -> list[str]:
    """The paths of the modules that should get an adapter. Those inside adapted layers are left out."""
    inside = inside_tuner_layers(modules)
    return [path for path in modules if path and path not in inside and is_target(path)]


def reads_encoder(path: str, config: MonkeyJumpConfig) -> bool:
    """Whether a projection of a decoder reads the encoder's tokens while the decoder's tokens are routed one by one."""
    alone = config.placement == "projection" and config.projection.router_scope == "projection"
    own_input = alone and not config.learned.aux_loss_weight
    parent, _, leaf = path.rpartition(".")
    crosses = CROSS_ATTENTION.search(parent) is not None and _KEY_OR_VALUE.match(leaf) is not None
    return crosses and config.granularity == "token" and not own_input


def block_of(path: str, modules: dict[str, nn.Module]) -> str | None:
    """Path of the block a module is in: the element of the outermost ModuleList above it."""
    parts = path.split(".")
    for i in range(1, len(parts) - 1):
        if isinstance(modules.get(".".join(parts[:i])), nn.ModuleList):
            return ".".join(parts[: i + 1])
    return None


def language_path(model: nn.Module) -> str | None:
    """Where the language model is in one that also reads pictures or sound; None for a model of text alone."""
    config = getattr(model, "config", None)
    if not {"vision_config", "audio_config"} & set(getattr(config, "sub_configs", ())):
        return None
    decoder = model.get_decoder() if isinstance(model, PreTrainedModel) else None
    return next((path for path, module in model.named_modules() if module is decoder and path), None)


def outside_language(path: str, language: str | None) -> bool:
    """Whether a module belongs to a tower for pictures or sound, or joins it to the language model."""
    return language is not None and path != language and not path.startswith(f"{language}.")


def matches(path: str, name: str) -> bool:
    return path == name or path.endswith(f".{name}")


def owner_of(home: str, modules: dict[str, nn.Module]) -> str:
    """The innermost pretrained model around the list of blocks, else the module that holds the list."""
    holder = home.rpartition(".")[0].rpartition(".")[0]
    path = holder
    while True:
        if isinstance(modules[path], PreTrainedModel):
            return path
        if not path:
            return holder
        path = path.rpartition(".")[0]


def linear_shape(module: nn.Module) -> tuple[int, int]:
    """(in_features, out_features) of a linear layer of any kind."""
    if isinstance(module, BaseTunerLayer):
        module = module.get_base_layer()
    if isinstance(module, Conv1D):
        return module.weight.shape[0], module.weight.shape[1]
    return int(module.in_features), int(module.out_features)  # type: ignore[arg-type]


def shortest_end(path: str, others: list[str]) -> str:
    """The shortest end of a path that names none of the other paths."""
    parts = path.split(".")
    ends = (".".join(parts[-depth:]) for depth in range(1, len(parts)))
    return next((end for end in ends if not any(matches(other, end) for other in others)), path)


def short_names(home: str, routed: list[str]) -> list[str]:
    """The shortest ends of the paths that tell the projections of a block apart."""
    inside = [path.removeprefix(f"{home}.") for path in routed]
    return [shortest_end(path, [other for other in inside if other != path]) for path in inside]
