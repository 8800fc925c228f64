"""Propulsion: the output, bias included, times p ** degree (Kowsher et al., 2024).

Stored as the offset p - 1, whose neutral value is 0: weight decay then pulls towards the identity instead of towards a
vanishing output, and bf16 keeps its resolution where it matters.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from monkeyjump.adapters.base import Adapter, Gate, fits_tokens, register
from monkeyjump.config import MonkeyJumpConfig
from monkeyjump.config_rules import integer
from monkeyjump.ops import dispatch
from monkeyjump.ops import reference as ops


@register
class PropulsionAdapter(Adapter):
    name = "propulsion"
    options: ClassVar[dict[str, Any]] = {
        "degree": integer("The output is scaled by p ** degree.", 15, 1, "use 1 or more (15 is the published value)")
    }

    def __init__(self, in_features: int, out_features: int, config: MonkeyJumpConfig) -> None:
        super().__init__(in_features, out_features, config)
        self.degree: int = self.option("degree", config)
        self.offset = nn.Parameter(torch.empty(out_features, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.offset)

    def forward(self, x: torch.Tensor, base: torch.Tensor, out: torch.Tensor, gate: Gate) -> torch.Tensor:
        if base is not out or self.offset.dim() != 1 or not self._one_kernel(base, gate):
            return super().forward(x, base, out, gate)
        from monkeyjump.ops import propulsion

        return propulsion.scaled(base, self.offset, self.degree, gate)

    @staticmethod
    def _one_kernel(base: torch.Tensor, gate: Gate) -> bool:
        """Eager mode, and a gate that is not trained and is one number per token."""
        if torch.compiler.is_compiling() or not fits_tokens(gate, base):
            return False
        return (gate is None or not (gate.requires_grad or gate.shape[-1] > 1)) and dispatch.uses_kernels(base)

    def delta(self, x: torch.Tensor, base: torch.Tensor, gate: Gate) -> torch.Tensor:
        return ops.scale_output(base, self.offset, self.degree, 1.0 if gate is None else gate)

    def merged(
        self, weight: torch.Tensor, bias: torch.Tensor | None, sign: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        factor = (1 + self.offset) ** (sign * self.degree)
        scaled = (weight.float() * factor[:, None]).to(weight.dtype)
        return scaled, None if bias is None else (bias.float() * factor).to(bias.dtype)
