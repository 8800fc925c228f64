"""FlyLoRA: (alpha / r) B of the k largest entries of A x, with A frozen, sparse and random (arXiv 2510.08396).

The ranks are experts, and A is their router: no parameter decides. A bias on every rank evens their loads without a
gradient; it moves once an optimiser step (`monkeyjump.balance_ranks`), towards ranks that were chosen too rarely. It is
added to |A x|. The published |A x + bias| evens nothing, since there a negative bias makes a rank more likely as well.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from monkeyjump.adapters.base import Gate, register
from monkeyjump.adapters.lora_fa import LoraFaAdapter
from monkeyjump.config import MonkeyJumpConfig
from monkeyjump.config_rules import fraction, integer, weight
from monkeyjump.errors import ConfigError
from monkeyjump.ops import reference as ops


@register
class FlyLoraAdapter(LoraFaAdapter):
    name = "flylora"
    by_token = True
    options: ClassVar[dict[str, Any]] = {
        "active_ranks": integer("Ranks that a token uses; None: a quarter.", None, 1, "the authors use 8 of 32", True),
        "density": fraction("Share of the entries of a row of A that are not zero.", 0.25, "the authors use k / r"),
        "balance_rate": weight("Step of the bias that evens the loads of ranks.", 1e-3, "0 leaves them as they come"),
    }
    bias: Tensor
    load: Tensor

    def __init__(self, in_features: int, out_features: int, config: MonkeyJumpConfig) -> None:
        self.active_ranks: int = self.option("active_ranks", config) or max(1, config.r // 4)
        self.density: float = self.option("density", config)
        self.balance_rate: float = self.option("balance_rate", config)
        if self.active_ranks > config.r:
            raise ConfigError(
                f"active_ranks={self.active_ranks} is more than r={config.r}: use a larger r, or fewer "
                "active ranks (the authors use 8 of 32)."
            )
        super().__init__(in_features, out_features, config)
        self.register_buffer("bias", torch.zeros(config.r))
        self.register_buffer("load", torch.zeros(config.r))  # tokens of each rank since the last step

    def reset_parameters(self) -> None:
        ranks, width = self.A.shape
        keys = torch.rand(ranks, width)
        chosen = keys.argsort(1) < max(1, round(self.density * width))
        with torch.no_grad():
            self.A.copy_(torch.randn(ranks, width) / ranks * chosen)
        nn.init.zeros_(self.B)

    def delta(self, x: Tensor, base: Tensor, gate: Gate) -> Tensor:
        z = self.down(x)
        with torch.no_grad():
            scores = z.float().abs() + self.bias
            chosen = torch.zeros_like(scores).scatter_(-1, scores.topk(self.active_ranks).indices, 1.0)
            if self.training:
                self.load += chosen.flatten(0, -2).sum(0)
        strength = chosen * self.scaling
        return ops.project_up(z, self.B, strength if gate is None else strength * gate)
