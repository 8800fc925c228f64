"""AdaLoRA's rank budget: the diagonal entries of the whole model compete, the least important are zeroed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from monkeyjump.adapters import ADAPTERS, AdaLoraAdapter
from monkeyjump.config import MonkeyJumpConfig
from monkeyjump.errors import ConfigError
from monkeyjump.tuner.training.regularizer import active_adapters


def rank_budget(step: int, adapters: int, config: MonkeyJumpConfig) -> int:
    """How many ranks the model may keep after optimiser step `step`: all, then a cubic decay, then the target."""
    first, last = _option("tinit", config), _option("total_step", config) - _option("tfinal", config)
    start, target = adapters * config.r, adapters * _option("target_r", config)
    if step <= first:
        return start
    if step > last:
        return target
    left = 1 - (step - first) / (last - first)
    return int(target + (start - target) * left**3)


@torch.no_grad()
def allocate_ranks(model: nn.Module, step: int | None = None) -> int | None:
    """Call once per optimiser step, after `optimizer.step()` and before the gradients are cleared (the callback does).

    Zeroed entries keep their place and may grow back. Returns the budget applied, or None where no active adapter has
    `target_r < r`. `step` counts optimiser steps from 1; by default the adapters count their own.
    """
    by_name: dict[str, list[AdaLoraAdapter]] = {}
    for name, adapter in active_adapters(model):
        if isinstance(adapter, AdaLoraAdapter) and adapter.allocates:
            by_name.setdefault(name, []).append(adapter)
    budget = None
    for name, adapters in by_name.items():
        config: MonkeyJumpConfig = model.peft_config[name]  # type: ignore[assignment,index]
        if all(adapter.diagonal.grad is None for adapter in adapters):
            raise ConfigError(
                "allocate_ranks found no gradients: call it after loss.backward() and before optimizer.zero_grad()."
            )
        _count_all_ranks(adapters)
        for adapter in adapters:
            adapter.observe_gradients()
            adapter.allocations += 1
        now = int(adapters[0].allocations) if step is None else step
        ranks = sum(adapter.diagonal.shape[0] for adapter in adapters)
        budget = rank_budget(now, ranks // config.r, config)  # every expert of a mixture counts as one
        if budget < ranks and (now % _option("deltaT", config) == 0 or _in_final_phase(now, config)):
            _keep_most_important(adapters, budget)
    return budget


def _in_final_phase(step: int, config: MonkeyJumpConfig) -> bool:
    """Whether the budget has reached its target, which must hold then even if no `deltaT`-th step comes any more."""
    return step >= _option("total_step", config) - _option("tfinal", config)


def _option(name: str, config: MonkeyJumpConfig) -> Any:
    return ADAPTERS.get(config.adapter).option(name, config)  # a user's own kind of AdaLoRA has another name


def _count_all_ranks(adapters: list[AdaLoraAdapter]) -> None:
    """Gradients are those of the whole data-parallel batch; so must be the token counts they are divided by."""
    distributed = torch.distributed
    counts = [adapter.tokens for adapter in adapters if adapter.tokens is not None]
    if not (counts and distributed.is_available() and distributed.is_initialized()):
        return
    flat = torch.cat([count.to(counts[0].device) for count in counts])
    distributed.all_reduce(flat)
    for count, total in zip(counts, flat.split([len(count) for count in counts]), strict=True):
        count.copy_(total)


def _keep_most_important(adapters: list[AdaLoraAdapter], budget: int) -> None:
    scores = torch.cat([adapter.importance() for adapter in adapters])
    keep = torch.zeros_like(scores, dtype=torch.bool)
    keep[torch.topk(scores, budget).indices] = True
    start = 0
    for adapter in adapters:
        rank = adapter.diagonal.shape[0]
        adapter.diagonal.mul_(keep[start : start + rank])
        start += rank
