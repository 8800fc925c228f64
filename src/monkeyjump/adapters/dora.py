"""DoRA: the weight as a magnitude times a direction, with LoRA on the direction (Liu et al., 2024).

With V = W + s B A, n = ||V|| and m the trained magnitude, both one number per output, PEFT's DoRA is

    y = (m / n) V x + b = y0 + delta,    delta = (m / n - 1) W x + (m / n) s B A x,    y0 = W x + b.

The gated form is y0 + gate * delta. Gate 0 is the frozen output to the last bit, gate 1 is DoRA, and between them a
token sees the weight (1 - gate) W + gate * (m / n) V: a straight line between the two weights. The other candidate,
gating B A inside the norm, needs a norm per token and is no longer linear in the gate; every other adapter is, and
mixtures, mean gates and the gradient of a learned router rely on it.

As in the paper and in PEFT, n is a constant for the gradient, and dropout, when it acts, also acts on the W x of the
delta. The norm is taken in fp32, also for a base in bf16, without forming V (`ops.row_norms`).

The adapter stores m - ||W||, whose neutral value is 0: weight decay pulls towards the magnitude of the base, and the
start is exactly the identity on every device and in every dtype, because m and n are then the same number.
"""

from __future__ import annotations

from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monkeyjump.adapters.base import BaseLinear, Gate, register
from monkeyjump.adapters.lora import LoraAdapter
from monkeyjump.adapters.mixture import LoraMixture
from monkeyjump.config import MonkeyJumpConfig
from monkeyjump.ops import reference as ops


@register
class DoraAdapter(LoraAdapter):
    name = "dora"
    linear: BaseLinear | None = None
    folded: Tensor | None = None  # m / n of the last merge, which the merged weight no longer tells

    def __init__(self, in_features: int, out_features: int, config: MonkeyJumpConfig) -> None:
        super().__init__(in_features, out_features, config)
        self.magnitude_offset = nn.Parameter(torch.zeros(out_features, dtype=torch.float32))

    @classmethod
    def for_linear(cls, linear: BaseLinear, config: MonkeyJumpConfig) -> Self:
        adapter = super().for_linear(linear, config)
        adapter.linear = linear
        return adapter

    def directions(self) -> tuple[Tensor, Tensor]:
        """A [R, D] and B [O, R]; those of a mixture for each expert."""
        return self.A, self.B

    def factors(self, weight: Tensor) -> Tensor:
        """m / n on the base weight [O, D]: [O], or [N, O] for a mixture, fp32; only m has a gradient."""
        A, B = self.directions()
        with torch.no_grad(), torch.autocast(weight.device.type, enabled=False):
            own, norm = ops.row_norms(weight, A, B * self.scaling)
            norm = norm.clamp_min(torch.finfo(norm.dtype).tiny)  # a row of zeros stays one: 0 / tiny
        return (own + self.magnitude_offset) / norm

    def straight(self, x: Tensor, base: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The input after dropout, and W times it."""
        if self.training and self.dropout > 0:
            x = F.dropout(x, self.dropout)
            return x, F.linear(x, weight.to(x.dtype))
        bias = None if self.linear is None else self.linear.bias()
        return x, base if bias is None else base - bias

    def delta(self, x: Tensor, base: Tensor, gate: Gate) -> Tensor:
        assert self.linear is not None, "DoRA needs the base weight: make it with DoraAdapter.for_linear"
        weight = self.linear.weight()
        factor = self.factors(weight)
        x, straight = self.straight(x, base, weight)
        low_rank = ops.gated_lora(x, self.A, self.B, self.strength(gate))
        rescaled = straight * ((factor - 1) if gate is None else (factor - 1) * gate)
        return (rescaled + factor * low_rank).to(base.dtype)

    def merged(self, weight: Tensor, bias: Tensor | None, sign: int) -> tuple[Tensor, Tensor | None]:
        update = (self.B * self.strength(None)) @ self.A
        if sign > 0:
            self.folded = self.factors(weight).detach()
            return self.folded[:, None] * (weight + update), bias
        assert self.folded is not None
        return weight / self.folded.to(weight.device)[:, None] - update, bias


class DoraMixture(LoraMixture, DoraAdapter):
    """N experts on one linear: y0 + sum_n g_n delta_n, each expert with its own direction and magnitude."""

    def __init__(self, linear: BaseLinear, config: MonkeyJumpConfig, experts: int) -> None:
        super().__init__(linear.in_features, linear.out_features, config, experts)
        self.magnitude_offset = nn.Parameter(torch.zeros(experts, linear.out_features, dtype=torch.float32))
        self.linear = linear

    def directions(self) -> tuple[Tensor, Tensor]:
        return self.A.unflatten(0, (self.experts, -1)), self.B.unflatten(1, (self.experts, -1)).movedim(1, 0)

    def delta(self, x: Tensor, base: Tensor, gate: Gate) -> Tensor:
        assert self.linear is not None
        weight = self.linear.weight()
        factor = self.factors(weight)
        x, straight = self.straight(x, base, weight)
        up = self.B * factor.T.repeat_interleave(self.B.shape[1] // self.experts, dim=1)
        rescale = (factor - 1).sum(0) if gate is None else gate.to(factor.dtype) @ (factor - 1)
        return (straight * rescale + ops.gated_lora(x, self.A, up, self.strength(gate))).to(base.dtype)

    def expert_outputs(self, x: Tensor, base: Tensor) -> Tensor:
        assert self.linear is not None
        factor, bias = self.factors(self.linear.weight()), self.linear.bias()
        straight = base if bias is None else base - bias
        return (factor - 1) * straight.unsqueeze(-2) + factor * super().expert_outputs(x, base)


DoraAdapter.mixture = DoraMixture
