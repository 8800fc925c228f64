"""A model changed for a look, and restored: as it was before its first training step, and with permuted experts.

Permuted, the loss says how much depends on which expert a centre or a row of a router belongs to.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from tqdm.auto import tqdm

from monkeyjump.analysis.rows import Rows
from monkeyjump.analysis.style import COLORS, Drawing, label, name_ticks, new_figure
from monkeyjump.errors import ConfigError
from monkeyjump.routing.granularity import IGNORE
from monkeyjump.routing.learned import LearnedRouter
from monkeyjump.tasks import expand
from monkeyjump.training.data import training_data
from monkeyjump.training.fast import FastSettings
from monkeyjump.training.recipe import Recipe
from monkeyjump.tuner.centers.calibrate import initialize_centers, needs_no_data
from monkeyjump.tuner.centers.sample import forward_inputs
from monkeyjump.tuner.layer import MonkeyJumpLayer
from monkeyjump.tuner.model import require_context
from monkeyjump.tuner.routers.base import BlockRouter

Centers = dict[str, Tensor]  # by the path of the projection
SHUFFLES = 10
ROWS = 8  # of each task; every shuffle reads them again
_ROWS_AT_ONCE = 8  # logits of all tokens are made


def active_routers(model: nn.Module) -> list[tuple[BlockRouter, str]]:
    """The routers of the active adapter, each with the adapter's name."""
    return [(router, router.active()[0]) for router in require_context(model).routers() if router.active()]


def centers_of(model: nn.Module) -> Centers:
    layers = [(layer, name) for router, name in active_routers(model) for layer in router.layers[name]]
    known = [(layer.path, layer.monkeyjump_center[name]) for layer, name in layers if name in layer.monkeyjump_center]
    return {path: center.detach().cpu().clone() for path, center in known}


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Whatever is done to adapters, routers and centres inside the `with` is undone at its end."""
    kept = {key: value.clone() for key, value in model.state_dict().items() if "monkeyjump_" in key}
    try:
        with torch.random.fork_rng(), torch.no_grad():
            yield
    finally:
        model.load_state_dict(kept, strict=False)


@contextmanager
def before_training(model: nn.Module, tokenizer: Any, recipe: Recipe | None, rows: dict[str, Rows]) -> Iterator[str]:
    """The model with its first centres and adapters that add nothing. Gives what the centres came from, in words.

    Every adapter starts as the identity, so that this is the model of step 0, if the centres are those of step 0.
    """
    with unchanged(model):
        for layer in model.modules():
            if isinstance(layer, MonkeyJumpLayer):
                for adapter in layer.monkeyjump_adapter.values():
                    adapter.reset_parameters()  # type: ignore[operator]
        yield _first_centers(model, tokenizer, recipe, rows)


def _first_centers(model: nn.Module, tokenizer: Any, recipe: Recipe | None, rows: dict[str, Rows]) -> str:
    router, name = active_routers(model)[0]
    config, seed = router.configs[name], recipe.seed if recipe else 0
    what = f"{config.center_init} with seed {seed}"
    if needs_no_data(config):
        initialize_centers(model, seed=seed)
        return what
    if recipe is not None:
        try:
            tasks = expand(recipe.tasks, recipe.data.bad_media)
            calibration = training_data(recipe, tasks, tokenizer, FastSettings(False, False)).calibration
            if calibration is not None:
                initialize_centers(model, calibration, seed=seed)
                return f"{what} on the run's own training rows, as it began"
        except ConfigError:  # the training data is elsewhere; the rows at hand serve instead
            pass
    initialize_centers(model, (batch for some in rows.values() for batch in some), seed=seed)
    return f"{what} on the rows inspected here, since the training rows are not at hand"


def checkpoint_centers(adapter: Path) -> dict[int, Centers]:
    """The centres at every checkpoint of the run that an adapter belongs to, by step; empty if there are none."""
    found = {}
    for place in (adapter.parent, adapter.parent / "checkpoints"):
        for file in place.glob("checkpoint-*/adapter_model.safetensors"):
            step = file.parent.name.rpartition("-")[2]
            centers = {
                key.removeprefix("base_model.model.").removesuffix(".monkeyjump_center"): tensor
                for key, tensor in load_file(file).items()
                if key.endswith(".monkeyjump_center")
            }
            if step.isdigit() and centers:
                found[int(step)] = centers
    return dict(sorted(found.items()))


def _learned_routers(layers: list[Any], name: str) -> list[LearnedRouter]:
    found = [dict(layer.monkeyjump_router.items()).get(name) for layer in layers]
    return [router for router in found if isinstance(router, LearnedRouter)]


def permute_experts(model: nn.Module, generator: torch.Generator) -> None:
    """Give the experts of every router each other's centres, or each other's rows of a learned router."""
    for router, name in active_routers(model):
        layers = router.layers[name]
        if router.configs[name].uses_centers:
            centers = torch.cat([torch.atleast_2d(layer.monkeyjump_center[name]) for layer in layers])
            order = torch.randperm(len(centers), generator=generator).to(centers.device)
            for layer, own in zip(layers, centers[order].unflatten(0, (len(layers), -1)), strict=True):
                layer.monkeyjump_center[name].copy_(own.view_as(layer.monkeyjump_center[name]))
        for learned in _learned_routers(layers, name):
            rows = torch.randperm(learned.experts, generator=generator).to(learned.weight.device)
            for tensor in (learned.weight, learned.bias):
                if tensor is not None:
                    tensor.copy_(tensor[rows])


def can_permute(model: nn.Module) -> bool:
    """Whether some router of a decoder has centres or learned rows to permute."""
    routed = any(
        router.configs[name].uses_centers or _learned_routers(router.layers[name], name)
        for router, name in active_routers(model)
    )
    return routed and not require_context(model).encoder_decoder


@torch.no_grad()
def answer_nll(model: nn.Module, rows: dict[str, Rows]) -> dict[str, float]:
    """The mean negative log-likelihood of an answer's token, for each task."""
    base, device, found = require_context(model).base, next(model.parameters()).device, {}
    for task, some in rows.items():
        total = count = 0.0
        for start in range(0, len(some), _ROWS_AT_ONCE):
            batch = some.collate(some.sequences[start : start + _ROWS_AT_ONCE])
            inputs = forward_inputs(base, batch, device)
            inputs.pop("logits_to_keep", None)
            targets = inputs.pop("labels")[:, 1:]
            logits = model(**inputs).logits[:, :-1]
            real = targets != IGNORE
            total += float(nn.functional.cross_entropy(logits[real].float(), targets[real], reduction="sum"))
            count += int(real.sum())
        found[task] = total / max(count, 1)
    return found


def draw_permutation(model: nn.Module, rows: dict[str, Rows], seed: int = 0) -> Drawing:
    some = {task: Rows(found.sequences[:ROWS], found.collate) for task, found in rows.items()}
    generator, shuffled = torch.Generator().manual_seed(seed), []
    own = answer_nll(model, some)
    for _ in tqdm(range(SHUFFLES), desc="permuting experts", unit="shuffle"):
        with unchanged(model):
            permute_experts(model, generator)
            shuffled.append(answer_nll(model, some))
    tasks = list(own)
    table = np.array([[found[task] for task in tasks] for found in shuffled])
    figure = new_figure(max(4.5, 0.7 * len(tasks) + 2), 3.6, "Loss with permuted experts")
    axis = figure.subplots()
    for place in range(len(tasks)):
        axis.scatter(np.full(SHUFFLES, place), table[:, place], s=14, color=COLORS[1], alpha=0.6, linewidths=0)
    axis.scatter([], [], s=14, color=COLORS[1], label=f"{SHUFFLES} permutations")
    axis.plot(list(own.values()), "_", ms=14, mew=2.5, color=COLORS[0], label="as trained")
    axis.set_xlim(-0.6, len(tasks) - 0.4)
    label(axis, "", y="NLL of an answer's token", legend=True)
    name_ticks(axis, "x", tasks, most=40)
    lines: list[list[Any]] = [["as trained", *own.values()]]
    lines += [[f"permutation {n + 1}", *values] for n, values in enumerate(table.tolist())]
    mean, spread, trained = table.mean(), table.mean(1).std(ddof=1), np.mean(list(own.values()))
    worse = int((table.mean(1) > trained).sum())
    finding = (
        f"Mean NLL over tasks: {trained:.3f} as trained, {mean:.3f} ± {spread:.3f} (standard deviation over "
        f"permutations) with permuted experts; {worse} of {SHUFFLES} are worse."
    )
    return Drawing("permutation", figure, ["experts", *tasks], lines, [finding], words={"rows": ROWS})
