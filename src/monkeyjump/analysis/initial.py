"""The model as it was before its first training step, and its centres at every checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from monkeyjump.analysis.rows import Rows
from monkeyjump.errors import ConfigError
from monkeyjump.tasks import expand
from monkeyjump.training.data import training_data
from monkeyjump.training.fast import FastSettings
from monkeyjump.training.recipe import Recipe
from monkeyjump.tuner.centers.calibrate import initialize_centers, needs_no_data
from monkeyjump.tuner.layer import MonkeyJumpLayer
from monkeyjump.tuner.model import require_context
from monkeyjump.tuner.routers.base import BlockRouter

Centers = dict[str, Tensor]  # by the path of the projection


def active_routers(model: nn.Module) -> list[tuple[BlockRouter, str]]:
    """The routers of the active adapter, each with the adapter's name."""
    return [(router, router.active()[0]) for router in require_context(model).routers() if router.active()]


def centers_of(model: nn.Module) -> Centers:
    found = {}
    for router, name in active_routers(model):
        for layer in router.layers[name]:
            if name in layer.monkeyjump_center:
                found[layer.path] = layer.monkeyjump_center[name].detach().cpu().clone()
    return found


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
    from safetensors.torch import load_file

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
