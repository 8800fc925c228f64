"""LoRA: gate * (alpha / r) * B A dropout(x), with A random and B zero at the start (Hu et al., 2021)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monkeyjump.adapters.base import Adapter, Gate, fits_tokens, register
from monkeyjump.config import MonkeyJumpConfig
from monkeyjump.ops import dispatch
from monkeyjump.ops import reference as ops
from monkeyjump.ops.precision import fp32_parameter


@register
class LoraAdapter(Adapter):
    name = "lora"
    fused: ClassVar[bool] = True  # the delta is the gated product that the kernels compute; False where it is more

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """An adapter with a formula of its own is not what the kernels compute, unless it says that it is."""
        super().__init_subclass__(**kwargs)
        if "fused" not in vars(cls) and not {"down", "delta", "strength", "forward"}.isdisjoint(vars(cls)):
            cls.fused = False

    def __init__(self, in_features: int, out_features: int, config: MonkeyJumpConfig) -> None:
        super().__init__(in_features, out_features, config)
        self.scaling = config.scaling
        self.dropout = config.dropout
        self.A = fp32_parameter(config.r, in_features)
        self.B = fp32_parameter(out_features, config.r)
        self.seeds: Callable[[torch.device], Tensor | None] | None = None  # of dropout masks
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.kaiming_uniform_(self.A, a=math.sqrt(5))
        nn.init.zeros_(self.B)

    def strength(self, gate: Gate) -> Tensor | float:
        """The factor on the rank-r activation: the gate and every scale that goes with it."""
        return self.scaling if gate is None else gate * self.scaling

    def rank_scale(self) -> Tensor | None:
        """A trained factor on every rank, or None."""
        return None

    def forward(self, x: Tensor, base: Tensor, out: Tensor, gate: Gate) -> Tensor:
        if not (self.fused and self._in_kernels(x, out, gate)):
            return super().forward(x, base, out, gate)
        return self._product(x, out, self.B, gate)

    def _in_kernels(self, x: Tensor, out: Tensor, gate: Gate) -> bool:
        alike = out.dtype in (x.dtype, dispatch.autocast_dtype(x))  # cast as it was for the frozen product
        return alike and fits_tokens(gate, x) and dispatch.uses_kernels(out)

    def _product(self, x: Tensor, out: Tensor, B: Tensor, gate: Gate) -> Tensor:
        """out + B (gate * A dropout(x)) times all scales, in one kernel; of more columns than ranks B shares its A."""
        from monkeyjump.ops import gated_lora

        x = x.to(out.dtype)
        dropout = self.dropout if self.training else 0.0
        seed = None if self.seeds is None or dropout == 0 else self.seeds(x.device)
        return gated_lora.gated_lora(out, x, self.A, B, self.scaling, gate, self.rank_scale(), dropout, seed)

    def down(self, x: Tensor) -> Tensor:
        """A dropout(x)."""
        return F.linear(F.dropout(x, self.dropout) if self.training and self.dropout > 0 else x, self.A.to(x.dtype))

    def delta(self, x: Tensor, base: Tensor, gate: Gate) -> Tensor:
        return ops.project_up(self.down(x), self.B, self.strength(gate))

    def merged(self, weight: Tensor, bias: Tensor | None, sign: int) -> tuple[Tensor, Tensor | None]:
        delta = (self.B * self.strength(None)) @ self.A
        return weight + sign * delta, bias
