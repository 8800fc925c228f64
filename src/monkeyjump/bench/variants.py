"""What is measured: the frozen model, PEFT's LoRA and every method of ours, on one model of a named shape.

The weights are random, which is enough for speed and memory, and nothing has to be downloaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from monkeyjump import methods
from monkeyjump.bench.settings import Settings
from monkeyjump.errors import ConfigError
from monkeyjump.models import resolve
from monkeyjump.registry import did_you_mean
from monkeyjump.tuner.centers.calibrate import initialize_centers, needs_no_data
from monkeyjump.tuner.model import require_context

FLOOR = "floor"  # the frozen model: forward, and backward of the activations down to the input embeddings
PEFT_LORA = "peft-lora"  # as PEFT makes it: adapters in fp32, which copies its input to fp32 beside a bf16 model
PEFT_LORA_LOW = "peft-lora-low"  # PEFT's adapters in the model's dtype (autocast_adapter_dtype=False)
TASKS = 4  # task ids of the rows, for methods that route by them
ATTENTION = "causal_sdpa"
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


@dataclass
class BuiltVariant:
    """A model ready to train."""

    model: nn.Module  # what a user calls
    causal_lm: nn.Module
    decoder: Any
    context: Any  # the routing context of our methods, else None
    task_ids: torch.Tensor | None

    @property
    def extra(self) -> dict[str, torch.Tensor]:
        """What a forward of the whole model is given beside its batch."""
        return {} if self.task_ids is None else {"task_ids": self.task_ids}

    def trainable(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]


def variant_names(words: Sequence[str], alone: bool = False) -> list[str]:
    """The variants asked for, the baselines first; `all` is every method of the comparison."""
    asked = [] if alone else [FLOOR, PEFT_LORA]
    for word in words:
        asked += methods.COMPARED if word == "all" else [word]
    known = [FLOOR, PEFT_LORA, PEFT_LORA_LOW, *methods.names()]
    problems = [
        f"methods={name!r} is not known.{did_you_mean(name, known)} Known: all, {', '.join(known)}."
        for name in asked
        if name not in known
    ]
    if problems:
        raise ConfigError(problems)
    return list(dict.fromkeys(asked))


def empty_model(name: str, layers: int | None = None, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A causal LM of a named shape, or of a model by name, on the meta device: structure without weights."""
    if name in SHAPES:
        kind, *sizes = SHAPES[name].items()
        depth = {} if layers is None else {"num_hidden_layers": layers}
        config = AutoConfig.for_model(kind[1], **{**dict(sizes), **depth}, use_cache=False)
    else:
        try:
            resolved = resolve(name)
        except ConfigError as error:
            hint = f"Shapes without weights: {', '.join(SHAPES)}.{did_you_mean(name, list(SHAPES))}"
            raise ConfigError([*error.problems, hint]) from error
        config = AutoConfig.from_pretrained(resolved.source, **resolved.options)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def plain_model(workload: Settings) -> Any:
    """The frozen model of a workload with weights N(0, 0.02), the same for every variant."""
    torch.manual_seed(workload.seed)
    empty = empty_model(workload.shape, workload.layers, getattr(torch, workload.dtype))
    model: Any = empty.to_empty(device=workload.device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0) if "norm" in name else parameter.normal_(0, 0.02)
    rotary = type(model.model.rotary_emb)
    model.model.rotary_emb = rotary(model.config).to(workload.device)  # its buffers are computed, not loaded
    model.tie_weights()
    return model.requires_grad_(False)


def random_ids(model: Any, workload: Settings, generator: torch.Generator) -> torch.Tensor:
    """A batch of token ids [B, T]."""
    shape = (workload.batch, workload.tokens)
    return torch.randint(model.config.vocab_size, shape, generator=generator, device=workload.device)


def build(method: str, workload: Settings, model: Any = None) -> BuiltVariant:
    """A variant on its random model (or on `model`), in training mode, its adapters off their start."""
    base = plain_model(workload) if model is None else model
    adapted, context, by_task = base, None, False
    if method in (PEFT_LORA, PEFT_LORA_LOW):
        config = peft_lora(adapter_settings(workload))
        adapted = get_peft_model(base, config, autocast_adapter_dtype=method == PEFT_LORA)
    elif method != FLOOR:
        config = method_config(method, workload)
        by_task = config.granularity == "task" or config.placement == "nested"
        adapted = get_peft_model(base, config)
        context = require_context(adapted)
        if config.uses_centers and config.center_init != "kmeans" and not needs_no_data(config):  # the mean of states
            drawn = torch.Generator(workload.device).manual_seed(workload.seed)
            initialize_centers(adapted, [{"input_ids": random_ids(base, workload, drawn)}], progress=False)
    built = BuiltVariant(adapted.train(), base, base.model, context, None)
    with torch.no_grad():
        for parameter in built.trainable():
            # Adapters start at zero, where half of their gradients are zero, too: a check of those would check nothing.
            if not parameter.any():
                parameter.normal_(0, 0.02)
    if by_task:
        built.task_ids = torch.arange(workload.batch, device=workload.device) % TASKS
    return built


def adapter_settings(workload: Settings) -> dict[str, Any]:
    """What every method has in common; the scale is 5 / 2 at every rank."""
    rank = {} if workload.rank is None else {"r": workload.rank, "alpha": 2.5 * workload.rank}
    return {"target_modules": list(workload.targets), "dropout": workload.dropout, **rank}


def peft_lora(common: dict[str, Any]) -> Any:
    """PEFT's LoRA with these settings."""
    rank, dropout = common.get("r", 2), common["dropout"]
    alpha: Any = 2.5 * rank  # declared an int, used as a number
    named = common["target_modules"]
    return LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=named, task_type="CAUSAL_LM")


def method_config(method: str, workload: Settings) -> Any:
    settings = adapter_settings(workload)
    if method.startswith("mj"):
        settings["center_init"] = "random_normalized"  # needs no data
    return methods.build(method, "mj_paper", **{**settings, **workload.overrides})


def skip_masks(model: Any) -> None:
    """Attend causally without a mask tensor, in every mode.

    The batches here are dense. Uncompiled, Transformers sees that and makes no mask; compiled or captured it cannot
    look, and would make one for packed rows, which shuts out the flash kernels. No mask function is registered under
    this name, so none is made.
    """
    AttentionInterface.register(ATTENTION, sdpa_attention_forward)
    model.config._attn_implementation = ATTENTION
