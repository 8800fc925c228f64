"""Measurements on a trained model that need its tasks."""

from __future__ import annotations

from typing import Any

from torch import nn

from monkeyjump.analysis.usage import ExpertUsage, expert_usage
from monkeyjump.tasks import Task, load_examples
from monkeyjump.tasks.collate import PaddingCollator
from monkeyjump.tasks.encode import Encoder
from monkeyjump.training.data import encoding
from monkeyjump.training.recipe import Recipe
from monkeyjump.tuner.model import find_context


def measure_usage(
    model: nn.Module, tokenizer: Any, tasks: list[Task], recipe: Recipe, rows: int = 64
) -> ExpertUsage | None:
    """Where the tokens of up to `rows` test rows of each task go; None for a model that does not route."""
    context = find_context(model)
    if context is None or not any(blocks.active() for blocks in context.lists.values()):
        return None
    ids = {task.name: index for index, task in enumerate(tasks)}
    encoder = Encoder(tokenizer, ids, **encoding(recipe))
    collate = PaddingCollator(encoder.tokenizer.pad_token_id, pictures=encoder.pictures)
    batches = {}
    for task in (task for task in tasks if "test" not in task.absent):
        sequences = encoder.encode_all(load_examples(task, "test", recipe.data.folder, limit=rows, seed=recipe.seed))
        batches[task.name] = [collate(sequences[start : start + 32]) for start in range(0, len(sequences), 32)]
    return expert_usage(model, batches)
