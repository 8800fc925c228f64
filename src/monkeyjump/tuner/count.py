"""How many parameters an adapted model has, and of which kind."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from monkeyjump.tuner.layer import MonkeyJumpLayer


@dataclass(frozen=True)
class ParameterCount:
    trainable: int
    total: int  # parameters of the whole model, base included
    router: int  # trainable parameters that only decide the routing
    buffers: int  # numbers kept and saved without training: centres, statistics, frozen factors

    def __str__(self) -> str:
        share = 100 * self.trainable / max(self.total, 1)
        return (
            f"trainable {self.trainable:,} ({share:.3f} % of {self.total:,}), of them router {self.router:,}; "
            f"buffers {self.buffers:,}"
        )


def count_parameters(model: nn.Module) -> ParameterCount:
    """Count each tensor once, also when the model shares it; quantised weights count as stored elements."""
    parameters = list(model.parameters())
    layers = [layer for layer in model.modules() if isinstance(layer, MonkeyJumpLayer)]
    buffers = [
        buffer for layer in layers for name, buffer in layer.named_buffers() if not name.startswith("base_layer.")
    ]
    routers = [parameter for layer in layers for parameter in layer.monkeyjump_router.parameters()]
    return ParameterCount(
        trainable=sum(p.numel() for p in parameters if p.requires_grad),
        total=sum(p.numel() for p in parameters),
        router=sum(p.numel() for p in routers if p.requires_grad),  # none for centres, which follow the tokens
        buffers=sum(b.numel() for b in buffers),
    )
