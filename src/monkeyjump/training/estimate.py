"""How long a run will take, said before it begins: one forward is timed, and the run's tokens are counted in it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from monkeyjump.evaluation.forward import evaluating
from monkeyjump.evaluation.run import without_adapter
from monkeyjump.tasks.mixture import Mixture
from monkeyjump.tasks.preflight import SplitLook
from monkeyjump.training.data import TrainingData
from monkeyjump.training.progress import say
from monkeyjump.training.recipe import Recipe
from monkeyjump.tuner.centers.sample import forward_inputs

# What a token costs in forwards of the frozen model. A training step goes forward, and back to the inputs but not to
# the frozen weights; options are read after the prompt, answers are generated a token at a time.
_TRAINING = 2.5
_SCORING = {"letter": 1.0, "text": 1.3, "generate": 2.0}


def say_how_long(
    model: nn.Module, recipe: Recipe, data: TrainingData, steps: int, looks: Any, tokens: int, ranks: int = 1
) -> None:
    """Tell a person the time of all parts of a run, and of each where there are several."""
    parts = estimate(model, recipe, data, steps, looks, tokens)
    if parts is not None:
        shown = [f"{name} {in_words(seconds)}" for name, seconds in parts.items() if seconds >= 1]
        total = in_words(sum(parts.values())) + (f" ({', '.join(shown)})" if len(shown) > 1 else "")
        how_many = f"{steps} steps of {recipe.train.batch_size} x {recipe.train.accumulation} texts"
        say(f"{how_many}{f' on {ranks} ranks' if ranks > 1 else ''}: this will take about {total}")


def in_words(seconds: float) -> str:
    """Two figures are enough for a guess: "40 s", "4 min", "2 h 10 min", "3 days"."""
    if seconds < 90:
        return f"{max(1, round(seconds, -1) if seconds > 20 else round(seconds)):.0f} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    hours, rest = divmod(round(minutes, -1), 60)
    return f"{hours} h {rest} min" if hours < 48 else f"{hours / 24:.0f} days"


def estimate(
    model: nn.Module, recipe: Recipe, data: TrainingData, steps: int, looks: Sequence[SplitLook], center_tokens: int
) -> dict[str, float] | None:
    """Seconds of each part of a run; None for streamed data, whose lengths are not known."""
    if not isinstance(data.items, Mixture):
        return None
    per_token = _seconds_per_token(model, data, recipe.train.batch_size)
    length = sum(data.items.lengths) / len(data.items)
    texts = steps * recipe.train.accumulation * recipe.train.batch_size
    trained = texts * (recipe.data.max_length if recipe.data.packing else length)
    evaluations = max(1, steps // (recipe.train.eval_steps or max(1, steps // 4)))
    limit = min(n for n in (recipe.evaluate.validation_limit, recipe.data.validation) if n is not None)
    scoring = per_token * length * _SCORING[recipe.mode]

    def rows(split: str, limit: int | None) -> int:
        sizes = [look.rows for look in looks if look.split == split]
        return sum(size if limit is None else min(size, limit) for size in sizes)

    return {
        "centres": center_tokens * per_token,
        "training": trained * per_token * _TRAINING,
        "validation": evaluations * rows("validation", limit) * scoring,
        "test": rows("test", recipe.evaluate.test_limit) * scoring * (2 if recipe.evaluate.before else 1),
    }


def _seconds_per_token(model: Any, data: TrainingData, batch_size: int) -> float:
    """One forward of the frozen model on the first texts, after another one that wakes the machine up."""
    device, base = next(model.parameters()).device, model.get_base_model()
    batch: dict[str, Any] = data.collator([data.items[index] for index in range(min(batch_size, len(data.items)))])
    inputs = forward_inputs(base, batch, device)  # without the logits of a batch, which may be all a device can hold
    inputs.pop("labels", None)
    seconds = 0.0
    with evaluating(model), without_adapter(model):
        for _ in range(2):
            started = time.perf_counter()
            base(**inputs)
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - started
    return seconds / inputs["input_ids"].numel()
