"""Parameters that stay in fp32 whatever the model is cast to, and products with them."""

from __future__ import annotations

from collections.abc import Callable

import torch


def at_least_fp32(fn: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Let `model.to(...)` move a tensor, but never round it below fp32 (adapters and routers are stored in fp32)."""

    def apply(tensor: torch.Tensor) -> torch.Tensor:
        result = fn(tensor)
        if result.is_floating_point() and result.dtype not in (torch.float32, torch.float64):
            return tensor.to(result.device)
        return result

    return apply


class PreciseLinear(torch.autograd.Function):
    """x W^T in the dtype of W (fp32) for an x of lower precision; backward keeps x as it came, not a wide copy."""

    @staticmethod
    def forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x.to(weight.dtype), weight)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad_x = (grad @ weight).to(x.dtype) if ctx.needs_input_grad[0] else None
        grad_weight = grad.flatten(0, -2).T @ x.flatten(0, -2).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight


def precise_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T + b, computed and returned in the dtype of W."""
    if x.dtype == weight.dtype:
        return torch.nn.functional.linear(x, weight, bias)
    out = PreciseLinear.apply(x, weight)
    return out if bias is None else out + bias
