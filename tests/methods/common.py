"""Every method on a tiny model, away from its start: adapters and routers random, nothing left to chance."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import monkeyjump as mj
from monkeyjump.methods.presets import COMPARED
from monkeyjump.routing.learned import LearnedRouter
from tests.helpers import disturb, lm_batch, tiny_llama, wrap

METHODS = [name for name in COMPARED if name != "mixlora"] + ["mixlora"]
LAYERS = {"mola": 4}  # as many blocks as its allocation has parts
# losses strong enough that a wrong one shows
LOUD: dict[str, dict[str, Any]] = {
    "moelora": {"aux_loss_weight": 0.5, "contrastive_weight": 0.3},
    "mixlora": {"aux_loss_weight": 0.5},
    "mola": {"aux_loss_weight": 0.5},
    "moe_lora_fa": {"aux_loss_weight": 0.5, "lb_norm": "mixtral"},
    "moe_adalora": {"aux_loss_weight": 0.5, "lb_reduce": "global"},
    "moe_propulsion": {"aux_loss_weight": 0.5, "lb_reduce": "sum"},
}


def config_of(method: str, **changes: Any) -> mj.MonkeyJumpConfig:
    settings: dict[str, Any] = {"dropout": 0.0, **changes}
    if method.startswith("mj"):
        settings.setdefault("center_init", "random_normalized")
    return mj.methods.build(method, "mj_paper", **settings)


def fresh(method: str, **changes: Any) -> Any:
    return wrap(tiny_llama(LAYERS.get(method, 2)), config_of(method, **changes))


def moved(method: str, **changes: Any) -> Any:
    model = fresh(method, **changes)
    disturb(model)
    spread(model)
    return model


@torch.no_grad()
def spread(model: nn.Module, scale: float = 0.3) -> None:
    """Routers that tell tokens apart."""
    for path, router in learned_routers(model).items():
        generator = torch.Generator().manual_seed(sum(map(ord, path)))
        for parameter in router.parameters():
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))


def learned_routers(model: nn.Module) -> dict[str, LearnedRouter]:
    return {path: module for path, module in model.named_modules() if isinstance(module, LearnedRouter)}


def batch_for(method: str, **kwargs: Any) -> dict[str, torch.Tensor]:
    batch = lm_batch(**kwargs)
    if method in ("more", "mjlora_oracle"):
        batch["task_ids"] = torch.arange(batch["input_ids"].shape[0]) % 3
    return batch
