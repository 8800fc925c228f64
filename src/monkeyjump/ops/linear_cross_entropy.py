"""Cross-entropy of a frozen linear head that never holds all logits [N, V], only a chunk of their rows at a time.

With a frozen head only the hidden states need a gradient, and it is known as soon as the logits of a row are. So
forward keeps that gradient ([N, D]) in place of the logits.

Shapes: N tokens, D hidden width, V vocabulary, C rows of a chunk.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORE = -100  # the target that counts for nothing
CHUNK_ELEMENTS = 2**25  # C * V: 128 MiB of fp32 logits at once


class _LinearCrossEntropy(torch.autograd.Function):
    """`scale` times the sum of the losses, fp32."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, scale, rows):
        kept = targets != IGNORE
        safe = targets.masked_fill(~kept, 0)
        factor = kept * scale  # [N], fp32
        total = hidden.new_zeros((), dtype=torch.float32)
        grad = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for start in range(0, hidden.shape[0], rows):
            part = slice(start, start + rows)
            where, weighted = safe[part].unsqueeze(1), factor[part].unsqueeze(1)
            # The model would return logits in its own dtype, so they are rounded to it first.
            logits = F.linear(hidden[part], weight, bias).float()
            log_sum = logits.logsumexp(1, keepdim=True)
            total = total + ((log_sum - logits.gather(1, where)) * weighted).sum()
            if grad is not None:
                # d loss / d logits = softmax - one hot, computed in place: the logits are not needed again
                d_logits = logits.sub_(log_sum).exp_()
                d_logits.scatter_(1, where, d_logits.gather(1, where) - 1).mul_(weighted)
                torch.matmul(d_logits.to(hidden.dtype), weight, out=grad[part])
        if grad is not None:
            ctx.save_for_backward(grad)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, incoming):
        (grad,) = ctx.saved_tensors
        return (grad.to(incoming.dtype) * incoming).to(grad.dtype), None, None, None, None, None


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    divisor: Tensor | float | None = None,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> Tensor:
    """`F.cross_entropy((hidden @ weight.T + bias).float(), targets)`: the sum over `divisor`; None: the mean.

    hidden [N, D]; weight [V, D] and bias [V], frozen; targets [N], -100 to leave a row out. No host synchronisation.
    """
    if weight.requires_grad or (bias is not None and bias.requires_grad):
        raise ValueError("linear_cross_entropy computes no gradient of the head: it must be frozen.")
    if divisor is None:
        divisor = (targets != IGNORE).sum()
    if not isinstance(divisor, Tensor):
        divisor = torch.full((), float(divisor), device=hidden.device)  # filled on the device, not copied from the host
    scale = divisor.to(hidden.device).float().reciprocal()
    rows = max(1, chunk_elements // weight.shape[0])
    return _LinearCrossEntropy.apply(hidden, weight, bias, targets, scale, rows)
