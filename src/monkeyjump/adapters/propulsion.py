"""Propulsion: the output, bias included, times p ** degree (Kowsher et al., 2024).

The adapter stores the offset p - 1, whose neutral value is 0: weight decay then pulls towards the identity instead of
towards a vanishing output, and bf16 keeps its resolution where it matters.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from monkeyjump.adapters.base import Adapter, Gate, fits_tokens, register
from monkeyjump.config import MonkeyJumpConfig
from monkeyjump.config_rules import integer
from monkeyjump.ops import dispatch
from monkeyjump.ops import reference as ops
from monkeyjump.ops.precision import fp32_parameter


@register
class PropulsionAdapter(Adapter):
    name = "propulsion"
    options: ClassVar[dict[str, Any]] = {
        "degree": integer("The output is scaled by p ** degree.", 15, 1, "use 1 or more (15 is the published value)")
    }

    def __init__(self, in_features: int, out_features: int, config: MonkeyJumpConfig) -> None:
        super().__init__(in_features, out_features, config)
        self.degree: int = self.option("degree", config)
        self.offset = fp32_parameter(out_features)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.offset)

    def forward(self, x: Tensor, base: Tensor, out: Tensor, gate: Gate) -> Tensor:
        """One kernel does it in eager mode, for a gate that is not trained and is one number per token."""
        fits = base is out and self.offset.dim() == 1 and not torch.compiler.is_compiling() and fits_tokens(gate, base)
        fits = fits and (gate is None or not (gate.requires_grad or gate.shape[-1] > 1))
        if not fits or not dispatch.uses_kernels(base):
            return super().forward(x, base, out, gate)
        from monkeyjump.ops.kernels import propulsion

        return propulsion.scaled(base, self.offset, self.degree, gate)

    def delta(self, x: Tensor, base: Tensor, gate: Gate) -> Tensor:
        return ops.scale_output(base, self.offset, self.degree, 1.0 if gate is None else gate)

    def merged(self, weight: Tensor, bias: Tensor | None, sign: int) -> tuple[Tensor, Tensor | None]:
        factor = (1 + self.offset) ** (sign * self.degree)
        return weight * factor[:, None], None if bias is None else bias * factor
