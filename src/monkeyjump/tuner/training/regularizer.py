"""Losses that adapters put on their own tensors."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from monkeyjump.adapters import Adapter
from monkeyjump.config import MonkeyJumpConfig
from monkeyjump.tuner.layer import MonkeyJumpLayer


def active_adapters(model: nn.Module) -> Iterator[tuple[str, Adapter]]:
    """(adapter name, adapter module) of every adapter that takes part in the forward."""
    for layer in model.modules():
        if isinstance(layer, MonkeyJumpLayer) and not layer.disable_adapters:
            for name in layer.active_adapters:
                if name in layer.monkeyjump_adapter:
                    yield name, layer.monkeyjump_adapter[name]  # type: ignore[misc]


def auxiliary_loss(model: nn.Module) -> Tensor | None:
    """The weighted mean of the adapters' regularisers, or None when there are none."""
    alike: dict[tuple, list[Adapter]] = {}
    for name, adapter in active_adapters(model):
        device = next((parameter.device for parameter in adapter.parameters()), None)
        alike.setdefault((name, type(adapter), device), []).append(adapter)
    found: dict[str, list[tuple[Tensor, int]]] = {}
    kinds = {name: kind for name, kind, _ in alike}
    for (name, kind, _), adapters in alike.items():
        total = kind.auxiliary_total(adapters)
        if total is not None:
            found.setdefault(name, []).append(total)
    configs: dict[str, MonkeyJumpConfig] = model.peft_config if found else {}  # type: ignore[assignment]
    loss = None
    for name, totals in found.items():
        weight = kinds[name].option("orth_reg_weight", configs[name]) if "orth_reg_weight" in kinds[name].options else 1
        share = weight / sum(number for _, number in totals)
        for total, _ in totals:
            term = share * total
            loss = term if loss is None else loss + term.to(loss.device)
    return loss


def add_regularizer_gradients(model: nn.Module) -> None:
    """Add the gradients of `auxiliary_loss` to those a finished backward left, once per optimiser step."""
    loss = auxiliary_loss(model)
    if loss is None:
        return
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True):
        if gradient is not None:
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
