"""The losses of routers: staged by the forward that causes them, taken once by the top of the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from monkeyjump.config import MonkeyJumpConfig
from monkeyjump.routing.learned import balance_loss

Key = tuple[str, str]  # adapter name, key of the router


@dataclass
class RouterLosses:
    """What the routers of the current training forward have to say. Overwritten per router, never appended to.

    A recomputation under gradient checkpointing runs the same operations (their tensors are what it is for) but stages
    nothing. Taking the losses drops every reference to the graph.
    """

    probabilities: dict[Key, torch.Tensor] = field(default_factory=dict)  # mean probability of each expert, [N]
    loads: dict[Key, torch.Tensor] = field(default_factory=dict)  # share of the assignments, [N]; kept for logging
    contrastive: dict[Key, torch.Tensor] = field(default_factory=dict)
    configs: dict[str, MonkeyJumpConfig] = field(default_factory=dict)
    last: dict[str, torch.Tensor] = field(default_factory=dict)  # unweighted, detached: "balance", "contrastive"

    def stage_load(self, adapter: str, router: str, load: torch.Tensor) -> None:
        self.loads[adapter, router] = load.detach()

    def stage_balance(
        self, adapter: str, config: MonkeyJumpConfig, router: str, load: torch.Tensor, probability: torch.Tensor
    ) -> None:
        self.configs[adapter] = config
        self.stage_load(adapter, router, load)
        self.probabilities[adapter, router] = probability

    def stage_contrastive(self, adapter: str, config: MonkeyJumpConfig, router: str, loss: torch.Tensor) -> None:
        self.configs[adapter] = config
        self.contrastive[adapter, router] = loss

    def clear(self) -> None:
        self.probabilities, self.loads, self.contrastive, self.configs = {}, {}, {}, {}

    def take(self) -> torch.Tensor | None:
        """The weighted sum of all that was staged, or None; afterwards only the loads are left, for logging."""
        total = None
        for name, weight, loss in self._terms():
            self.last[name] = loss.detach()
            term = weight * loss
            total = term if total is None else total + term.to(total.device)
        self.probabilities, self.contrastive, self.configs = {}, {}, {}
        return total

    def _terms(self) -> Iterator[tuple[str, float, torch.Tensor]]:
        for adapter, config in self.configs.items():
            balanced = [key for key in self.probabilities if key[0] == adapter]
            if balanced and config.aux_loss_weight:
                yield "balance", config.aux_loss_weight, self._balance(balanced, config)
            contrastive = [loss for key, loss in self.contrastive.items() if key[0] == adapter]
            if contrastive and config.contrastive_weight:
                yield "contrastive", config.contrastive_weight, _together(contrastive).mean()

    def _balance(self, keys: list[Key], config: MonkeyJumpConfig) -> torch.Tensor:
        loads, probabilities = [self.loads[key] for key in keys], [self.probabilities[key] for key in keys]
        if config.lb_reduce == "global":
            loads, probabilities = [_together(loads).mean(0)], [_together(probabilities).mean(0)]
        k = config.top_k or loads[0].shape[-1]
        losses = _together(
            [balance_loss(load, p, k, config.lb_norm) for load, p in zip(loads, probabilities, strict=True)]
        )
        return losses.sum() if config.lb_reduce == "sum" else losses.mean()


def _together(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([tensor.to(tensors[0].device) for tensor in tensors])


class CarriedLoss(torch.autograd.Function):
    """A tensor as it is, whose backward also sends a gradient of 1 into `loss`: for trainers that make their own."""

    @staticmethod
    def forward(tensor: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.like = inputs[1].detach()

    @staticmethod
    def backward(ctx, grad):
        return grad, torch.ones_like(ctx.like)
