"""The contrastive loss of MoELoRA, in a form of ours: the paper's formula, temperature and weight could not be read.

Outputs of one expert are each other's positives, outputs of the others their negatives (InfoNCE). At most `SAMPLE`
outputs of a router enter, since every pair is compared.

Shapes: S sampled tokens, N experts, O output width.
"""

from __future__ import annotations

import torch
from torch import Tensor

SAMPLE = 256  # expert outputs compared per router
TEMPERATURE = 0.1
EPS = 1e-4  # length below which an output has no direction: all of them at the start, where B is zero


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
