"""MixLoRA, MoRE and MoA in their own layouts on a tiny model, away from their start."""

from __future__ import annotations

from typing import Any

import torch
from peft import PeftModel

import monkeyjump as mj
from monkeyjump.adapters.moa import AttentionPrompt, ParallelBottleneck
from monkeyjump.routing.learned import LearnedRouter
from monkeyjump.routing.more_ranks import RankSelector
from tests.helpers import disturb, lm_batch, tiny_llama, wrap
from tests.tuner.test_count import ATTENTION

EXPERTS, K = 4, 2
FFN = ["gate_proj", "up_proj", "down_proj"]
TASKS = 3


def mixlora(**changes: Any) -> mj.MonkeyJumpConfig:
    return mj.methods.build("mixlora", **{"r": 2, "alpha": 4.0, "dropout": 0.0, "experts": EXPERTS, **changes})


def routers(model: torch.nn.Module) -> dict[str, LearnedRouter]:
    return {path: module for path, module in model.named_modules() if isinstance(module, LearnedRouter)}


@torch.no_grad()
def spread_routers(model: torch.nn.Module, seed: int = 3) -> None:
    for path, router in sorted(routers(model).items()):
        generator = torch.Generator().manual_seed(seed + sum(map(ord, path)))
        router.weight.copy_(torch.randn(router.weight.shape, generator=generator))


def adapted_mixlora(base: Any = None, **changes: Any) -> PeftModel:
    model = wrap(base if base is not None else tiny_llama(), mixlora(**changes))
    disturb_all(model)
    return model


def disturb_all(model: torch.nn.Module) -> None:
    disturb(model)
    spread_routers(model)


def feed_forwards(model: torch.nn.Module) -> list[Any]:
    return [m for path, m in model.named_modules() if path.endswith(".mlp")]


def more(**changes: Any) -> mj.MonkeyJumpConfig:
    settings = {"target_modules": list(ATTENTION), "r": 4, "alpha": 4.0, "dropout": 0.0, "tasks": TASKS, **changes}
    return mj.methods.build("more", **settings)


def selectors(model: torch.nn.Module) -> dict[str, RankSelector]:
    return {path: module for path, module in model.named_modules() if isinstance(module, RankSelector)}


@torch.no_grad()
def spread_selectors(model: torch.nn.Module, seed: int = 3) -> None:
    """Selectors with decided, different choices."""
    for path, selector in selectors(model).items():
        generator = torch.Generator().manual_seed(seed + sum(map(ord, path)))
        for parameter in selector.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))


def adapted_more(base: Any = None, **changes: Any) -> PeftModel:
    model = wrap(base if base is not None else tiny_llama(), more(**changes))
    disturb(model)
    spread_selectors(model)
    return model


def batch_of(tasks: list[int], **kwargs: Any) -> dict[str, torch.Tensor]:
    return {**lm_batch(len(tasks), **kwargs), "task_ids": torch.tensor(tasks)}


def moa(**changes: Any) -> mj.MonkeyJumpConfig:
    return mj.methods.build("moa", **{"r": 2, "alpha": 4.0, "dropout": 0.0, **changes})


@torch.no_grad()
def adapted_moa(base: Any = None, seed: int = 5, **changes: Any) -> PeftModel:
    model = wrap(base if base is not None else tiny_llama(), moa(**changes))
    disturb(model, seed)
    for path, module in model.named_modules():
        if isinstance(module, (ParallelBottleneck, AttentionPrompt)) or path.endswith("monkeyjump_router.default"):
            for name, parameter in sorted(module.named_parameters()):
                generator = torch.Generator().manual_seed(seed + sum(map(ord, path + name)))
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return model


def parts(model: torch.nn.Module, kind: type) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, kind)]
