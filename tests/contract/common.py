"""What the contract tests share beyond `tests/helpers.py`: whole adapter states, outputs, a training loop."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.helpers import lm_batch, token_ids

HOOKS = [
    name
    for name in vars(nn.Module())
    if name.endswith("hooks") or name.endswith("hooks_with_kwargs") or name.endswith("hooks_always_called")
]


def anatomy(model: nn.Module) -> dict[str, tuple]:
    """Everything about every module that an adapter could have changed."""
    return {
        path: (
            type(module),
            sorted(vars(module)),
            sorted(module._parameters),
            sorted(module._buffers),
            sorted(module._modules),
            {name: len(getattr(module, name)) for name in HOOKS},
            module.training,
        )
        for path, module in model.named_modules()
    }


def state_of(model: nn.Module, adapter: str = "default") -> dict[str, torch.Tensor]:
    """A copy of everything that belongs to an adapter: weights, centres, staged statistics, counters."""
    return {
        key: value.detach().clone()
        for key, value in model.state_dict().items()
        if ".monkeyjump_" in key and (key.endswith(f".{adapter}") or f".{adapter}." in key)
    }


def centers_of(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: value for key, value in state.items() if "monkeyjump_center" in key}


@torch.no_grad()
def logits(model: nn.Module, seed: int = 0, **extra: Any) -> torch.Tensor:
    return model(input_ids=token_ids(seed=seed), **extra).logits


def train(model: nn.Module, steps: int = 4, learning_rate: float = 1e-2, **extra: Any) -> list[float]:
    """A plain loop over random batches on whatever is trainable; the losses."""
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=learning_rate)
    losses = []
    for step in range(steps):
        loss = model(**lm_batch(seed=step), **extra).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    return losses
