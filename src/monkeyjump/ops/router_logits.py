"""The logits of learned routers: x W^T in fp32 for an x of lower precision, without a wide copy of x.

The kernels multiply x with both bf16 halves of W, and the gradient of W with both halves of the logits' gradient. As in
`gated_lora`, eager mode launches them from the autograd function and torch.compile sees registered ops.
`precise_linear` does compiled inference and everything that the kernels do not know.

Shapes: N tokens, D width of the input, M routers that read it, E experts; `...`: any leading shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from monkeyjump.ops import dispatch
from monkeyjump.ops.lowrank import rows_of
from monkeyjump.ops.precision import precise_linear
from monkeyjump.ops.registration import registered, shapes_of

MOST_COLUMNS = 64  # columns of all weights together; for more a matrix product is as fast


def router_logits(x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """x W^T of M weights W [E, D], [..., M, E]; in one pass over x [..., D] where the kernels run."""
    if not _for_kernels(x, weights):
        return torch.stack([precise_linear(x, weight) for weight in weights], -2)
    return _Logits.apply(x, *weights).view(*x.shape[:-1], len(weights), -1)


def router_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b of one small W, in its dtype."""
    if not _for_kernels(x, [weight]):
        return precise_linear(x, weight, bias)
    out = router_logits(x, [weight]).squeeze(-2)
    return out if bias is None else out + bias


def _for_kernels(x: Tensor, weights: Sequence[Tensor]) -> bool:
    if torch.compiler.is_compiling() and not torch.is_grad_enabled():
        return False
    if any(weight.dtype != torch.float32 for weight in weights):
        return False
    few = len(weights) * weights[0].shape[0] <= MOST_COLUMNS
    return few and x.device == weights[0].device and x.numel() > 0 and dispatch.uses_kernels(x)


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        rows = rows_of(x)
        ctx.save_for_backward(rows, *weights)
        ctx.shape = x.shape
        return (logits_op if torch.compiler.is_compiling() else logits)(rows, list(weights))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        rows, *weights = ctx.saved_tensors
        with_dx, backward = ctx.needs_input_grad[0], logits_backward
        if torch.compiler.is_compiling():
            backward = logits_backward_op
        dx, dW = backward(rows, grad, weights, with_dx)
        return dx.view(ctx.shape) if with_dx else None, *dW.split(weights[0].shape[0])


def logits(x: Tensor, weights: list[Tensor]) -> Tensor:
    """x W^T of every W side by side: [N, M * E], fp32."""
    from monkeyjump.ops.kernels import lora  # only where Triton is installed

    return lora.down(x.contiguous(), [weight.contiguous() for weight in weights], None, precise=True)


logits_op = registered("router_logits")(logits)


@shapes_of(logits_op)
def _(x, weights):
    return x.new_empty(x.shape[0], len(weights) * weights[0].shape[0], dtype=torch.float32)


def logits_backward(x: Tensor, grad: Tensor, weights: list[Tensor], with_dx: bool) -> tuple[Tensor, Tensor]:
    """(dx [N, D], empty without `with_dx`; dW [M * E, D])."""
    from monkeyjump.ops.kernels import lora
    from monkeyjump.ops.kernels.partial_sums import total

    dx, dense = x.new_empty(x.shape) if with_dx else None, [weight.contiguous() for weight in weights]
    parts = lora.down_backward(x.contiguous(), grad.contiguous(), dense, None, dx, precise=True)
    return x.new_empty(0) if dx is None else dx, total(parts).view(-1, x.shape[1])


logits_backward_op = registered("router_logits_backward")(logits_backward)


@shapes_of(logits_backward_op)
def _(x, grad, weights, with_dx):
    dW = x.new_empty(len(weights) * weights[0].shape[0], x.shape[1], dtype=torch.float32)
    return x.new_empty(x.shape) if with_dx else x.new_empty(0), dW
