"""How centres follow the tokens: statistics are staged by one training forward and committed by the next.

Shapes: P projections of all blocks together, D hidden width.
"""

from __future__ import annotations

from typing import Any

import torch

from monkeyjump.config import MonkeyJumpConfig


def is_due(step: Any, config: MonkeyJumpConfig) -> Any:
    """Whether the centres follow what the `step`-th training forward has staged."""
    return (step > 0) & (step % config.ema_interval == 0) & (step <= config.ema_stop)


@torch.no_grad()
def committed(
    centers: torch.Tensor, sums: torch.Tensor, counts: torch.Tensor, step: torch.Tensor, config: MonkeyJumpConfig
) -> torch.Tensor:
    """The centres [P, D] after `step` training forwards, given what the last of them staged.

    c <- beta c + (1 - beta) mean, on every `ema_interval`-th forward up to `ema_stop`; a centre that no token was
    routed to stays. There is no branch on the step, which lives on the device.
    """
    moves = is_due(step, config) & (counts > 0)
    mean = sums / counts.clamp_min(1).unsqueeze(-1)
    return torch.where(moves.unsqueeze(-1), config.ema_momentum * centers + (1 - config.ema_momentum) * mean, centers)
