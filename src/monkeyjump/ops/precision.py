"""Parameters that stay in fp32 whatever the model is cast to, and products with them."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Fp32Module(nn.Module):
    """A module whose tensors `model.to(...)` moves but never rounds below fp32: adapters and routers are stored so."""

    def _apply(self, fn, recurse=True):
        def move(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            narrow = result.is_floating_point() and result.dtype not in (torch.float32, torch.float64)
            return tensor.to(result.device) if narrow else result

        return super()._apply(move, recurse)


def fp32_parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=torch.float32))


class PreciseLinear(torch.autograd.Function):
    """x W^T in the dtype of W (fp32) for an x of lower precision; backward keeps x as it came, not a wide copy."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
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


def precise_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b, computed and returned in the dtype of W."""
    if x.dtype == weight.dtype:
        return torch.nn.functional.linear(x, weight, bias)
    out = PreciseLinear.apply(x, weight)
    return out if bias is None else out + bias
