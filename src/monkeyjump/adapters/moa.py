"""MoA's experts that belong to no single projection (Cao et al., 2025).

The parallel expert is a bottleneck beside a whole feed-forward, added to its output. The prompt lets every query also
attend to a few learned states, behind a gate per head:

    o += tanh(g_h) softmax(q k_p^T / sqrt d) v_p,    k_p, v_p = the frozen key and value projections of the prompt

These gates start at zero, so the start is the identity. The prompt is computed from what the projections return,
without a line of the model's own attention code: the query is taken before any rotary embedding or query norm. In the
authors' LLaMA code the query is rotated and the prompt is not; here the prompt is seen alike from every position.

Shapes: B batch, T tokens, D hidden width, P prompt length, H heads, G key-value heads, d head width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monkeyjump.ops.precision import Fp32Module, fp32_parameter

GAIN = 1e-4  # of the bottleneck's Xavier initialisation, the authors' value: nearly, not exactly, the identity


class ParallelBottleneck(Fp32Module):
    """W_up SiLU(W_down x + b_down) + b_up, stored in fp32 and computed in the dtype of x."""

    def __init__(self, width: int, bottleneck: int) -> None:
        super().__init__()
        self.down = fp32_parameter(bottleneck, width)
        self.down_bias = fp32_parameter(bottleneck)
        self.up = fp32_parameter(width, bottleneck)
        self.up_bias = fp32_parameter(width)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for weight, bias in ((self.down, self.down_bias), (self.up, self.up_bias)):
            nn.init.xavier_uniform_(weight, gain=GAIN)
            nn.init.zeros_(bias)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """gate [..., 1] times the bottleneck of x [..., D]."""
        z = F.silu(F.linear(x, self.down.to(x.dtype), self.down_bias.to(x.dtype)))
        return (gate * F.linear(z, self.up.to(x.dtype), self.up_bias.to(x.dtype))).to(x.dtype)


class AttentionPrompt(Fp32Module):
    """The prompt [P, D] and the gate of each head [H], stored in fp32."""

    def __init__(self, length: int, width: int, heads: int) -> None:
        super().__init__()
        self.prompt = fp32_parameter(length, width)
        self.head_gate = fp32_parameter(heads)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.prompt, std=0.02)
        nn.init.zeros_(self.head_gate)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        """What to add to the input of the output projection, [B, T, H * d].

        q [B, T, H * d]; k, v [P, G * d], projections of the prompt; gate [B, T, 1], the router's.
        """
        H = self.head_gate.shape[0]
        q = q.unflatten(-1, (H, -1))
        groups = k.shape[-1] // q.shape[-1]
        k, v = (t.unflatten(-1, (groups, -1)).repeat_interleave(H // groups, dim=1).to(q.dtype) for t in (k, v))
        precise = torch.promote_types(q.dtype, torch.float32)
        scores = torch.einsum("bthd,phd->bthp", q, k).to(precise) * q.shape[-1] ** -0.5
        attended = torch.einsum("bthp,phd->bthd", torch.softmax(scores, -1).to(q.dtype), v)
        strength = torch.tanh(self.head_gate).unsqueeze(-1) * gate.unsqueeze(-1)  # [B, T, H, 1]
        return (attended * strength).to(q.dtype).flatten(-2)
