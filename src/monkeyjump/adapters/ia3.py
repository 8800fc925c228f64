"""(IA)3: the output of a projection times a trained vector l; a feed-forward one scales its input (Liu et al., 2022).

    y = y0 + gate * (l - 1) * y0,              y0 = W x + b, so the bias is scaled too, as in PEFT
    y = y0 + gate * W ((l - 1) * x),           feed-forward modules: y = W (l * x) + b at gate 1

Both are linear in the gate: 0 is the frozen output, 1 is PEFT's (IA)3. Which modules count as feed-forward is
`adapter_options={"feedforward_modules": [...]}`, names or ends of paths; by default those PEFT names for any model
(down_proj, fc2, ...). An input-scaled module costs a second product with the base weight.

The adapter stores l - 1, whose neutral value is 0: weight decay pulls towards the identity, not towards a vanishing
output, and a scaling far below the resolution of bf16 around 1 is kept.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch.nn.functional as F
from peft.utils.constants import TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING
from torch import Tensor, nn

from monkeyjump.adapters.base import Adapter, BaseLinear, Gate, register
from monkeyjump.config import MonkeyJumpConfig
from monkeyjump.config_rules import setting
from monkeyjump.ops.precision import fp32_parameter

_NAMED = {name for names in TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING.values() for name in names}
# "mlp.c_proj" (GPT-2) also covers "c_proj" (GPT-Neo), which alone would take GPT-2's attention output for one.
FEEDFORWARD = sorted(name for name in _NAMED if not any(other.endswith(f".{name}") for other in _NAMED))


@register
class Ia3Adapter(Adapter):
    name = "ia3"
    options: ClassVar[dict[str, Any]] = {
        "feedforward_modules": setting(
            "Modules whose input is scaled.", tuple(FEEDFORWARD),
            lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
            "a list of module names", "[] scales every output", type="array", items={"type": "string"},
        )
    }  # fmt: skip
    linear: BaseLinear | None = None  # set where the input is scaled

    def __init__(
        self, in_features: int, out_features: int, config: MonkeyJumpConfig, linear: BaseLinear | None = None
    ) -> None:
        super().__init__(in_features, out_features, config)
        self.linear = linear
        self.ia3_offset = fp32_parameter(out_features if linear is None else in_features)
        self.reset_parameters()

    @classmethod
    def for_linear(cls, linear: BaseLinear, config: MonkeyJumpConfig) -> Self:
        names = cls.option("feedforward_modules", config)
        feedforward = any(linear.path == name or linear.path.endswith(f".{name}") for name in names)
        return cls(linear.in_features, linear.out_features, config, linear if feedforward else None)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.ia3_offset)

    def factor(self, gate: Gate) -> Tensor:
        """gate * (l - 1), in fp32."""
        return self.ia3_offset if gate is None else self.ia3_offset * gate

    def delta(self, x: Tensor, base: Tensor, gate: Gate) -> Tensor:
        factor = self.factor(gate)  # fp32 until it meets the activation
        if self.linear is None:
            return (base * factor).to(base.dtype)
        return F.linear((x * factor).to(x.dtype), self.linear.weight().to(x.dtype))

    def merged(self, weight: Tensor, bias: Tensor | None, sign: int) -> tuple[Tensor, Tensor | None]:
        factor = (1 + self.ia3_offset) ** sign
        if self.linear is not None:
            return weight * factor, bias
        return weight * factor[:, None], None if bias is None else bias * factor

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, scales={'output' if self.linear is None else 'input'}"


class Ia3Mixture(Ia3Adapter):
    """N experts on one linear: scaled by 1 + sum_n g_n (l_n - 1), with the offsets as [N, width]."""

    def __init__(self, linear: BaseLinear, config: MonkeyJumpConfig, experts: int) -> None:
        scaled = Ia3Adapter.for_linear(linear, config).linear
        super().__init__(linear.in_features, linear.out_features, config, scaled)
        self.ia3_offset = nn.Parameter(self.ia3_offset.detach().repeat(experts, 1))

    def factor(self, gate: Gate) -> Tensor:
        return self.ia3_offset.sum(0) if gate is None else gate.to(self.ia3_offset.dtype) @ self.ia3_offset

    def expert_outputs(self, x: Tensor, base: Tensor) -> Tensor:
        """What every expert alone would add for the tokens x [S, D], without its gate: [S, N, O]."""
        if self.linear is None:
            return base.unsqueeze(-2) * self.ia3_offset
        return F.linear((x.unsqueeze(-2) * self.ia3_offset).to(x.dtype), self.linear.weight().to(x.dtype))


Ia3Adapter.mixture = Ia3Mixture
