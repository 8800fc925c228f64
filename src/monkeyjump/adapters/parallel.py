"""MoA's parallel expert: a bottleneck beside a whole feed-forward, added to its output (Cao et al., 2025)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monkeyjump.ops.precision import at_least_fp32

GAIN = 1e-4  # of the Xavier initialisation, the authors' value: nearly, not exactly, the identity


class ParallelBottleneck(nn.Module):
    """W_up SiLU(W_down x + b_down) + b_up, stored in fp32 and computed in the dtype of x."""

    def __init__(self, width: int, bottleneck: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.empty(bottleneck, width, dtype=torch.float32))
        self.down_bias = nn.Parameter(torch.empty(bottleneck, dtype=torch.float32))
        self.up = nn.Parameter(torch.empty(width, bottleneck, dtype=torch.float32))
        self.up_bias = nn.Parameter(torch.empty(width, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for weight, bias in ((self.down, self.down_bias), (self.up, self.up_bias)):
            nn.init.xavier_uniform_(weight, gain=GAIN)
            nn.init.zeros_(bias)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """gate [..., 1] times the bottleneck of x [..., D]."""
        z = F.silu(F.linear(x, self.down.to(x.dtype), self.down_bias.to(x.dtype)))
        return (gate * F.linear(z, self.up.to(x.dtype), self.up_bias.to(x.dtype))).to(x.dtype)

    def _apply(self, fn, recurse=True):
        return super()._apply(at_least_fp32(fn), recurse)
