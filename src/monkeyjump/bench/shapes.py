"""Models of a named shape with random weights: enough for speed and memory, nothing to download."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from monkeyjump.errors import ConfigError
from monkeyjump.registry import did_you_mean

SHAPES: dict[str, dict[str, Any]] = {
    "qwen2-0.5b": {
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151_936,
        "tie_word_embeddings": True,
    },
    "llama-3-8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
        "tie_word_embeddings": False,
    },
    "smollm2-135m": {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49_152,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "tie_word_embeddings": True,
    },
}


def meta_model(shape: str) -> nn.Module:
    """A causal LM of the shape without weights, for counting."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = _settings(shape)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(settings.pop("model_type"), **settings))


def random_model(shape: str, device: str, dtype: torch.dtype, layers: int | None = None) -> nn.Module:
    """A causal LM of the shape, weights N(0, 0.02), frozen."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = _settings(shape)
    if layers is not None:
        settings["num_hidden_layers"] = layers
    config = AutoConfig.for_model(settings.pop("model_type"), **settings, use_cache=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model = model.to_empty(device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0) if "norm" in name else parameter.normal_(0, 0.02)
    rotary = model.get_submodule("model.rotary_emb")
    fresh = type(rotary)(config).to(device)  # its buffers are computed, not loaded
    model.model.rotary_emb = fresh
    model.tie_weights()
    return model.requires_grad_(False)


def _settings(shape: str) -> dict[str, Any]:
    if shape not in SHAPES:
        raise ConfigError(f"unknown shape {shape!r}.{did_you_mean(shape, list(SHAPES))} Known: {', '.join(SHAPES)}.")
    return dict(SHAPES[shape])
