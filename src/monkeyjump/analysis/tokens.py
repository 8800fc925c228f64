"""Figures of token states: where they lie, which expert they go to, and how well centres divide them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from monkeyjump.analysis.changed_models import active_routers
from monkeyjump.analysis.collect import Collection, spread
from monkeyjump.analysis.style import Drawing, expert_colors, grid, label
from monkeyjump.ops import reference as ops
from monkeyjump.routing.granularity import KINDS

POINTS = 500  # tokens of a panel among many; t-SNE of as many takes a second
MANY_POINTS = 1_500  # tokens of a panel among few


def embed(states: Tensor, seed: int = 0) -> np.ndarray:
    """Two coordinates for each state [N, D] by t-SNE on directions, after the 50 largest principal components."""
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    unit = nn.functional.normalize(states.float(), dim=-1).numpy()
    reduced = PCA(min(50, *unit.shape), random_state=seed).fit_transform(unit)
    perplexity = min(30.0, (len(unit) - 1) / 3)
    return TSNE(2, perplexity=perplexity, init="pca", random_state=seed, max_iter=500).fit_transform(reduced)


def draw_states(collection: Collection, model: nn.Module) -> Drawing:
    """Small multiples: the sampled tokens of every block, coloured by the expert with the largest gate."""
    sample, centers = collection.sample, centers_by_block(model)
    blocks = [block for block in sample.states if block in collection.block_of.values()]
    blocks = [block for block in blocks if collection.router_of(block) in sample.gates]
    chosen = _subset(len(sample.tasks), POINTS if len(blocks) > 4 else MANY_POINTS)
    size = 1.6 if len(blocks) > 4 else 2.8
    experts = list(dict.fromkeys(name for b in blocks for name in collection.experts_of(collection.router_of(b))))
    colors = expert_colors(experts)
    figure, axes = grid(len(blocks), size, size, "Token states at the entrance of each block, by expert")
    rows: list[list[Any]] = []
    about_tokens = torch.stack([sample.tasks, sample.kinds, sample.positions, sample.token_ids], 1)[chosen]
    described = [[collection.tasks[task], KINDS[kind], *rest] for task, kind, *rest in about_tokens.tolist()]
    for axis, block in zip(axes, blocks, strict=True):
        router = collection.router_of(block)
        names, places = collection.experts_of(router), sample.gates[router][chosen].argmax(1)
        features = _features(model, block, sample.states[block][chosen])
        tokens = embed(features)
        _panel(axis, tokens, places, [colors[name] for name in names], features, centers.get(block))
        label(axis, f"block {block}")
        rows += [
            [block, *point, names[place], *about]
            for point, place, about in zip(tokens.tolist(), places.tolist(), described, strict=True)
        ]
    _legend(figure, colors, bool(centers))
    columns = ["block", "x", "y", "expert", "task", "kind", "position", "token id"]
    return Drawing("states", figure, columns, rows)


def draw_centers(collection: Collection, model: nn.Module, first: dict[str, Tensor], words: str) -> Drawing:
    """The same tokens divided by trained, first and random centres, with two numbers on how well each divides them."""
    sample = collection.sample
    blocks = spread(list(sample.states), 2)
    chosen = _subset(len(sample.tasks), MANY_POINTS)
    trained, generator = centers_by_block(model), torch.Generator().manual_seed(0)
    drawn = {block: torch.randn(trained[block].shape, generator=generator) for block in blocks}
    random = {block: nn.functional.normalize(values, dim=-1) for block, values in drawn.items()}
    sets = {"after training": trained, "at the start": first, "random": random}
    title = "Tokens divided by trained, first and random centres"
    figure, axes = grid(len(blocks) * len(sets), 2.7, 2.8, title, most=3)
    rows: list[list[Any]] = []
    for number, block in enumerate(blocks):
        names = collection.experts_of(collection.router_of(block))
        colors = expert_colors(names)
        features = _features(model, block, sample.states[block][chosen])
        points = embed(features)
        for place, (kind, centers) in enumerate(sets.items()):
            axis = axes[number * len(sets) + place]
            nearest = (features @ centers[block].T).argmax(1)
            silhouette, spread_ = quality(features, nearest, len(names))
            _panel(axis, points, nearest, list(colors.values()), features, centers[block])
            label(axis, f"block {block}, {kind}", f"silhouette {silhouette:.2f}, variance within {spread_:.0%}")
            shares = [float((nearest == expert).float().mean()) for expert in range(len(names))]
            rows.append([block, kind, silhouette, spread_, *shares])
    _legend(figure, expert_colors(names), True)
    columns = ["block", "centres", "silhouette", "variance within", *(f"share of {name}" for name in names)]
    within = {kind: np.mean([row[3] for row in rows if row[1] == kind]) for kind in sets}
    finding = f"Variance within groups: {', '.join(f'{share:.0%} {kind}' for kind, share in within.items())}."
    return Drawing("centers", figure, columns, rows, [finding], words={"start": words})


def quality(features: Tensor, nearest: Tensor, experts: int) -> tuple[float, float]:
    """Silhouette by cosine (NaN if one group has all tokens), and the share of the variance that is within groups."""
    from sklearn.metrics import silhouette_score

    total = float((features - features.mean(0)).square().sum())
    groups = [features[nearest == expert] for expert in range(experts)]
    within = sum(float((group - group.mean(0)).square().sum()) for group in groups if len(group))
    found = nearest.unique()
    alone = len(found) < 2 or len(found) == len(nearest)
    silhouette = float("nan") if alone else float(silhouette_score(features.numpy(), nearest.numpy(), metric="cosine"))
    return silhouette, within / max(total, 1e-12)


def centers_by_block(model: nn.Module) -> dict[str, Tensor]:
    """The centres [E, D] of every block, on the unit sphere; empty where a router has none."""
    return {
        router.key: nn.functional.normalize(
            torch.cat([torch.atleast_2d(layer.monkeyjump_center[name]) for layer in router.layers[name]]).cpu(), dim=-1
        )
        for router, name in active_routers(model)
        if router.configs[name].uses_centers
    }


def _features(model: nn.Module, block: str, states: Tensor) -> Tensor:
    """States as their router sees them, on the unit sphere."""
    router, name = next((router, name) for router, name in active_routers(model) if router.key == block)
    mean = None
    if router.configs[name].uses_centers and router.configs[name].route_space == "centered":
        mean = router.layers[name][0].monkeyjump_mean[name].detach().cpu()
    return ops.features(states, mean, normalize=True)


def _subset(total: int, most: int) -> Tensor:
    return torch.linspace(0, total - 1, min(total, most)).round().long()


def _panel(
    axis: Any, points: np.ndarray, experts: Tensor, colors: list[str], features: Tensor, centers: Tensor | None
) -> None:
    """Tokens in the colours of their experts, and a star on the token nearest to each centre.

    A centre itself has no neighbours that t-SNE could place it by.
    """
    for expert, color in enumerate(colors):
        axis.scatter(*points[(experts == expert).numpy()].T, s=4, color=color, linewidths=0)
    nearest = [] if centers is None else (centers @ features.T).argmax(1).tolist()
    for place, (token, color) in enumerate(zip(nearest, colors, strict=False)):
        size = max(20, 130 - 40 * place)  # of several stars on one token all are seen
        axis.scatter(*points[token], s=size, marker="*", color=color, edgecolors="black", linewidths=0.7, zorder=3)
    axis.set_xticks([])
    axis.set_yticks([])


def _legend(figure: Any, colors: dict[str, str], centers: bool) -> None:
    """The experts' colours below the panels, in as many columns as fit."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], linestyle="", marker="o", color=color, label=name) for name, color in colors.items()]
    if centers:
        star: dict[str, Any] = {"marker": "*", "markersize": 9, "color": "white", "mec": "black"}
        handles.append(Line2D([], [], linestyle="", label="nearest to a centre", **star))
    columns = max(1, int(figure.get_figwidth() / 1.7))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)
