"""LiME: one LoRA per projection, whose delta E vectors modulate (arXiv 2604.02338).

    y = W x + delta * (sum_e w_e v_e + g s),   delta = (alpha / r) B A x

The weights w come from the outputs themselves (`routing/lime.py`), so that no parameter decides. Every v starts around
1, and the shared vector s counts nothing at first (g is 0).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from monkeyjump.adapters.base import BaseLinear, Gate, register
from monkeyjump.adapters.lora import LoraAdapter
from monkeyjump.config import MonkeyJumpConfig
from monkeyjump.ops import reference as ops
from monkeyjump.ops.precision import fp32_parameter

AROUND_ONE, SHARED_STD = 0.1, 0.1


@register
class LimeAdapter(LoraAdapter):
    """Plain LoRA where nothing is routed (no experts)."""

    name = "lime"

    def __init__(self, in_features: int, out_features: int, config: MonkeyJumpConfig, experts: int = 0) -> None:
        self.experts = experts
        super().__init__(in_features, out_features, config)

    @staticmethod
    def mixture(linear: BaseLinear, config: MonkeyJumpConfig, experts: int) -> LimeAdapter:  # type: ignore[override]
        return LimeAdapter(linear.in_features, linear.out_features, config, experts)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.experts and not hasattr(self, "v"):
            self.v = fp32_parameter(self.experts, self.out_features)
            self.shared, self.shared_gate = fp32_parameter(self.out_features), fp32_parameter(1)
        if self.experts:
            nn.init.uniform_(self.v, 1 - AROUND_ONE, 1 + AROUND_ONE)
            nn.init.normal_(self.shared, std=SHARED_STD)
            nn.init.zeros_(self.shared_gate)

    def forward(self, x: Tensor, base: Tensor, out: Tensor, gate: Gate) -> Tensor:
        if self.experts and self._in_kernels(x, out, gate):
            return self._product(x, out, *self._groups(gate, x))
        return super().forward(x, base, out, gate)

    def delta(self, x: Tensor, base: Tensor, gate: Gate) -> Tensor:
        if not self.experts:
            return super().delta(x, base, gate)
        return ops.project_up_each(self.down(x) * self.scaling, *self._groups(gate, x))

    def _groups(self, gate: Gate, x: Tensor) -> tuple[Tensor, Tensor]:
        """The modulated delta is that of E + 1 experts that share A: their B [O, (E + 1) * R], and gates [..., E + 1].

        No tensor of a token's whole width is kept for it.
        """
        if gate is None:
            gate = x.new_full((*x.shape[:-1], self.experts), 1 / self.experts)
        factors = torch.cat([self.v, self.shared_gate * self.shared[None]]).T
        B = (factors.unsqueeze(-1) * self.B.unsqueeze(-2)).flatten(-2)
        return B, torch.cat([gate, torch.ones_like(gate[..., :1])], -1).float()

    def first_outputs(self, z: Tensor) -> Tensor:
        """The first E channels of delta, from A x [..., R] in fp32 and without dropout."""
        return z @ self.B[: self.experts].T * self.scaling
