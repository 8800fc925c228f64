"""LoRA-FA: LoRA whose A is frozen, so backward needs only the rank-r activation (Zhang et al., 2023).

A is a buffer: random, saved with the adapter, never trained. With dropout, plain autograd would keep an input-sized
mask for the gradient of x; the mask is made again from a seed instead.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from monkeyjump.adapters.base import register
from monkeyjump.adapters.lora import LoraAdapter
from monkeyjump.config import MonkeyJumpConfig
from monkeyjump.config_rules import flag
from monkeyjump.ops import reference as ops


@register
class LoraFaAdapter(LoraAdapter):
    name = "lora_fa"
    fused = True
    # As with PEFT's LoRA-FA optimizer, the change of the weight is then the nearest to the full gradient.
    options: ClassVar[dict[str, Any]] = {"project_gradient": flag("B's gradient becomes g (A A^T)^-1 / scale^2.")}

    def __init__(self, in_features: int, out_features: int, config: MonkeyJumpConfig) -> None:
        super().__init__(in_features, out_features, config)
        self.project_gradient: bool = "project_gradient" in self.options and self.option("project_gradient", config)
        A = self.A.detach()
        del self.A
        self.register_buffer("A", A)

    def down(self, x: Tensor) -> Tensor:
        if not self.training or self.dropout == 0:
            return super().down(x)
        seed = torch.randint(2**31, (), device=x.device)
        return ops.SeededDropoutLinear.apply(x, self.A, seed, self.dropout)
