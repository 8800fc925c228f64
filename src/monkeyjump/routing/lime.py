"""LiME's router, which has no parameters: the first E outputs of a projection and of its delta are the logits.

The authors divide both by their largest magnitude in the whole tensor, so that the routing of a token depends on its
batch, on padding and on the cache. Here the largest is that of the token itself.

Shapes: D input width, E experts; `...`: any leading shape.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from monkeyjump.config import MonkeyJumpConfig
from monkeyjump.ops import reference as ops
from monkeyjump.ops.router_logits import router_linear
from monkeyjump.routing.learned import LearnedDecision, around_one

if TYPE_CHECKING:
    from monkeyjump.adapters.base import BaseLinear
    from monkeyjump.adapters.lime import LimeAdapter


class LimeRouter(nn.Module):
    """Looks at the projection that it stands beside. It holds nothing, so nothing of it is saved."""

    def __init__(self, linear: BaseLinear, adapter: LimeAdapter, config: MonkeyJumpConfig) -> None:
        super().__init__()
        self.config, self.width, self.experts = config, linear.in_features, adapter.experts
        vars(self)["beside"] = linear, adapter  # not as modules: they belong to their layer

    def one_product(self) -> bool:
        return False

    def forward(self, x: Tensor) -> LearnedDecision:
        """The decision for x [..., D]."""
        linear, adapter = vars(self)["beside"]
        with torch.autocast(x.device.type, enabled=False):
            weight, bias = linear.weight()[: self.experts], linear.bias()
            read = router_linear(x, torch.cat([weight.float(), adapter.A]))  # x is read once, and kept as it came
            frozen, z = read.split([self.experts, adapter.A.shape[0]], -1)
            frozen = frozen if bias is None else frozen + bias[: self.experts].float()
            return decide(frozen, adapter.first_outputs(z), self.config, self.training)


def decide(frozen: Tensor, delta: Tensor, config: MonkeyJumpConfig, training: bool) -> LearnedDecision:
    """The decision from the first E outputs [..., E] of the frozen projection and of its delta."""
    options = config.lime
    logits = (1 - options.gamma) * _scaled(frozen) + options.gamma * _scaled(delta)
    if training and config.jitter > 0:
        logits = logits * around_one(logits, config.jitter)
    p = torch.softmax(logits / config.temperature, dim=-1)
    if config.top_k is None:
        margin = p - options.theta * p.amax(-1, keepdim=True)
        gates, chosen = p * torch.sigmoid(margin / options.softness), margin >= 0
    else:
        chosen = ops.top_k_mask(logits, config.top_k)
        gates = p * chosen
    return LearnedDecision(gates / gates.sum(-1, keepdim=True), p, chosen)


def _scaled(outputs: Tensor) -> Tensor:
    return outputs / outputs.abs().amax(-1, keepdim=True).clamp_min(ops.EPS)
