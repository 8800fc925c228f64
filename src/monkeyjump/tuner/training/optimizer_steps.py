"""The work that adapters do once per optimiser step, beside the optimizer.

AdaLoRA's rank budget: the diagonal entries of the whole model compete, and the least important are zeroed.

LoRA-FA's projected gradient is the step of B whose change of the weight is nearest to the full gradient. With A frozen,
a step dB changes the weight by s dB A. Among all dB, ||s dB A - G||_F, with G the gradient of the weight itself, is
least for dB = G A^T (A A^T)^-1 / s; and the gradient of B is g = s G A^T. So dB = g (A A^T)^-1 / s^2, which needs no G.
PEFT does this inside an optimizer of its own (`create_lorafa_optimizer`); here any optimizer will do.

FlyLoRA's biases even the loads of its ranks without a gradient.

Shapes: D, O input and output width, N experts, R rank of one expert.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from monkeyjump.adapters import ADAPTERS, AdaLoraAdapter, FlyLoraAdapter, LoraFaAdapter
from monkeyjump.config import MonkeyJumpConfig
from monkeyjump.errors import ConfigError
from monkeyjump.tuner.centers.pool_ranks import several_ranks
from monkeyjump.tuner.training.regularizer import active_adapters


@torch.no_grad()
def project_gradients(model: nn.Module) -> int:
    """Call once per optimiser step, after the last backward and before `optimizer.step()` (the callback does).

    Every expert of a mixture has an A of its own to project by, or shares one. Returns how many gradients were
    replaced: 0 where no active adapter has `project_gradient`.
    """
    replaced = 0
    for name, adapter in active_adapters(model):
        config: MonkeyJumpConfig = model.peft_config[name]  # type: ignore[assignment,index]
        if isinstance(adapter, LoraFaAdapter) and adapter.project_gradient and adapter.B.grad is not None:
            A = adapter.A.unflatten(0, (-1, config.r))  # [N or 1, R, D]
            g = adapter.B.grad.unflatten(1, (-1, config.r)).movedim(1, 0)  # [N, O, R]
            step = g @ torch.linalg.pinv(A @ A.mT, hermitian=True) / config.scaling**2
            adapter.B.grad.copy_(step.movedim(0, 1).flatten(1))
            replaced += 1
    return replaced


@torch.no_grad()
def balance_ranks(model: nn.Module) -> int:
    """Call once per optimiser step (the callback does): FlyLoRA's biases move towards ranks with few tokens.

    Loads are those of all data-parallel ranks. A block that gradient checkpointing has computed twice has counted all
    of its tokens twice, which changes no sign. Returns how many adapters were balanced.
    """
    found = [adapter for _, adapter in active_adapters(model) if isinstance(adapter, FlyLoraAdapter)]
    if found:
        _sum_over_ranks([adapter.load for adapter in found])
    for adapter in found:
        adapter.bias += adapter.balance_rate * (adapter.load.mean() - adapter.load).sign()
        adapter.load.zero_()
    return len(found)


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
        # once the budget has reached its target, it must hold even if no `deltaT`-th step comes any more
        final = now >= _option("total_step", config) - _option("tfinal", config)
        if budget < ranks and (final or now % _option("deltaT", config) == 0):
            _keep_most_important(adapters, budget)
    return budget


def _option(name: str, config: MonkeyJumpConfig) -> Any:
    return ADAPTERS.get(config.adapter).option(name, config)  # a user's own kind of AdaLoRA has another name


def _count_all_ranks(adapters: list[AdaLoraAdapter]) -> None:
    """Gradients are those of the whole data-parallel batch; so must be the token counts they are divided by."""
    _sum_over_ranks([adapter.tokens for adapter in adapters if adapter.tokens is not None])


def _sum_over_ranks(counts: list[Tensor]) -> None:
    """Make these vectors the sums over all data-parallel ranks."""
    if not (counts and several_ranks()):
        return
    flat = torch.cat([count.to(counts[0].device) for count in counts])
    torch.distributed.all_reduce(flat)
    for count, total in zip(counts, flat.split([len(count) for count in counts]), strict=True):
        count.copy_(total)


def _keep_most_important(adapters: list[AdaLoraAdapter], budget: int) -> None:
    scores = torch.cat([adapter.importance() for adapter in adapters])
    keep = torch.zeros_like(scores, dtype=torch.bool)
    keep[torch.topk(scores, budget).indices] = True
    for adapter, kept in zip(adapters, keep.split([len(adapter.diagonal) for adapter in adapters]), strict=True):
        adapter.diagonal.mul_(kept)
