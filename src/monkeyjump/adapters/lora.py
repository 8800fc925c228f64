"""LoRA: gate * (alpha / r) * B A dropout(x), with A random and B zero at the start (Hu et al., 2021)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn

from monkeyjump.adapters.base import Adapter, Gate, fits_tokens, register
from monkeyjump.config import MonkeyJumpConfig
from monkeyjump.ops import dispatch
from monkeyjump.ops import reference as ops


@register
class LoraAdapter(Adapter):
    name = "lora"
    fused: ClassVar[bool] = True  # the delta is the gated product that the kernels compute; False where it is more

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """An adapter with a formula of its own is not what the kernels compute, unless it says that it is."""
        super().__init_subclass__(**kwargs)
        if "fused" not in vars(cls) and not {"delta", "strength", "forward"}.isdisjoint(vars(cls)):
            cls.fused = False

    def __init__(self, in_features: int, out_features: int, config: MonkeyJumpConfig) -> None:
        super().__init__(in_features, out_features, config)
        self.scaling = config.scaling
        self.dropout = config.dropout
        self.A = nn.Parameter(torch.empty(config.r, in_features, dtype=torch.float32))
        self.B = nn.Parameter(torch.empty(out_features, config.r, dtype=torch.float32))
        self.seeds: Callable[[torch.device], torch.Tensor | None] | None = None  # of dropout masks
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.kaiming_uniform_(self.A, a=math.sqrt(5))
        nn.init.zeros_(self.B)

    def strength(self, gate: Gate) -> torch.Tensor | float:
        """The factor on the rank-r activation: the gate and every scale that goes with it."""
        return self.scaling if gate is None else gate * self.scaling

    def rank_scale(self) -> torch.Tensor | None:
        """A trained factor on every rank, or None."""
        return None

    def forward(self, x: torch.Tensor, base: torch.Tensor, out: torch.Tensor, gate: Gate) -> torch.Tensor:
        alike = out.dtype in (x.dtype, dispatch.autocast_dtype(x))  # cast as it was for the frozen product
        if not (self.fused and alike and fits_tokens(gate, x) and dispatch.uses_kernels(out)):
            return super().forward(x, base, out, gate)
        from monkeyjump.ops import gated_lora

        x = x.to(out.dtype)
        dropout = self.dropout if self.training else 0.0
        seed = None if self.seeds is None or dropout == 0 else self.seeds(x.device)
        diagonal = self.rank_scale()
        return gated_lora.gated_lora(out, x, self.A, self.B, self.scaling, gate, diagonal, dropout, seed)

    def delta(self, x: torch.Tensor, base: torch.Tensor, gate: Gate) -> torch.Tensor:
        return ops.gated_lora(x, self.A, self.B, self.strength(gate), self.dropout if self.training else 0.0)

    def merged(
        self, weight: torch.Tensor, bias: torch.Tensor | None, sign: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        delta = (self.B * self.strength(None)) @ self.A
        return (weight.float() + sign * delta).to(weight.dtype), bias
