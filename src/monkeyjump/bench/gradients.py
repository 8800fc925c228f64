"""Whether two ways to run a step give the same gradients, from the same state."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

State = list[tuple[torch.Tensor, torch.Tensor]]  # a tensor of the model, and what it held


@torch.no_grad()
def snapshot(model: nn.Module) -> State:
    """Everything a step may move: buffers (centres and their statistics) and trainable parameters."""
    tensors = [*model.buffers(), *(parameter for parameter in model.parameters() if parameter.requires_grad)]
    return [(tensor, tensor.detach().clone()) for tensor in tensors]


@torch.no_grad()
def restore(state: State) -> None:
    for tensor, held in state:
        tensor.copy_(held)


def copies(gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    return [gradient.detach().clone() for gradient in gradients if gradient is not None]


def deviation(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest difference of any gradient, relative to the largest entry of that gradient."""
    worst = 0.0
    for a, b in zip(found, expected, strict=True):
        scale = b.abs().max().clamp_min(torch.finfo(torch.float32).tiny)
        worst = max(worst, float((a.float() - b.float()).abs().max() / scale))
    return worst


def faulty(model: nn.Module, inputs: torch.Tensor) -> str | None:
    """What is wrong with the gradients of a step that must reach everything trainable, or None."""
    leaves = {"inputs_embeds": inputs}
    leaves |= {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    missing = [name for name, leaf in leaves.items() if leaf.grad is None]
    broken = [name for name, leaf in leaves.items() if leaf.grad is not None and not bool(leaf.grad.isfinite().all())]
    if not missing and not broken:
        return None
    parts = [f"{len(missing)} without a gradient, e.g. {missing[0]}"] if missing else []
    parts += [f"{len(broken)} whose gradient is not finite, e.g. {broken[0]}"] if broken else []
    return f"of {len(leaves)} tensors that need gradients: {'; '.join(parts)}"
