"""AdaLoRA: B diag(lam) A with a trained diagonal, orthogonal factors and a rank budget (Zhang et al., 2023).

The diagonal starts at zero, so the start is the identity. When `target_r < r`, buffers hold the smoothed sensitivity of
every entry; `tuner/allocation.py` reads them and zeroes the least important diagonal entries of the whole model.
"""

from __future__ import annotations

import torch
from torch import nn

from monkeyjump.adapters.base import Gate, register
from monkeyjump.adapters.lora import LoraAdapter
from monkeyjump.config import MonkeyJumpConfig

FACTORS = ("A", "B", "diagonal")


@register
class AdaLoraAdapter(LoraAdapter):
    name = "adalora"

    def __init__(self, in_features: int, out_features: int, config: MonkeyJumpConfig) -> None:
        super().__init__(in_features, out_features, config)
        self.diagonal = nn.Parameter(torch.zeros(config.r, dtype=torch.float32))
        self.allocations: torch.Tensor
        self.smoothing = (config.beta1, config.beta2)
        self.allocates = config.allocates_rank
        if self.allocates:
            for factor in FACTORS:
                shape = getattr(self, factor).shape
                self.register_buffer(f"sensitivity_{factor}", torch.zeros(shape))
                self.register_buffer(f"uncertainty_{factor}", torch.zeros(shape))
            self.register_buffer("allocations", torch.zeros((), dtype=torch.int64))
        self.reset_factors()

    def reset_factors(self) -> None:
        nn.init.normal_(self.A, std=0.02)
        nn.init.normal_(self.B, std=0.02)
        nn.init.zeros_(self.diagonal)

    def rank_scale(self) -> torch.Tensor:
        return self.diagonal

    def strength(self, gate: Gate) -> torch.Tensor | float:
        scale = self.diagonal * self.scaling
        return scale if gate is None else gate * scale

    def auxiliary_loss(self) -> torch.Tensor:
        """Mean of ||A A^T - I||_F and ||B^T B - I||_F."""
        eye = torch.eye(self.A.shape[0], device=self.A.device, dtype=self.A.dtype)
        rows = torch.linalg.matrix_norm(self.A @ self.A.T - eye)
        columns = torch.linalg.matrix_norm(self.B.T @ self.B - eye)
        return (rows + columns) / 2

    @torch.no_grad()
    def observe_gradients(self) -> None:
        """Update the smoothed sensitivities |w * grad| and their uncertainty; a missing gradient counts as zero."""
        beta1, beta2 = self.smoothing
        for factor in FACTORS:
            parameter = getattr(self, factor)
            sensitivity, uncertainty = getattr(self, f"sensitivity_{factor}"), getattr(self, f"uncertainty_{factor}")
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            importance = (parameter * grad).abs()
            sensitivity.mul_(beta1).add_(importance, alpha=1 - beta1)
            uncertainty.mul_(beta2).add_((importance - sensitivity).abs(), alpha=1 - beta2)

    def importance(self) -> torch.Tensor:
        """Score of each rank: its diagonal entry plus the mean over its row of A and its column of B, [R]."""
        score_A, score_B, score_diagonal = (
            getattr(self, f"sensitivity_{factor}") * getattr(self, f"uncertainty_{factor}") for factor in FACTORS
        )
        return score_diagonal + score_A.mean(1) + score_B.mean(0)
