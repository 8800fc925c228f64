"""What is measured: the frozen model, PEFT's LoRA and every method of ours, on the same random model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from monkeyjump.bench.settings import Settings
from monkeyjump.bench.shapes import random_model
from monkeyjump.errors import ConfigError
from monkeyjump.registry import did_you_mean

FLOOR = "floor"  # the frozen model: forward, and backward of the activations down to the input embeddings
PEFT_LORA = "peft-lora"  # as PEFT makes it: adapters in fp32, which copies its input to fp32 beside a bf16 model
PEFT_LORA_LOW = "peft-lora-low"  # PEFT's adapters in the model's dtype (autocast_adapter_dtype=False)
BASELINES = (FLOOR, PEFT_LORA)
TASKS = 4  # task ids of the rows, for methods that route by them
BY_TASK = ("more", "mjlora_oracle")
ATTENTION = "causal_sdpa"


@dataclass
class BuiltVariant:
    """A model ready to train."""

    model: nn.Module  # what a user calls
    causal_lm: nn.Module
    decoder: Any
    context: Any  # the routing context of our methods, else None
    task_ids: torch.Tensor | None

    def trainable(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]


def variant_names(words: Sequence[str], alone: bool = False) -> list[str]:
    """The variants asked for, the baselines first; `all` is every method of the comparison."""
    from monkeyjump import methods

    asked: list[str] = [] if alone else list(BASELINES)
    for word in words:
        asked += methods.COMPARED if word == "all" else [word]
    known = [*BASELINES, PEFT_LORA_LOW, *methods.names()]
    problems = [
        f"methods={name!r} is not known.{did_you_mean(name, known)} Known: all, {', '.join(known)}."
        for name in asked
        if name not in known
    ]
    if problems:
        raise ConfigError(problems)
    return list(dict.fromkeys(asked))


def plain_model(workload: Settings) -> Any:
    """The random model of a workload, the same weights for every variant."""
    torch.manual_seed(workload.seed)
    return random_model(workload.shape, workload.device, getattr(torch, workload.dtype), workload.layers)


def random_ids(model: Any, workload: Settings, generator: torch.Generator) -> torch.Tensor:
    """A batch of token ids [B, T]."""
    shape = (workload.batch, workload.tokens)
    return torch.randint(model.config.vocab_size, shape, generator=generator, device=workload.device)


def build(method: str, workload: Settings, model: Any = None) -> BuiltVariant:
    """A variant on its random model (or on `model`), in training mode, its adapters off their start."""
    base = plain_model(workload) if model is None else model
    adapted, context, task_ids = base, None, None
    if method in (PEFT_LORA, PEFT_LORA_LOW):
        adapted = _with_peft_lora(method, base, workload)
    elif method != FLOOR:
        adapted, context = _with_ours(method, base, workload)
    _leave_start(adapted)
    adapted.train()
    if method in BY_TASK:
        task_ids = torch.arange(workload.batch, device=workload.device) % TASKS
    return BuiltVariant(adapted, base, base.get_submodule("model"), context, task_ids)


def skip_masks(model: Any) -> None:
    """Attend causally without a mask tensor, in every mode.

    The batches here are dense. Uncompiled, Transformers sees that and makes no mask; compiled or captured it cannot
    look, and would make one for packed rows, which shuts out the flash kernels. No mask function is registered under
    this name, so none is made.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(ATTENTION, sdpa_attention_forward)
    model.config._attn_implementation = ATTENTION


def _with_peft_lora(method: str, base: Any, workload: Settings) -> Any:
    from peft import LoraConfig, get_peft_model

    rank = workload.rank or 2
    config = LoraConfig(
        r=rank,
        # the scale of ours, 5 / 2, at every rank; declared an int, used as a number
        lora_alpha=5 * rank / 2,  # type: ignore[arg-type]
        lora_dropout=workload.dropout,
        target_modules=list(workload.targets),
        task_type="CAUSAL_LM",
    )
    return get_peft_model(base, config, autocast_adapter_dtype=method == PEFT_LORA)


def method_config(method: str, workload: Settings) -> Any:
    from monkeyjump import methods

    settings: dict[str, Any] = {"target_modules": list(workload.targets), "dropout": workload.dropout}
    if workload.rank is not None:
        settings.update(r=workload.rank, alpha=2.5 * workload.rank)
    if method.startswith("mj"):
        settings["center_init"] = "random_normalized"  # needs no data
    return methods.build(method, "mj_paper", **{**settings, **workload.overrides})


def _with_ours(method: str, base: Any, workload: Settings) -> tuple[Any, Any]:
    from peft import get_peft_model

    from monkeyjump.tuner.model import require_context

    adapted = get_peft_model(base, method_config(method, workload))
    return adapted, require_context(adapted)


@torch.no_grad()
def _leave_start(model: nn.Module) -> None:
    """Adapters start at zero, where half of their gradients are zero too: a check of gradients would check nothing."""
    for parameter in model.parameters():
        if parameter.requires_grad and not parameter.any():
            parameter.normal_(0, 0.02)
