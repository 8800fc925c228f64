"""Learned routers: a softmax over experts (MoELoRA, HydraLoRA, MoLA) or one sigmoid gate each (MoA).

Routers are stored and computed in fp32 whatever the model's dtype; gradients flow to the router and to its input.

Shapes: D width of the input, N experts, H hidden width, S sampled tokens, O output width; `...`: any leading shape.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from monkeyjump.config import MonkeyJumpConfig
from monkeyjump.ops import reference as ops
from monkeyjump.ops.precision import Fp32Module, fp32_parameter
from monkeyjump.ops.router_logits import router_linear, router_logits

# The contrastive loss of MoELoRA is in a form of ours (InfoNCE): the paper's formula, temperature and weight could not
# be read. Outputs of one expert are each other's positives, outputs of the others their negatives.
SAMPLE = 256  # expert outputs compared per router, since every pair is compared
TEMPERATURE = 0.1
EPS = 1e-4  # length below which an output has no direction: all of them at the start, where B is zero


@dataclass
class LearnedDecision:
    gates: Tensor  # [..., N], zero on experts that are not used
    probabilities: Tensor  # [..., N], before anything was dropped
    chosen: Tensor  # [..., N] bool
    per_token: int | None = None  # experts that every token uses; None where that depends on the token


class LearnedRouter(Fp32Module):
    """Gates of N experts for every token it is shown.

    router="linear": softmax(W x), no bias. router="sigmoid": sigmoid of W x + b, or of a SwiGLU layer of width 4 N
    (`router_hidden="swiglu"`); with `threshold`, an expert counts only where its gate reaches
    threshold * sigmoid(v x + c), a bar that the token sets itself.
    """

    def __init__(self, width: int, experts: int, config: MonkeyJumpConfig) -> None:
        super().__init__()
        self.config = config
        self.width, self.experts = width, experts
        self.sigmoid = config.router == "sigmoid"
        hidden = 4 * experts if config.sigmoid.router_hidden == "swiglu" else None
        self.weight = fp32_parameter(experts, width if hidden is None else hidden)
        self.bias = fp32_parameter(experts) if self.sigmoid else None
        if hidden is not None:
            self.hidden_gate, self.hidden_gate_bias = fp32_parameter(hidden, width), fp32_parameter(hidden)
            self.hidden_up, self.hidden_up_bias = fp32_parameter(hidden, width), fp32_parameter(hidden)
        if config.sigmoid.threshold is not None:
            self.threshold, self.threshold_bias = fp32_parameter(1, width), fp32_parameter(1)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weights at random: with zeros, equal experts would get equal gradients and stay equal."""
        for parameter in self.parameters():
            if parameter.dim() == 1:
                nn.init.zeros_(parameter)
            elif self.config.learned.router_init == "kaiming":
                nn.init.kaiming_uniform_(parameter, a=math.sqrt(5))
            else:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x: Tensor, logits: Tensor | None = None) -> LearnedDecision:
        """The decision for x [..., D]; for `logits` that `decide_together` has made, if given."""
        config, noise = self.config, self._noise()
        with torch.autocast(x.device.type, enabled=False):
            if noise == "input_mul":  # x becomes a copy, since the experts get the input as it is
                x = x * around_one(x, config.jitter)
            logits = self.logits(x) if logits is None else logits
            if noise == "logit_mul":
                logits = logits * around_one(logits, config.jitter)
            elif noise == "gaussian":
                logits = logits + config.jitter * torch.randn_like(logits)
            return self.decide(x, logits)

    def logits(self, x: Tensor) -> Tensor:
        if self.config.sigmoid.router_hidden == "swiglu":
            gate = router_linear(x, self.hidden_gate, self.hidden_gate_bias)
            x = nn.functional.silu(gate) * router_linear(x, self.hidden_up, self.hidden_up_bias)
        return router_linear(x, self.weight, self.bias)

    def one_product(self) -> bool:
        """Whether W x is all that this router needs of the x that other routers see, too."""
        config = self.config
        plain = self.bias is None and config.sigmoid.router_hidden != "swiglu" and config.sigmoid.threshold is None
        return plain and self._noise() is None

    def _noise(self) -> str | None:
        return self.config.learned.noise if self.training and self.config.jitter > 0 else None

    def decide(self, x: Tensor, logits: Tensor) -> LearnedDecision:
        config = self.config
        scaled = logits if config.temperature == 1 else logits / config.temperature
        p = torch.sigmoid(scaled) if self.sigmoid else torch.softmax(scaled, dim=-1)
        chosen = ops.top_k_mask(logits, config.top_k)
        gates = p * chosen
        if config.sigmoid.threshold is not None:
            bar = config.sigmoid.threshold * torch.sigmoid(router_linear(x, self.threshold, self.threshold_bias))
            chosen = chosen & (p >= bar)
            gates = above_threshold(p, bar, chosen, config.sigmoid.threshold_grad)
        if config.renormalize:
            gates = gates / gates.sum(-1, keepdim=True).clamp_min(ops.EPS)
        per_token = min(config.top_k or self.experts, self.experts) if config.sigmoid.threshold is None else None
        return LearnedDecision(gates, p, chosen, per_token)

    def extra_repr(self) -> str:
        return f"{self.config.router}, width={self.width}, experts={self.experts}"


def decide_together(routers: Sequence[LearnedRouter], x: Tensor) -> LearnedDecision | None:
    """The decisions of M routers that read the same x, [..., M, N] each; None where every router has to decide alone.

    Each step is then one kernel for all of them, forward and backward.
    """
    if len(routers) == 1 or not all(router.one_product() for router in routers):
        return None
    if len({router.weight.shape for router in routers}) > 1:
        return None
    with torch.autocast(x.device.type, enabled=False):
        logits = router_logits(x, [router.weight for router in routers])
    return routers[0](x, logits)  # which differs from the others in its weight alone


def above_threshold(p: Tensor, bar: Tensor, chosen: Tensor, gradient: str) -> Tensor:
    """The gates of the experts that reach the bar.

    none: p there, 0 elsewhere; the bar has gradient 0, as in the authors' code. ste: the same values, with the step
    replaced by its argument in backward. subtract: p - bar, so the gate opens without a jump.
    """
    if gradient == "subtract":
        return (p - bar) * chosen
    if gradient == "ste":
        margin = p - bar
        return p * (chosen + (margin - margin.detach()))
    return p * chosen + 0.0 * bar  # keeps the parameters of the bar in the graph, for distributed training


def load_and_probability(decision: LearnedDecision, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Share of the assignments that each expert got (sum 1, no gradient) and its mean probability, over real tokens.

    [N] each, or [M * N] for a decision [..., M * N] of M routers, which must be known `per_token`.
    """
    chosen = decision.chosen.detach().flatten(0, -2).float()
    p = decision.probabilities.flatten(0, -2)
    tokens: Tensor | int = p.shape[0]
    if mask is not None:
        real = mask.flatten().unsqueeze(-1)
        chosen, p, tokens = chosen * real, p.masked_fill(~real, 0.0), real.sum().clamp_min(1)
    number = chosen.sum(0)
    total = number.sum().clamp_min(1) if decision.per_token is None else decision.per_token * tokens
    return number / total, p.sum(0) / tokens


def balance_loss(load: Tensor, probability: Tensor, top_k: int, norm: str) -> Tensor:
    """N * sum_n f_n P_n. An even load gives 1 (switch), or top_k where f counts every slot by itself (mixtral).

    squared (LiME): N * sum_n P_n^2 - 1, and a tenth of the divergence of P from even shares; 0 for an even load.
    """
    if norm == "squared":
        p = probability / probability.sum(-1, keepdim=True)
        uneven = p.shape[-1] * p.square().sum(-1) - 1
        return uneven + 0.1 * (p * (p * p.shape[-1]).clamp_min(1e-12).log()).sum(-1)
    loss = load.shape[-1] * (load * probability).sum(-1)
    return loss * top_k if norm == "mixtral" else loss


def around_one(like: Tensor, width: float) -> Tensor:
    return torch.empty_like(like).uniform_(1 - width, 1 + width)


def sample_tokens(tokens: int, experts: int, mask: Tensor | None, device: torch.device) -> Tensor | None:
    """Random positions among the flattened real tokens, [S]; None where all of them are few enough."""
    wanted = max(2, SAMPLE // experts)
    if tokens <= wanted:
        return None
    keys = torch.rand(tokens, device=device)
    if mask is not None:
        keys = keys + mask.flatten()
    return keys.topk(wanted).indices


def contrastive_loss(outputs: Tensor, used: Tensor) -> Tensor:
    """outputs [S, N, O] and whether each was used, [S, N]: the mean over used outputs that have a positive."""
    experts = outputs.shape[1]
    flat = outputs.flatten(0, 1).float()
    unit = flat / (flat.square().sum(-1, keepdim=True) + EPS**2).sqrt()
    used = used.flatten()
    expert = torch.arange(experts, device=flat.device).repeat(outputs.shape[0])
    other = ~torch.eye(flat.shape[0], dtype=torch.bool, device=flat.device) & used
    logits = (unit @ unit.T / TEMPERATURE).masked_fill(~other, -1e9)
    positive = other & (expert.unsqueeze(0) == expert.unsqueeze(1))
    positives = positive.sum(-1)
    log_p = (torch.log_softmax(logits, dim=-1) * positive).sum(-1) / positives.clamp_min(1)
    anchors = used & (positives > 0)
    return -(log_p * anchors).sum() / anchors.sum().clamp_min(1)
