"""What the runs of a grid share one after another: the loaded base model, and what follows from it and the data."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import PartialState
from peft.utils import ModulesToSaveWrapper

from monkeyjump.evaluation.score import Memory
from monkeyjump.models import load_model
from monkeyjump.training.recipe import Recipe


def dtype_of(recipe: Recipe) -> torch.dtype:
    """The dtype of the base model here."""
    bf16, gpu = recipe.train.bf16, torch.cuda.is_available()
    return torch.bfloat16 if (gpu and torch.cuda.is_bf16_supported() if bf16 is None else bf16) else torch.float32


class Shared:
    """One base model at a time. A run takes it, puts an adapter on it, and gives it back as it was.

    `memory` holds encoded validation and test examples and the answers of the base model to them.
    """

    def __init__(self) -> None:
        self._key: tuple[Any, ...] | None = None
        self._base: tuple[Any, Any] | None = None
        self._centers: dict[str, dict[Any, Any]] = {}
        self.memory = Memory()
        self.runs = 0  # that have taken the base model
        self.callbacks: list[Any] = []  # of the Trainer, for every run

    def take(self, recipe: Recipe) -> tuple[Any, Any]:
        """The base model of a recipe and its tokenizer: what was given back last, where that fits, or else loaded."""
        dtype = dtype_of(recipe)
        # checkpointing is switched on in the model, and nothing switches it off again
        key = (recipe.model, dtype, recipe.train.gradient_checkpointing)
        base, self._base = self._base, None
        if base is None or key != self._key:
            del base
            device = PartialState().device if torch.cuda.is_available() else None
            base = load_model(recipe.model, dtype=dtype, device=device)
            base[0].config.use_cache = False
            self._centers, self.memory = {}, Memory()
        self._key = key
        self.runs += 1
        return base

    def centers(self, recipe: Recipe) -> dict[Any, Any]:
        """The centres that were found in this base model with the data of a recipe, whatever was trained from them."""
        return self._centers.setdefault(repr((recipe.tasks, recipe.data, recipe.seed)), {})

    def give_back(self, model: Any, tokenizer: Any) -> None:
        """Take the adapter off again. Only for a run that came to its end: another may have left anything behind."""
        for path, module in [*model.named_modules()]:
            if isinstance(module, ModulesToSaveWrapper):  # `unload` would leave the trained module
                model.set_submodule(path, module.original_module)
        self._base = model.unload().eval(), tokenizer
