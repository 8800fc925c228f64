"""AdaLoRA: B diag(lam) A with a trained diagonal, orthogonal factors and a rank budget (Zhang et al., 2023).

The diagonal starts at zero, so the start is the identity. When `target_r < r`, buffers hold the smoothed sensitivity of
every entry; `tuner/training/optimizer_steps.py` reads them and zeroes the least important entries of the diagonals.

Gradients are sums over tokens, so a rank that few tokens reach looks unimportant. `score_per_token` divides by the
share of the tokens that came by; the score is then that of the diagonal entry alone (the first-order effect of zeroing
it), because the gradients of A and B also hold that of the orthogonality loss, which no token has a share in.

Shapes: D, O input and output width, R ranks, N experts (1 here; a mixture has several).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from monkeyjump.adapters.base import Gate, register
from monkeyjump.adapters.lora import LoraAdapter
from monkeyjump.config import MonkeyJumpConfig
from monkeyjump.config_rules import flag, fraction, integer, is_int, weight

FACTORS = ("A", "B", "diagonal")


@register
class AdaLoraAdapter(LoraAdapter):
    name = "adalora"
    fused = True
    experts = 1  # in one adapter; a mixture has more
    options: ClassVar[dict[str, Any]] = {
        "target_r": integer("Average rank after allocation.", None, 1, "r or None takes no ranks away"),
        "tinit": integer("Optimiser steps before the rank budget starts to shrink.", 0, 0, "0 starts at once"),
        "tfinal": integer("Last optimiser steps, with the budget at its target.", 0, 0, "0 has none of them"),
        "deltaT": integer("Optimiser steps between two allocations.", 1, 1, "1 allocates at every optimiser step"),
        "beta1": fraction("Smoothing of the sensitivity.", 0.85, "AdaLoRA's authors use 0.85"),
        "beta2": fraction("Smoothing of its uncertainty.", 0.85, "AdaLoRA's authors use 0.85"),
        "total_step": integer("Optimiser steps of the whole training.", None, 1, "it is needed when target_r < r"),
        "score_per_token": flag("With several experts: score a rank per token that reached the expert."),
        "orth_reg_weight": weight("Weight of the orthogonality loss.", 0.5, "0 switches the orthogonality loss off"),
    }

    def __init__(self, in_features: int, out_features: int, config: MonkeyJumpConfig) -> None:
        super().__init__(in_features, out_features, config)
        self.diagonal = nn.Parameter(torch.zeros(config.r, dtype=torch.float32))
        self.allocations: Tensor
        self.smoothing = (self.option("beta1", config), self.option("beta2", config))
        target = self.option("target_r", config)
        self.allocates = target is not None and target < config.r
        if self.allocates:
            for factor in FACTORS:
                shape = getattr(self, factor).shape
                self.register_buffer(f"sensitivity_{factor}", torch.zeros(shape))
                self.register_buffer(f"uncertainty_{factor}", torch.zeros(shape))
            self.register_buffer("allocations", torch.zeros((), dtype=torch.int64))
        self.per_token = self.allocates and self.option("score_per_token", config)
        # The tokens sent to each expert since the last allocation, then all tokens, [N + 1]; None if nobody counted.
        # It is no buffer: data-parallel training would overwrite those of other ranks inside an accumulated batch.
        self.tokens: Tensor | None = None

    @classmethod
    def config_problems(cls, config: MonkeyJumpConfig) -> list[str]:
        found = super().config_problems(config)
        if found or not is_int(config.r):
            return found
        warm_up, end, steps = (cls.option(name, config) for name in ("tinit", "tfinal", "total_step"))
        target = cls.option("target_r", config) or config.r
        if target > config.r:
            found.append(f"target_r={target} must be in 1..r ({config.r}): use r for no rank allocation.")
        elif target < config.r and steps is None:
            found.append("total_step=None must be given when target_r < r: set it to the training's optimiser steps.")
        elif target < config.r and warm_up + end >= steps:
            found.append(f"tinit + tfinal = {warm_up + end} must be smaller than total_step={steps}: lower them.")
        several = config.placement in ("projection", "ffn") and config.learns_router
        if cls.option("score_per_token", config) and not several:
            found.append(
                "score_per_token=True compares the experts of a mixture under a learned router, not of "
                f"placement={config.placement!r} with router={config.router!r}: drop it."
            )
        return found

    def reset_parameters(self) -> None:
        """Draw the factors and zero the diagonal: were B zero as well, nothing would have a gradient."""
        nn.init.normal_(self.A, std=0.02)
        nn.init.normal_(self.B, std=0.02)
        if "diagonal" in self._parameters:  # LoRA's constructor resets before there is one
            nn.init.zeros_(self.diagonal)

    def rank_scale(self) -> Tensor:
        return self.diagonal

    def strength(self, gate: Gate) -> Tensor | float:
        scale = self.diagonal * self.scaling
        return scale if gate is None else gate * scale

    def auxiliary_loss(self) -> Tensor:
        """Mean of ||A A^T - I||_F and ||B^T B - I||_F, and over the experts where there are several."""
        return self.auxiliary_total([self])[0]

    @classmethod
    def auxiliary_total(cls, adapters: Sequence[Self]) -> tuple[Tensor, int]:
        """Compute the loss of many adapters with one product for all factors of one shape, and one norm for all."""
        stacks: dict[tuple[int, int], dict[tuple, list[Tensor]]] = {}  # (experts, ranks of one) -> shape -> factors
        for adapter in adapters:
            alike = stacks.setdefault((adapter.experts, adapter.A.shape[0] // adapter.experts), {})
            for factor, wide in ((adapter.A, True), (adapter.B, False)):
                alike.setdefault((factor.shape, wide), []).append(
                    # a factor may be sharded over ranks (FSDP, outside the forward of its block)
                    factor.full_tensor() if hasattr(factor, "full_tensor") else factor
                )
        totals = []
        for (experts, ranks), alike in stacks.items():
            eye = torch.eye(ranks, device=adapters[0].A.device, dtype=adapters[0].A.dtype)
            defects = [
                _GramDefect.apply(_of_experts(torch.stack(factors), experts, wide), eye, wide)
                for (_, wide), factors in alike.items()
            ]
            totals.append(torch.linalg.matrix_norm(torch.cat(defects)).sum() / (2 * experts))
        return functools.reduce(torch.add, totals), len(adapters)

    def count_tokens(self, counts: Tensor) -> None:
        """Add the counts of one training forward: the tokens sent to each expert, then all tokens, [N + 1]."""
        self.tokens = counts if self.tokens is None else self.tokens + counts

    @torch.no_grad()
    def observe_gradients(self) -> None:
        """Update the smoothed sensitivities |w * grad| and their uncertainty; a missing gradient counts as zero."""
        for factor in FACTORS:
            parameter = getattr(self, factor)
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            importance = (parameter * grad).abs()
            if self.per_token and factor == "diagonal" and self.tokens is not None:
                # the share of the tokens that each rank was used for, [R]; without counts a rank is always on
                share = (self.tokens[:-1] / self.tokens[-1].clamp_min(1)).to(parameter)
                share = share.repeat_interleave(len(parameter) // len(share))
                self._smooth(factor, importance / share, shown=share > 0)
            else:
                self._smooth(factor, importance)
        self.tokens = None

    def _smooth(self, factor: str, importance: Tensor, shown: Tensor | None = None) -> None:
        """Update both averages; entries that have not `shown` anything keep theirs."""
        beta1, beta2 = self.smoothing
        sensitivity, uncertainty = getattr(self, f"sensitivity_{factor}"), getattr(self, f"uncertainty_{factor}")
        if shown is not None:  # an average that is fed its own value does not move
            importance = torch.where(shown, importance, sensitivity)
        sensitivity.mul_(beta1).add_(importance, alpha=1 - beta1)
        deviation = (importance - sensitivity).abs()
        if shown is not None:
            deviation = torch.where(shown, deviation, uncertainty)
        uncertainty.mul_(beta2).add_(deviation, alpha=1 - beta2)

    def importance(self) -> Tensor:
        """Score of each rank: its diagonal entry plus the mean over its row of A and its column of B, [R]."""
        scores = {
            factor: getattr(self, f"sensitivity_{factor}") * getattr(self, f"uncertainty_{factor}")
            for factor in FACTORS
        }
        if self.per_token:
            return scores["diagonal"]
        return scores["diagonal"] + scores["A"].mean(1) + scores["B"].mean(0)


def _of_experts(factors: Tensor, experts: int, wide: bool) -> Tensor:
    """n stacked A's [n, N * R, D] as [n * N, R, D] if `wide`, else B's [n, O, N * R] as [n * N, O, R]."""
    if wide:
        return factors.unflatten(1, (experts, -1)).flatten(0, 1)
    return factors.unflatten(2, (experts, -1)).movedim(2, 1).flatten(0, 1)


class _GramDefect(torch.autograd.Function):
    """M M^T - I of wide matrices, M^T M - I of tall ones, [n, R, R]. M enters twice; its gradient is one product."""

    @staticmethod
    def forward(M: Tensor, eye: Tensor, wide: bool) -> Tensor:
        left, right = (M, M.mT) if wide else (M.mT, M)
        with torch.autocast(M.device.type, enabled=False):  # fp32 as the factors are
            return torch.baddbmm(eye, left, right, beta=-1)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        M, _, ctx.wide = inputs
        ctx.save_for_backward(M)

    @staticmethod
    def backward(ctx, grad):
        (M,) = ctx.saved_tensors
        both = grad + grad.mT
        with torch.autocast(M.device.type, enabled=False):  # it may be asked for within a forward
            return (both @ M if ctx.wide else M @ both), None, None
