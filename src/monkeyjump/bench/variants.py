"""What is measured: the frozen model, PEFT's LoRA and every method of ours, on the same random model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from monkeyjump.bench.shapes import random_model
from monkeyjump.errors import ConfigError
from monkeyjump.registry import did_you_mean

FLOOR = "floor"  # the frozen model: forward, and backward of the activations down to the input embeddings
PEFT_LORA = "peft-lora"  # as PEFT makes it: adapters in fp32, which copies its input to fp32 beside a bf16 model
PEFT_LORA_LOW = "peft-lora-low"  # its adapters in the model's dtype (autocast_adapter_dtype=False)
BASELINES = (FLOOR, PEFT_LORA)
TASKS = 4  # task ids of the rows, for methods that route by them
BY_TASK = ("more", "mjlora_oracle")
ATTENTION = "causal_sdpa"
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Workload:
    """The model, the batch and what is matched between methods."""

    shape: str = "qwen2-0.5b"
    layers: int | None = None
    batch: int = 8
    tokens: int = 512
    dtype: str = "bfloat16"
    device: str = "cuda"
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    rank: int | None = None  # None: that of the preset (2; MoRE 4)
    dropout: float = 0.05
    seed: int = 0
    overrides: dict[str, Any] = field(default_factory=dict)  # further settings of our methods

    @staticmethod
    def parse(plain: dict[str, Any]) -> Workload:
        """From the JSON form, which knows no tuples."""
        return Workload(**{**plain, "targets": tuple(plain["targets"])})


@dataclass
class Built:
    """A model ready to train."""

    model: nn.Module  # what a user calls
    causal_lm: nn.Module
    decoder: Any
    context: Any  # the routing context of our methods, else None
    task_ids: torch.Tensor | None

    def trainable(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]


def variant_names(words: list[str], alone: bool = False) -> list[str]:
    """The variants asked for, the baselines first; `all` is every method of the comparison."""
    from monkeyjump import methods

    asked: list[str] = [] if alone else list(BASELINES)
    for word in words:
        asked += methods.COMPARED if word == "all" else [word]
    known = [*BASELINES, PEFT_LORA_LOW, *methods.names()]
    unknown = [name for name in asked if name not in known]
    if unknown:
        raise ConfigError(
            [
                f"methods={name!r} is not known.{did_you_mean(name, known)} Known: all, {', '.join(known)}."
                for name in unknown
            ]
        )
    return list(dict.fromkeys(asked))


def plain_model(workload: Workload) -> Any:
    """The random model of a workload, the same weights for every variant."""
    torch.manual_seed(workload.seed)
    return random_model(workload.shape, workload.device, getattr(torch, workload.dtype), workload.layers)


def build(method: str, workload: Workload, model: Any = None) -> Built:
    """A variant on its random model (or on `model`), in training mode, its adapters off their start."""
    base = plain_model(workload) if model is None else model
    decoder = base.get_submodule("model")
    if method == FLOOR:
        base.train()
        return Built(base, base, decoder, None, None)
    adapted = _with_peft_lora(method, base, workload) if method in (PEFT_LORA, PEFT_LORA_LOW) else None
    context = None
    if adapted is None:
        adapted, context = _with_ours(method, base, workload)
    _leave_start(adapted)
    adapted.train()
    task_ids = torch.arange(workload.batch, device=workload.device) % TASKS if method in BY_TASK else None
    return Built(adapted, base, decoder, context, task_ids)


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


def _with_peft_lora(method: str, base: Any, workload: Workload) -> Any:
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


def method_config(method: str, workload: Workload) -> Any:
    from monkeyjump import methods

    settings: dict[str, Any] = {"target_modules": list(workload.targets), "dropout": workload.dropout}
    if workload.rank is not None:
        settings.update(r=workload.rank, alpha=2.5 * workload.rank)
    if method.startswith("mj"):
        settings["center_init"] = "random_normalized"  # needs no data
    return methods.build(method, "mj_paper", **{**settings, **workload.overrides})


def _with_ours(method: str, base: Any, workload: Workload) -> tuple[Any, Any]:
    from peft import get_peft_model

    from monkeyjump.tuner.model import require_context
    from monkeyjump.tuner.register import register

    register()
    adapted = get_peft_model(base, method_config(method, workload))
    return adapted, require_context(adapted)


@torch.no_grad()
def _leave_start(model: nn.Module) -> None:
    """Adapters start at zero, where half of their gradients are zero too: a check of gradients would check nothing."""
    for parameter in model.parameters():
        if parameter.requires_grad and not parameter.any():
            parameter.normal_(0, 0.02)
