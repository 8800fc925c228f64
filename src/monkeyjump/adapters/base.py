"""What every adapter is: one small module that adds its part to the output of one frozen linear."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import nn

from monkeyjump.config import MonkeyJumpConfig
from monkeyjump.registry import Registry

# Gates reach an adapter as None (always on) or as a tensor that broadcasts against [..., 1].
Gate = torch.Tensor | None


def at_least_fp32(fn: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Let `model.to(...)` move a tensor, but never round it below fp32 (adapters and centres are stored in fp32)."""

    def apply(tensor: torch.Tensor) -> torch.Tensor:
        result = fn(tensor)
        if result.is_floating_point() and result.dtype not in (torch.float32, torch.float64):
            return tensor.to(result.device)
        return result

    return apply


class Adapter(nn.Module):
    """The delta of one expert on one projection.

    A subclass creates its tensors in `__init__` (fp32; a frozen one as a persistent buffer) and fills them in
    `reset_parameters` so that the delta is zero: every adapter starts as the identity.
    """

    name: ClassVar[str]

    def __init__(self, in_features: int, out_features: int, config: MonkeyJumpConfig) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features

    def reset_parameters(self) -> None:
        raise NotImplementedError

    def delta(self, x: torch.Tensor, base: torch.Tensor, gate: Gate) -> torch.Tensor:
        """What to add to `base`, the frozen output for input `x`, in the dtype of the computation."""
        raise NotImplementedError

    def forward(self, x: torch.Tensor, base: torch.Tensor, out: torch.Tensor, gate: Gate) -> torch.Tensor:
        """`out` (the base output plus earlier adapters) with this adapter's part added, in the dtype of `out`."""
        return out + self.delta(x, base, gate).to(out.dtype)

    def merged(
        self, weight: torch.Tensor, bias: torch.Tensor | None, sign: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`weight` [O, D] and `bias` of the base with the always-on adapter folded in (sign +1) or taken out (-1)."""
        raise NotImplementedError

    def auxiliary_loss(self) -> torch.Tensor | None:
        """A regulariser on this adapter's own tensors, unweighted, or None."""
        return None

    def _apply(self, fn, recurse=True):
        return super()._apply(at_least_fp32(fn), recurse)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


ADAPTERS: Registry[type[Adapter]] = Registry("adapter")


def register(cls: type[Adapter]) -> type[Adapter]:
    return ADAPTERS.add(cls.name, cls)
