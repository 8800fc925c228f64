"""What a model answers, in one of three ways.

| mode | a prediction is |
|---|---|
| `letter` | the option whose letter is the most likely beginning of the answer |
| `text` | the option whose text, end token included, is the most likely answer, per token or in total |
| `generate` | the option that greedily generated text names (the paper's way); nothing else counts as an answer |

The end token belongs to an answer's text because it was trained with it, and because without it an option that begins
another one ("1", "1.5") could not be told from it. A task without options is always generated.

Regression (options that are numbers): the predicted number is the expected value under the options' probabilities in
the likelihood modes, and the number of the named option, or else the first number of the text, in generation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from monkeyjump.evaluation.answers import match_option, normalize, number_in
from monkeyjump.evaluation.forward import AnswerReader, answer_logprobs, evaluating
from monkeyjump.tasks.encode import Encoder
from monkeyjump.tasks.task import Example

Mode = Literal["letter", "text", "generate"]
MODES: tuple[Mode, ...] = ("letter", "text", "generate")
FREE_ANSWER_TOKENS = 64  # what a free answer may take
_ROOM = 8  # tokens beyond the longest option: "The answer is B."
_LOGIT_WEIGHT = 16  # an answer position holds a row of logits: it counts as this many plain tokens of a batch


@dataclass(frozen=True, slots=True)
class Prediction:
    """The answer to one example."""

    index: int  # place of the example in the list that was scored
    predicted: int  # option; -1 for none
    gold: int
    correct: bool
    scores: tuple[float, ...] | None = None  # one per option, in the likelihood modes: what the choice was made by
    text: str | None = None  # what was generated
    value: float | None = None  # regression: the predicted number; None if none was given
    gold_value: float | None = None


@dataclass(frozen=True, slots=True)
class _Job:
    index: int
    example: Example
    prompt: list[int]
    answers: list[list[int]]  # token ids; in generation their lengths set the limit
    task_id: int

    @property
    def kind(self) -> tuple[int, bool]:
        """Jobs of one kind share a forward: as many answers, and the same need of a second forward."""
        return len(self.answers), max(map(len, self.answers)) > 1


def predict(
    model: nn.Module,
    encoder: Encoder,
    examples: Sequence[Example],
    mode: Mode,
    *,
    normalize_length: bool = True,
    batch_tokens: int | None = None,
    progress: Any = None,
) -> list[Prediction]:
    """Predictions in the order of the examples; those the encoder drops as too long are left out (it counts them).

    `progress`: an object with `update(n)`, such as a tqdm bar.
    """
    jobs = _jobs(encoder, examples, mode)
    skipped = len(examples) - len(jobs)
    if progress is not None and skipped:
        progress.update(skipped)
    reader = AnswerReader(model, encoder.tokenizer.pad_token_id or 0)
    if batch_tokens is None:
        batch_tokens = 8192 if reader.device.type == "cpu" else 65536
    predictions: list[Prediction] = []
    with evaluating(model):
        for batch in _batches(jobs, mode, batch_tokens):
            if mode == "generate":
                predictions += _generated(reader, encoder, batch)
            else:
                predictions += _likeliest(reader, batch, normalize_length and mode == "text")
            if progress is not None:
                progress.update(len(batch))
    return sorted(predictions, key=lambda prediction: prediction.index)


def _jobs(encoder: Encoder, examples: Sequence[Example], mode: Mode) -> list[_Job]:
    jobs = []
    for index, example in enumerate(examples):
        prompt = encoder.prompt_ids(example)
        if prompt is None:
            continue
        if mode == "letter":
            answers = [encoder.target_ids(text)[:-1] for text in example.targets("letter")]  # without the end token
        else:
            answers = [encoder.target_ids(text) for text in example.targets("text")]
        jobs.append(_Job(index, example, prompt, answers, encoder.task_ids.get(example.task, 0)))
    return jobs


def _batches(jobs: list[_Job], mode: Mode, batch_tokens: int) -> Iterator[list[_Job]]:
    """Batches of one kind and similar length, the longest first: what does not fit in memory shows at once."""
    batch: list[_Job] = []
    for job in sorted(jobs, key=lambda job: (job.kind, len(job.prompt), max(map(len, job.answers)), job.index))[::-1]:
        if batch and (job.kind != batch[0].kind or _cost([*batch, job], mode) > batch_tokens):
            yield batch
            batch = []
        batch.append(job)
    if batch:
        yield batch


def _cost(batch: list[_Job], mode: Mode) -> int:
    width = max(len(job.prompt) for job in batch)
    length = max(len(ids) for job in batch for ids in job.answers)
    answers, extends = batch[0].kind
    if mode == "generate" or not extends:
        return len(batch) * max(width, _LOGIT_WEIGHT)
    return len(batch) * answers * max(width + length, _LOGIT_WEIGHT * length)


def _likeliest(reader: AnswerReader, batch: list[_Job], per_token: bool) -> Iterator[Prediction]:
    totals = answer_logprobs(
        reader, [job.prompt for job in batch], [job.answers for job in batch], [job.task_id for job in batch]
    )
    for job, logprobs in zip(batch, totals, strict=True):
        lengths = [len(ids) if per_token else 1 for ids in job.answers]
        scores = [logprob / length for logprob, length in zip(logprobs, lengths, strict=True)]
        numbers = [index for index, score in enumerate(scores) if not math.isnan(score)]
        best = max(numbers, key=scores.__getitem__, default=-1)  # a model that has diverged answers nothing
        example = job.example
        yield Prediction(
            index=job.index,
            predicted=best,
            gold=example.label,
            correct=best == example.label,
            scores=tuple(scores),
            value=None if example.score is None or best < 0 else _expected(logprobs, example.options),
            gold_value=example.score,
        )


def _expected(logprobs: Sequence[float], options: Sequence[str]) -> float:
    """The mean of the options' numbers, weighted by their probabilities among the options."""
    top = max(logprobs)
    weights = [math.exp(logprob - top) for logprob in logprobs]
    return sum(w * float(option) for w, option in zip(weights, options, strict=True)) / sum(weights)


def _generated(reader: AnswerReader, encoder: Encoder, batch: list[_Job]) -> Iterator[Prediction]:
    prefix = reader.read([job.prompt for job in batch], [job.task_id for job in batch])
    limits = [max(map(len, job.answers)) + _ROOM if job.example.options else FREE_ANSWER_TOKENS for job in batch]
    rows = reader.greedy(prefix, max(limits), end_ids(reader.model, encoder.tokenizer))
    for job, limit, ids in zip(batch, limits, rows, strict=True):
        # A row may not profit from a neighbour with longer options: cut at its own limit.
        yield _judged(job, encoder.tokenizer.decode(ids[:limit], skip_special_tokens=True), encoder)


def _judged(job: _Job, text: str, encoder: Encoder) -> Prediction:
    example, value = job.example, None
    if not example.options:
        correct = normalize(text) == normalize(example.free_answer)
        return Prediction(job.index, -1, -1, correct, text=text)
    predicted = match_option(text, example.options, encoder.answer_format)
    if example.score is not None:
        value = float(example.options[predicted]) if predicted >= 0 else number_in(text)
    correct = predicted == example.label
    return Prediction(job.index, predicted, example.label, correct, None, text, value, example.score)


def end_ids(model: nn.Module, tokenizer: Any) -> set[int]:
    """Tokens that end an answer: the tokenizer's, and those of the model's generation settings."""
    found = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    listed = found if isinstance(found, (list, tuple)) else [found]
    return {int(token) for token in (*listed, tokenizer.eos_token_id) if token is not None}
