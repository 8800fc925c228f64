"""Models of a named shape with random weights: enough for speed and memory, and nothing has to be downloaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from monkeyjump.errors import ConfigError
from monkeyjump.registry import did_you_mean

_FIELDS = (
    *("model_type", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "vocab_size", "tie_word_embeddings"),
)
SHAPES: dict[str, dict[str, Any]] = {
    name: dict(zip(_FIELDS, values, strict=True))
    for name, values in {
        "qwen2-0.5b": ("qwen2", 896, 4864, 24, 14, 2, 151_936, True),
        "llama-3-8b": ("llama", 4096, 14_336, 32, 32, 8, 128_256, False),
        "smollm2-135m": ("llama", 576, 1536, 30, 9, 3, 49_152, True),
        "tiny": ("llama", 64, 128, 2, 4, 2, 512, True),
    }.items()
}


def empty_model(name: str, layers: int | None = None, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A causal LM of a named shape, or of a model by name, on the meta device: structure without weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if name in SHAPES:
        settings = dict(SHAPES[name])
        if layers is not None:
            settings["num_hidden_layers"] = layers
        config = AutoConfig.for_model(settings.pop("model_type"), **settings, use_cache=False)
    else:
        resolved = _resolved(name)
        config = AutoConfig.from_pretrained(resolved.source, **resolved.options)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def _resolved(name: str) -> Any:
    from monkeyjump.models import resolve

    try:
        return resolve(name)
    except ConfigError as error:
        hint = did_you_mean(name, list(SHAPES))
        raise ConfigError([*error.problems, f"Shapes without weights: {', '.join(SHAPES)}.{hint}"]) from error


def random_model(shape: str, device: str, dtype: torch.dtype, layers: int | None = None) -> nn.Module:
    """A causal LM of a named shape, weights N(0, 0.02), frozen."""
    model = empty_model(shape, layers, dtype).to_empty(device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0) if "norm" in name else parameter.normal_(0, 0.02)
    decoder = model.get_submodule("model")
    rotary = decoder.get_submodule("rotary_emb")
    decoder.rotary_emb = type(rotary)(model.config).to(device)  # its buffers are computed, not loaded
    model.tie_weights()  # type: ignore[operator]
    return model.requires_grad_(False)
