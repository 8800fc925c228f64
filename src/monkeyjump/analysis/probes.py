"""Linear probes: how well a task can be read from one state of a prompt, by its place and by the way it is pooled."""

from __future__ import annotations

import math
import warnings
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from monkeyjump.analysis.style import COLORS, GREY, Drawing, grid, label, name_ticks

if TYPE_CHECKING:
    from monkeyjump.analysis.collect import Collection

FROM_END = (1, 10, 20, 30)  # the tokens of a prompt that are probed, counted from its end
POOLINGS = (*(f"{place} from end" for place in FROM_END), "mean", "max", "attention")
FOLDS = 5


def pooled(h: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """One state for each row of h [B, T, D] in each of the ways of POOLINGS; rows shorter than asked give their first.

    The attention is that of the last token: RMS-normalised states weigh the others by the scaled product with it.
    """
    rows, count = torch.arange(len(h), device=h.device), mask.sum(1)
    place = torch.where(mask, torch.arange(h.shape[1], device=h.device), -1)
    order = place.sort(1, descending=True).values  # the real tokens, the last first
    found = {f"{n} from end": h[rows, order[rows, count.clamp(max=n) - 1]] for n in FROM_END}
    real = mask.unsqueeze(-1)
    found["mean"] = h.masked_fill(~real, 0.0).sum(1) / count.unsqueeze(1)
    found["max"] = h.masked_fill(~real, -torch.inf).amax(1)
    unit = nn.functional.normalize(h, dim=-1)
    last = nn.functional.normalize(found["1 from end"], dim=-1)
    scores = h.shape[-1] ** 0.5 * torch.einsum("btd,bd->bt", unit, last)
    weights = scores.masked_fill(~mask, -torch.inf).softmax(1)
    found["attention"] = torch.einsum("bt,btd->bd", weights, h.masked_fill(~real, 0.0))
    return {name: found[name] for name in POOLINGS}


def probe(states: Tensor, classes: Tensor, seed: int = 0) -> tuple[float, float]:
    """Held-out accuracy of a linear classifier, mean and standard error over folds.

    Classes of fewer rows than folds are left out; it is NaN where less than two remain. The classifier is ridge
    regression on standardised features; its penalty is chosen on the training folds alone.
    """
    from sklearn.linear_model import RidgeClassifierCV
    from sklearn.model_selection import StratifiedKFold, cross_val_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    enough = classes.bincount()[classes] >= FOLDS
    states, classes = states[enough], classes[enough]
    if len(classes.unique()) < 2:
        return math.nan, math.nan
    model = make_pipeline(StandardScaler(), RidgeClassifierCV(alphas=np.logspace(0, 5, 6)))
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=seed)
    with warnings.catch_warnings():  # numbers of ill-conditioned states; the score says all there is to say
        warnings.simplefilter("ignore")
        scores = cross_val_score(model, states.double().numpy(), classes.numpy(), cv=folds)
    return float(scores.mean()), float(scores.std(ddof=1) / math.sqrt(FOLDS))


def probe_all(collection: Collection) -> list[list[Any]]:
    """Rows of block, pooling, accuracy and its error; none where there is a single task or too few rows."""
    return [
        [block, pooling, *scores]
        for block, found in collection.probes.items()
        for pooling, states in found.items()
        if not math.isnan((scores := probe(states, collection.probe_tasks))[0])
    ]


def draw_probes(collection: Collection, rows: list[list[Any]]) -> Drawing:
    blocks = list(dict.fromkeys(row[0] for row in rows))
    figure, axes = grid(len(blocks), 3.2, 3.0, "Which task a prompt is of, read by a linear probe")
    chance = int(collection.probe_tasks.bincount().max()) / len(collection.probe_tasks)
    for axis, block in zip(axes, blocks, strict=True):
        own = [row for row in rows if row[0] == block]
        colors = [COLORS[0] if "end" in row[1] else COLORS[1] for row in own]
        errors = [row[3] for row in own]
        axis.bar(range(len(own)), [row[2] for row in own], yerr=errors, color=colors, error_kw={"linewidth": 1})
        axis.axhline(chance, color=GREY, linestyle="--", linewidth=1, label="most frequent task")
        axis.set_ylim(0, 1.25)
        axis.set_yticks(np.linspace(0, 1, 6))
        label(axis, f"block {block}", y="held-out accuracy", legend=True)
        name_ticks(axis, "x", [row[1] for row in own])
    columns, data = ["block", "state", "accuracy", "standard error"], {"chance": chance}
    return Drawing("probes", figure, columns, rows, [information_by_position(rows)], data, {"folds": FOLDS})


def information_by_position(rows: list[list[Any]]) -> str:
    """Whether later tokens tell more, as the paper's theorem has it, and whether pooled states tell less."""
    blocks = list(dict.fromkeys(row[0] for row in rows))
    by = {(block, pooling): (accuracy, error) for block, pooling, accuracy, error in rows}
    rising = below = 0
    for block in blocks:
        places = [by[block, f"{place} from end"] for place in FROM_END]
        rising += all(late + 2 * (e + f) >= early for (late, e), (early, f) in pairwise(places))
        mean, error = by[block, "mean"]
        below += mean > places[0][0] + 2 * (error + places[0][1])
    return (
        f"Later tokens tell at least as much as earlier ones in {rising} of {len(blocks)} probed blocks, within two "
        f"standard errors; the mean of all tokens tells more than the last one in {below}."
    )
