"""N experts of one kind on one projection, fused into one adapter: no loop, no gather, no look at values on the host.

LoRA-like experts are one adapter of rank N * r whose rank activation is multiplied by the N gates, each repeated r
times; zero gates give exactly the top-k result. All experts of a projection see the same dropout mask. Experts of
Propulsion, (IA)3 and VeRA start equal, so only different gates tell them apart: a router must not start at zero.

Shapes: D, O input and output width, N experts, R rank of one expert; `...`: any leading shape, mostly [B, T].
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monkeyjump.adapters.adalora import AdaLoraAdapter
from monkeyjump.adapters.base import ADAPTERS, Adapter, BaseLinear, Gate
from monkeyjump.adapters.lora import LoraAdapter
from monkeyjump.adapters.lora_fa import LoraFaAdapter
from monkeyjump.adapters.propulsion import PropulsionAdapter
from monkeyjump.config import MonkeyJumpConfig
from monkeyjump.ops import reference as ops


def mixture_of(config: MonkeyJumpConfig, linear: BaseLinear, experts: int) -> Adapter:
    """The fused adapter of `experts` experts of kind `config.adapter`; its gate is [..., experts]."""
    own = ADAPTERS.get(config.adapter).mixture
    if own is not None:
        return own(linear, config, experts)
    kinds = SHARED_A if config.projection.share_A else MIXTURES
    return kinds[config.adapter](linear.in_features, linear.out_features, config, experts)


def mixture_problems(config: MonkeyJumpConfig) -> list[str]:
    """What is wrong with a configuration that asks for a mixture which does not exist."""
    if config.placement in ("block", "nested") or config.adapter in MIXTURES:
        return []
    if config.placement == "projection" and ADAPTERS.get(config.adapter).mixture is not None:
        return []
    known = [name for name in ADAPTERS if name in MIXTURES or ADAPTERS.get(name).mixture is not None]
    return [
        f"adapter={config.adapter!r} has no form with several experts on one projection: choose one of "
        f"{', '.join(known)}, or placement='block'."
    ]


class LoraMixture(LoraAdapter):
    """MoELoRA, MoLA: every expert has an A and a B. Gate n multiplies entries n * r to (n + 1) * r of A x."""

    fused = True

    def __init__(self, in_features: int, out_features: int, config: MonkeyJumpConfig, experts: int) -> None:
        wide, options = copy.copy(config), config.adapter_options or {}
        wide.r, wide.alpha = experts * config.r, experts * config.alpha  # all ranks at the same alpha / r
        if options.get("target_r") is not None:
            wide.adapter_options = {**options, "target_r": experts * options["target_r"]}
        super().__init__(in_features, out_features, wide)
        self.experts = experts

    def strength(self, gate: Gate) -> Tensor | float:
        repeated = None if gate is None else gate.repeat_interleave(self.B.shape[1] // self.experts, dim=-1)
        return super().strength(repeated)

    def expert_outputs(self, x: Tensor, base: Tensor) -> Tensor:
        """What every expert alone would add for the tokens x [..., D], without its gate and dropout: [..., N, O]."""
        z = F.linear(x, self.A.to(x.dtype)) * self.strength(None)
        return torch.einsum("...nr,onr->...no", z.unflatten(-1, (self.experts, -1)), self._up(x.dtype))

    def _up(self, dtype: torch.dtype) -> Tensor:
        return self.B.to(dtype).unflatten(-1, (self.experts, -1))


class LoraFaMixture(LoraMixture, LoraFaAdapter):
    """N frozen A's and N trained B's."""


class AdaLoraMixture(LoraMixture, AdaLoraAdapter):
    """Orthogonality is asked of every expert by itself; the rank budget is one for all experts and projections."""


class HydraMixture(LoraMixture):
    """HydraLoRA: one A, N B's (Tian et al., 2024). A x is formed once and each B gets it times its gate."""

    fused = True

    def __init__(self, in_features: int, out_features: int, config: MonkeyJumpConfig, experts: int) -> None:
        super().__init__(in_features, out_features, config, experts)
        A = self.A[: config.r].detach().clone()
        self.A = nn.Parameter(A) if isinstance(self.A, nn.Parameter) else A

    def delta(self, x: Tensor, base: Tensor, gate: Gate) -> Tensor:
        z = self.down(x)
        gates = torch.ones(self.experts, device=z.device) if gate is None else gate
        return ops.project_up_each(z * self.scaling, self.B, gates)

    def expert_outputs(self, x: Tensor, base: Tensor) -> Tensor:
        z = F.linear(x, self.A.to(x.dtype)) * self.scaling
        return torch.einsum("...r,onr->...no", z, self._up(x.dtype))


class HydraFaMixture(HydraMixture, LoraFaAdapter):
    """HydraLoRA with a frozen A."""


class PropulsionMixture(PropulsionAdapter):
    """y (1 + sum_n g_n (p_n ** degree - 1)), with the offsets p - 1 as [N, O]."""

    def __init__(self, in_features: int, out_features: int, config: MonkeyJumpConfig, experts: int) -> None:
        super().__init__(in_features, out_features, config)
        self.experts = experts
        self.offset = nn.Parameter(torch.zeros(experts, out_features, dtype=torch.float32))

    def delta(self, x: Tensor, base: Tensor, gate: Gate) -> Tensor:
        factor = ops.power_minus_one(self.offset, self.degree)
        if gate is None:
            mixed = factor.sum(0)
        elif torch.compiler.is_compiling():  # a product [..., O] in fp32 would be kept, these are made again
            mixed = sum(gate[..., n : n + 1] * factor[n] for n in range(1, self.experts)) + gate[..., :1] * factor[0]
        else:
            mixed = gate.to(factor.dtype) @ factor
        return (base * mixed).to(base.dtype)

    def expert_outputs(self, x: Tensor, base: Tensor) -> Tensor:
        return base.unsqueeze(-2) * ops.power_minus_one(self.offset, self.degree)


# Not in the registry of adapters: what a user names is the kind of one expert.
MIXTURES: dict[str, Any] = {
    "lora": LoraMixture,
    "lora_fa": LoraFaMixture,
    "adalora": AdaLoraMixture,
    "propulsion": PropulsionMixture,
}
SHARED_A: dict[str, Any] = {"lora": HydraMixture, "lora_fa": HydraFaMixture}
