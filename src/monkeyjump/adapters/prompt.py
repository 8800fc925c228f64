"""MoA's prompt expert: every query also attends to a few learned states, behind a gate per head (Cao et al., 2025).

    o += tanh(g_h) softmax(q k_p^T / sqrt d) v_p,    k_p, v_p = the frozen key and value projections of the prompt

The gates start at zero, so the start is the identity. Computed from what the projections return, without a line of the
model's own attention code: the query is taken before any rotary embedding or query norm. In the authors' LLaMA code the
query is rotated and the prompt is not; here the prompt is seen alike from every position.

Shapes: B batch, T tokens, D hidden width, P prompt length, H heads, G key-value heads, d head width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from monkeyjump.ops.precision import at_least_fp32


class AttentionPrompt(nn.Module):
    """The prompt [P, D] and the gate of each head [H], stored in fp32."""

    def __init__(self, length: int, width: int, heads: int) -> None:
        super().__init__()
        self.prompt = nn.Parameter(torch.empty(length, width, dtype=torch.float32))
        self.head_gate = nn.Parameter(torch.empty(heads, dtype=torch.float32))
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

    def _apply(self, fn, recurse=True):
        return super()._apply(at_least_fp32(fn), recurse)
