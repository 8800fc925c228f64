"""Linear probes: how well a task can be read from one state of a prompt, by its place and by the way it is pooled."""

from __future__ import annotations

import torch
from torch import Tensor, nn

FROM_END = (1, 10, 20, 30)  # the tokens of a prompt that are probed, counted from its end
POOLINGS = (*(f"{place} from end" for place in FROM_END), "mean", "max", "attention")


def pooled(h: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """One state for each row of h [B, T, D] in each of the ways of POOLINGS; rows shorter than asked give their first.

    The attention is that of the last token: RMS-normalised states weigh the others by the scaled product with it.
    """
    rows, count = torch.arange(len(h), device=h.device), mask.sum(1)
    place = torch.where(mask, torch.arange(h.shape[1], device=h.device), -1)
    order = place.sort(1, descending=True).values  # the real tokens, the last first
    found = {
        f"{n} from end": h[rows, order[rows, torch.clamp(torch.full_like(count, n), max=count) - 1]] for n in FROM_END
    }
    real = mask.unsqueeze(-1)
    found["mean"] = h.masked_fill(~real, 0.0).sum(1) / count.unsqueeze(1)
    found["max"] = h.masked_fill(~real, -torch.inf).amax(1)
    unit = nn.functional.normalize(h, dim=-1)
    last = nn.functional.normalize(found["1 from end"], dim=-1)
    scores = h.shape[-1] ** 0.5 * torch.einsum("btd,bd->bt", unit, last)
    weights = scores.masked_fill(~mask, -torch.inf).softmax(1)
    found["attention"] = torch.einsum("bt,btd->bd", weights, h.masked_fill(~real, 0.0))
    return {name: found[name] for name in POOLINGS}
