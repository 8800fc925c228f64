"""MoRE's selector: how many of an adapter's ranks a task uses (Zhang et al., 2025).

Expert j of an adapter is its first j ranks. A table holds one embedding per task; a linear layer with softmax turns it
into a probability for every j; the largest one is used. Nothing here looks at values on the host, and a batch may
mix tasks.

Shapes: K tasks, R ranks, W width of a task embedding; `...`: any leading shape.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monkeyjump.ops.precision import Fp32Module, fp32_parameter

TEMPERATURE = 0.05  # of the cosines in the task loss, the authors' value
EMBEDDING_STD = 0.01


def rank_weights(r: int, rank_scale: str, device: torch.device | None = None) -> Tensor:
    """Weight of each rank, fp32 [R]. `code`: the authors scale row i of A and column i of B by i/r each."""
    share = torch.arange(1, r + 1, dtype=torch.float32, device=device) / r  # made on the device: a copy would wait
    return {"code": share.square(), "linear": share, "none": torch.ones_like(share)}[rank_scale]


class RankSelector(Fp32Module):
    """Task embeddings [K, W] and the layer that chooses a number of ranks for each; kept and computed in fp32."""

    def __init__(self, tasks: int, width: int, r: int, rank_scale: str) -> None:
        super().__init__()
        self.tasks, self.weight, self.bias = fp32_parameter(tasks, width), fp32_parameter(r, width), fp32_parameter(r)
        self.rank_scale = rank_scale
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.tasks, std=EMBEDDING_STD)
        nn.init.kaiming_uniform_(self.weight, nonlinearity="relu")
        nn.init.zeros_(self.bias)

    def probabilities(self) -> Tensor:
        """p(j | task) for j = 1..R, [K, R]."""
        return torch.softmax(F.linear(self.tasks, self.weight, self.bias), dim=-1)

    def ranks(self) -> Tensor:
        """How many ranks each task uses now, int64 [K], in 1..R."""
        return self.probabilities().argmax(-1) + 1

    def gates(self) -> Tensor:
        """The factor on every rank for every task, [K, R]: the rank's weight on the first j ranks, 0 on the others.

        The estimator is straight-through: the value is that of the chosen j alone, the gradient that of
        sum_j p_j (first j ranks), so every probability learns from what its ranks would have added.
        """
        p = self.probabilities()
        r = p.shape[-1]
        chosen = p.argmax(-1, keepdim=True) == torch.arange(r, device=p.device)
        one_hot = chosen.to(p.dtype) + (p - p.detach())
        used = one_hot.flip(-1).cumsum(-1).flip(-1)  # rank i is used by every j >= i
        return used * rank_weights(r, self.rank_scale, p.device)

    def forward(self, task_ids: Tensor) -> Tensor:
        """int64 [...] tasks to the factor on every rank, [..., R]."""
        return self.gates()[task_ids]

    def task_logits(self, h: Tensor) -> Tensor:
        """Cosine of a pooled state h [..., W] with every task embedding, over the temperature: [..., K]."""
        return F.normalize(h.to(self.tasks.dtype), dim=-1) @ F.normalize(self.tasks, dim=-1).T / TEMPERATURE

    def extra_repr(self) -> str:
        return f"tasks={self.tasks.shape[0]}, width={self.tasks.shape[1]}, r={self.bias.shape[0]}"
