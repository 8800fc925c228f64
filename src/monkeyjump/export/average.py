"""The mean gates of a routed adapter over rows, and what an adapter with them loses on tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from monkeyjump.analysis.collect import collect
from monkeyjump.analysis.rows import rows_of_tasks, rows_of_user
from monkeyjump.errors import ConfigError
from monkeyjump.evaluation.load import TASK_IDS
from monkeyjump.evaluation.report import percent
from monkeyjump.evaluation.run import evaluate
from monkeyjump.evaluation.score import Memory
from monkeyjump.export.gates import Gates, constant_gates, mean_gates, mean_over_tasks, task_names, why_not_exact
from monkeyjump.tables import Table
from monkeyjump.tasks import Task
from monkeyjump.tasks.encode import Encoder
from monkeyjump.training.data import encoding
from monkeyjump.training.recipe import Recipe


def averaged(
    model: Any, tokenizer: Any, tasks: list[Task], recipe: Recipe | None, text: str | None, rows: int, data: Any
) -> Gates:
    """The mean gates over rows of tasks, or of a user's text; every task counts the same. Test rows are not read."""
    if why_not_exact(model) is None:
        known = task_names(model)
        chosen = [known[task.name] for task in tasks if task.name in known] or list(known.values())
        return mean_over_tasks([constant_gates(model, task) for task in chosen])
    ids = getattr(model, TASK_IDS, None) or {task.name: place for place, task in enumerate(tasks)}
    encoder = Encoder(tokenizer, ids, **(encoding(recipe) if recipe else {}))
    if text:
        return mean_gates(model, collect(model, rows_of_user(encoder, text, None, rows)).usage)
    found = rows_of_tasks(encoder, tasks, rows, data, recipe.seed if recipe else 0, "train")
    if not found:
        raise ConfigError("none of these tasks has training rows to average over: give some as --text.")
    return mean_gates(model, collect(model, found).usage)


def measure_loss(
    model: Any, tokenizer: Any, tasks: list[Task], recipe: Recipe | None, folder: Path, data: Any, limit: int | None
) -> Table:
    """Test scores of the base model, the routed adapter and the LoRA in `folder`, and the last minus the second."""
    from peft import PeftModel

    memory, settings = Memory(), {"data": data, "limit": limit}
    if recipe is not None:
        settings |= {"mode": recipe.mode, **encoding(recipe)}
    routed = evaluate(model, tokenizer, tasks, memory=memory, **settings)
    ids = getattr(model, TASK_IDS, None)
    plain = PeftModel.from_pretrained(model.unload(), str(folder)).eval()
    if ids:
        setattr(plain, TASK_IDS, ids)
    lossy = evaluate(plain, tokenizer, tasks, memory=memory, compare_base=False, **settings)
    pairs = list(zip([*routed.rows, routed.overall], [*lossy.rows, lossy.overall], strict=True))
    rows = [
        [ours.task, ours.metric, str(ours.n), percent(ours.base), percent(ours.adapter), percent(theirs.adapter),
         percent(None if ours.adapter is None or theirs.adapter is None else theirs.adapter - ours.adapter)]
        for ours, theirs in pairs
    ]  # fmt: skip
    columns = ["task", "metric", "n", "base", "routed", "averaged", "change"]
    return Table("what the average loses", columns, rows, left=2)
