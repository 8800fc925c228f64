"""From the answers to a task to its row in the report: scores, intervals, the answers given most often."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from monkeyjump.evaluation import metrics
from monkeyjump.evaluation.answers import normalize
from monkeyjump.evaluation.jobs import Mode
from monkeyjump.evaluation.report import ReportRow
from monkeyjump.evaluation.score import NO_ANSWER, Prediction
from monkeyjump.tasks import Example, Task
from monkeyjump.tasks.cells import most_frequent
from monkeyjump.tasks.task import LETTERS


def task_score(metric: str, predictions: Sequence[Prediction]) -> float:
    """The task's metric. A constant prediction ranks nothing, so its rank correlation counts as 0."""
    if metric != "spearman":
        return metrics.mean([prediction.credit for prediction in predictions])
    predicted, gold = _numbers(predictions)
    found = metrics.spearman(predicted, gold)
    return 0.0 if math.isnan(found) and len(set(gold)) > 1 else found


def _numbers(predictions: Sequence[Prediction]) -> tuple[list[float], list[float]]:
    """Predicted and gold numbers; an answer without a number counts as the mean of the others."""
    said = [prediction.value for prediction in predictions if prediction.value is not None]
    middle = metrics.mean(said) if said else 0.0
    predicted = [middle if prediction.value is None else prediction.value for prediction in predictions]
    return predicted, [float(prediction.gold_value or 0.0) for prediction in predictions]


def _frequent_answers(
    metric: str, examples: Sequence[Example], sides: Mapping[str, Sequence[Prediction]]
) -> dict[str, Any]:
    """The most frequent right answer and the most frequent answer of each side, as fields of a row."""
    found: dict[str, Any] = {}
    same_options = len({example.options for example in examples}) == 1
    for side, predictions in sides.items():
        if not predictions:
            continue
        said, right = zip(*(_answer_texts(examples[p.index], p, same_options) for p in predictions), strict=True)
        counted = {f"{side}_top": said} if metric == "spearman" else {f"{side}_top": said, "majority": right}
        for name, answers in counted.items():  # a constant ranks nothing: there is no majority of a rank correlation
            found |= {f"{name}_answer": (answer := most_frequent(answers)), name: answers.count(answer) / len(answers)}
    return found


def _answer_texts(example: Example, prediction: Prediction, same_options: bool) -> tuple[str, str]:
    """The given and the right answer as they are counted.

    Rows that share their options are counted by the option's text, others by its letter, free answers by their
    normalised text.
    """
    if not example.options:
        return normalize(prediction.text or ""), normalize(example.free_answer)
    names = example.options if same_options or not example.lettered else LETTERS
    if prediction.predicted >= 0:
        return names[prediction.predicted], names[example.label]
    # A generated number counts in a rank correlation even where it is none of the options.
    return NO_ANSWER if prediction.value is None else f"{prediction.value:g}", names[example.label]


def _replicates(metric: str, sides: Mapping[str, Sequence[Prediction]], seed: int) -> dict[str, metrics.Floats]:
    """Both sides are resampled with the same draws, so that their difference is one of pairs."""
    if not all(sides.values()):
        return {side: np.full(metrics.RESAMPLES, math.nan) for side in sides}
    if metric != "spearman":
        credits = [[prediction.credit for prediction in predictions] for predictions in sides.values()]
        return dict(zip(sides, metrics.resampled_means(credits, seed), strict=True))
    pairs = {side: _numbers(predictions) for side, predictions in sides.items()}
    constant, resampled = np.zeros(metrics.RESAMPLES), metrics.resampled_spearman
    return {
        side: constant if len(set(said)) == 1 else resampled(said, gold, seed) for side, (said, gold) in pairs.items()
    }


def task_row(
    task: Task, examples: Sequence[Example], sides: Mapping[str, list[Prediction]], mode: Mode, seed: int
) -> tuple[ReportRow, dict[str, metrics.Floats]]:
    """The row of a task, and its scores resampled for the intervals of means."""
    replicates = _replicates(task.metric, sides, seed + zlib.crc32(task.name.encode()))
    found = _frequent_answers(task.metric, examples, sides)
    for side, predictions in sides.items():
        credits = [prediction.credit for prediction in predictions]
        nlls = [nll for prediction in predictions if (nll := prediction.nll) is not None]
        resampled = task.metric in ("spearman", "vqa_accuracy")
        found |= {
            side: task_score(task.metric, predictions),
            f"{side}_interval": metrics.percentile_interval(replicates[side])
            if resampled
            else metrics.wilson(sum(credits), len(credits)),
            f"{side}_nll": metrics.mean(nlls) if nlls else None,
        }
    row = ReportRow("task", task.name, task.family, task.metric, len(next(iter(sides.values()))), mode, **found)
    return row.with_difference(replicates), replicates
