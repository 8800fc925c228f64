"""The losses of routers: staged by the forward that causes them, taken once by the top of the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from monkeyjump.config import MonkeyJumpConfig
from monkeyjump.routing.learned import balance_loss

Key = tuple[str, str]  # adapter name, key of the router


@dataclass
class Statement:
    """What one router reports about the current training forward, which overwrites what an earlier one left.

    A router writes to its own statement, not to a table of all: code that is traced for one block must serve them all.
    """

    config: MonkeyJumpConfig
    load: Tensor | None = None  # share of the assignments, [N]; kept for logging
    probability: Tensor | None = None  # mean probability of each expert, [N]
    contrastive: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy of the model keeps nothing of an interrupted forward."""
        return {**vars(self), "load": None, "probability": None, "contrastive": None}


@dataclass
class RouterLosses:
    """The statements of all routers, in the order of the blocks, and the loss that they add up to.

    A recomputation under gradient checkpointing runs the same operations (their tensors are what it is for) but stages
    nothing. Taking the losses drops every reference to the graph.
    """

    statements: dict[Key, Statement] = field(default_factory=dict)
    last: dict[str, Tensor] = field(default_factory=dict)  # unweighted, detached: "balance", "contrastive"

    def statement(self, adapter: str, router: str, config: MonkeyJumpConfig) -> Statement:
        """Make the statement that a router writes to, in the place of an earlier one."""
        self.statements[adapter, router] = Statement(config)
        return self.statements[adapter, router]

    def forget(self, adapter: str, router: str) -> None:
        self.statements.pop((adapter, router), None)

    @property
    def loads(self) -> dict[Key, Tensor]:
        return {key: statement.load for key, statement in self.statements.items() if statement.load is not None}

    def clear(self) -> None:
        for statement in self.statements.values():
            statement.load = statement.probability = statement.contrastive = None

    def take(self) -> Tensor | None:
        """The weighted sum of all that was staged, or None; afterwards only the loads are left, for logging."""
        total = None
        for name, weight, loss in self._terms():
            self.last[name] = loss.detach()
            term = weight * loss
            total = term if total is None else total + term.to(total.device)
        for statement in self.statements.values():
            statement.probability = statement.contrastive = None
        return total

    def _terms(self) -> Iterator[tuple[str, float, Tensor]]:
        by_adapter: dict[str, list[Statement]] = {}
        for (adapter, _), statement in self.statements.items():
            by_adapter.setdefault(adapter, []).append(statement)
        for statements in by_adapter.values():
            config = statements[0].config
            balanced = [statement for statement in statements if statement.probability is not None]
            if balanced and config.learned.aux_loss_weight:
                yield "balance", config.learned.aux_loss_weight, _balance(balanced, config)
            contrastive = [statement.contrastive for statement in statements if statement.contrastive is not None]
            if contrastive and config.contrastive_weight:
                yield "contrastive", config.contrastive_weight, _together(contrastive).mean()


def _balance(statements: list[Statement], config: MonkeyJumpConfig) -> Tensor:
    loads = [statement.load for statement in statements if statement.load is not None]
    probabilities = [statement.probability for statement in statements if statement.probability is not None]
    if config.learned.lb_reduce == "global":
        loads, probabilities = [_together(loads).mean(0)], [_together(probabilities).mean(0)]
    found = []
    for experts in dict.fromkeys(load.shape[-1] for load in loads):  # all routers with as many experts at once
        alike = [i for i, load in enumerate(loads) if load.shape[-1] == experts]
        load, p = _together([loads[i] for i in alike]), _together([probabilities[i] for i in alike])
        found.append(balance_loss(load, p, config.top_k or experts, config.learned.lb_norm).to(loads[0].device))
    losses = torch.cat(found)
    return losses.sum() if config.learned.lb_reduce == "sum" else losses.mean()


def _together(tensors: list[Tensor]) -> Tensor:
    return torch.stack([tensor.to(tensors[0].device) for tensor in tensors])


class CarriedLoss(torch.autograd.Function):
    """A tensor as it is, whose backward also sends a gradient of 1 into `loss`: for trainers that make their own."""

    @staticmethod
    def forward(tensor: Tensor, loss: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.like = inputs[1].detach()

    @staticmethod
    def backward(ctx, grad):
        return grad, torch.ones_like(ctx.like)
