"""Every method on a tiny model, away from its start: adapters and routers random, nothing left to chance.

A case is a method in the matched setting of the paper's comparison; where the published form is another structure, that
form is a case of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import monkeyjump as mj
from monkeyjump.adapters.moa import AttentionPrompt, ParallelBottleneck
from monkeyjump.methods.presets import COMPARED
from monkeyjump.routing.learned import LearnedRouter
from tests.helpers import disturb, lm_batch, tiny_llama, wrap

METHODS = list(COMPARED)
# name -> method, and what makes its published form small enough for these tests
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "mixlora published": ("mixlora", {"r": 2, "alpha": 4.0, "experts": 4}),  # whole feed-forwards as experts
    "hydralora published": ("hydralora", {"r": 2, "alpha": 4.0}),  # dense
    "moa published": ("moa", {"r": 2, "alpha": 4.0}),  # bottleneck, prompt, SwiGLU router
    "moa published, after the norm": ("moa", {"r": 2, "alpha": 4.0, "router_input": "norm"}),
}
CASES = [*METHODS, *PUBLISHED]
NEARLY_IDENTITY = [case for case in CASES if case.startswith("moa published")]  # the bottleneck's own start
LAYERS = {"mola": 4}  # as many blocks as its allocation has parts
# losses strong enough that a wrong one shows
LOUD: dict[str, dict[str, Any]] = {
    "moelora": {"aux_loss_weight": 0.5, "contrastive_weight": 0.3},
    "mixlora": {"aux_loss_weight": 0.5},
    "mixlora published": {"aux_loss_weight": 0.5},
    "mola": {"aux_loss_weight": 0.5},
    "more": {"contrastive_weight": 0.5},
    "moe_lora_fa": {"aux_loss_weight": 0.5, "lb_norm": "mixtral"},
    "moe_adalora": {"aux_loss_weight": 0.5, "lb_reduce": "global"},
    "moe_propulsion": {"aux_loss_weight": 0.5, "lb_reduce": "sum"},
}


def config_of(case: str, **changes: Any) -> mj.MonkeyJumpConfig:
    method, own = PUBLISHED.get(case, (case, {}))
    settings: dict[str, Any] = {"dropout": 0.0, **own, **changes}
    if method.startswith("mj"):
        settings = {"center_init": "random_normalized", "route_space": "raw"} | settings  # which need no data
    return mj.methods.build(method, "published" if case in PUBLISHED else "mj_paper", **settings)


def base_of(case: str) -> Any:
    return tiny_llama(LAYERS.get(case, 2))


def fresh(case: str, **changes: Any) -> Any:
    return wrap(base_of(case), config_of(case, **changes))


def moved(case: str, base: Any = None, **changes: Any) -> Any:
    model = wrap(base_of(case) if base is None else base, config_of(case, **changes))
    disturb(model)
    spread(model)
    return model


@torch.no_grad()
def spread(model: nn.Module, scale: float = 0.3) -> None:
    """Routers that tell tokens apart, and MoA's further experts away from their start."""
    for path, module in model.named_modules():
        if isinstance(module, (LearnedRouter, ParallelBottleneck, AttentionPrompt)):
            generator = torch.Generator().manual_seed(sum(map(ord, path)))
            for parameter in module.parameters():
                parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))


def learned_routers(model: nn.Module) -> dict[str, LearnedRouter]:
    return {path: module for path, module in model.named_modules() if isinstance(module, LearnedRouter)}


def told_the_task(case: str) -> bool:
    config = mj.methods.build(PUBLISHED.get(case, (case,))[0])
    return config.granularity == "task" or config.placement == "nested"


def batch_for(case: str, **kwargs: Any) -> dict[str, torch.Tensor]:
    batch = lm_batch(**kwargs)
    if told_the_task(case):
        batch["task_ids"] = torch.arange(batch["input_ids"].shape[0]) % 3
    return batch
