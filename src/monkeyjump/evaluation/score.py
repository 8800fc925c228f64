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
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain, islice, starmap, takewhile
from typing import Any

import torch
from torch import Tensor, nn

from monkeyjump.errors import MonkeyJumpWarning
from monkeyjump.evaluation.answers import free_credit, match_option, number_in
from monkeyjump.evaluation.forward import AnswerReader, evaluating
from monkeyjump.evaluation.jobs import Batch, Job, Mode, make_batches, make_jobs, waves
from monkeyjump.tasks.encode import Encoder
from monkeyjump.tasks.task import Example

_WAVE = 8  # full batches of a wave: fewer would be padded more, more would leave the device waiting for the first


@dataclass(frozen=True, slots=True)
class Prediction:
    """The answer to one example."""

    index: int  # place of the example in the list that was scored
    predicted: int  # option; -1 for none
    gold: int
    correct: bool  # of an answer that is partly right: at least half
    scores: tuple[float, ...] | None = None  # one per option, in the likelihood modes: what the choice was made by
    text: str | None = None  # what was generated
    value: float | None = None  # regression: the predicted number; None if none was given
    gold_value: float | None = None
    points: float | None = None  # from 0 to 1, where an answer may be partly right

    @property
    def credit(self) -> float:
        """What the answer counts in the task's score."""
        return float(self.correct) if self.points is None else self.points


def predict(
    model: nn.Module,
    encoder: Encoder,
    examples: Sequence[Example],
    mode: Mode,
    *,
    normalize_length: bool = True,
    batch_tokens: int | None = None,
) -> list[Prediction]:
    """Predictions in the order of the examples; those the encoder drops as too long are left out (it counts them)."""
    jobs = make_jobs(encoder, examples, mode)
    found = Scorer(model, encoder, normalize_length, batch_tokens).score([jobs], {"": nullcontext()})[""]
    return [found[job] for job in jobs]


class Scorer:
    """Runs jobs through a model, once for each side: the base model, the adapter."""

    def __init__(
        self,
        model: nn.Module,
        encoder: Encoder,
        normalize_length: bool = True,
        batch_tokens: int | None = None,
        progress: Any = None,
    ) -> None:
        """`batch_tokens`: padded tokens of one forward; None: by device. `progress`: a tqdm bar."""
        self.reader = AnswerReader(model, encoder.tokenizer.pad_token_id or 0)
        self.encoder = encoder
        self.normalize_length = normalize_length
        self.batch_tokens = batch_tokens or self.reader.batch_tokens()
        self.progress = progress
        self.end_ids = end_ids(model, encoder.tokenizer)

    def score(
        self, lists: Iterable[list[Job]], sides: Mapping[str, AbstractContextManager[Any]]
    ) -> dict[str, dict[Job, Prediction]]:
        """The predictions of every side. A side's context switches the model to it.

        Lists are asked for when the device has work in hand, so that they may be made beside it.
        """
        allowed, ran = self.batch_tokens, {}
        parts: Iterable[list[Batch]]
        parts = (make_batches(jobs, self.batch_tokens) for jobs in waves(lists, _WAVE * self.batch_tokens))
        with evaluating(self.reader.model):
            for side, switched in sides.items():
                if self.progress is not None:
                    self.progress.set_description(side, refresh=False)
                with switched:
                    ran[side] = [self.run(batches) for batches in parts]
                parts = [batches for batches, _ in ran[side]]
        if self.batch_tokens < allowed:
            warnings.warn(
                f"batches of {allowed:,} tokens did not fit in memory and were made smaller: "
                f"batch_tokens={self.batch_tokens} fits.",
                MonkeyJumpWarning,
                stacklevel=2,
            )
        # The first look at results: until here nothing has waited for the device.
        return {side: dict(chain.from_iterable(starmap(self._predictions, done))) for side, done in ran.items()}

    def run(self, batches: Sequence[Batch]) -> tuple[list[Batch], list[Tensor]]:
        """Start all batches without waiting; return those that ran and what they will hold.

        Where memory runs out, the batch and all that follow are made again with half as many tokens.
        """
        waiting, done, outputs = deque(batches), [], []
        while waiting:
            batch = waiting.popleft()
            output = self._output(batch)
            if output is None:
                self.batch_tokens = min(self.batch_tokens, batch.cost) // 2
                remaining = [job for part in (batch, *waiting) for job in part.jobs]
                waiting = deque(make_batches(remaining, self.batch_tokens))
                continue
            done.append(batch)
            outputs.append(output)
            if self.progress is not None:
                self.progress.update(len(batch.jobs))
        return done, outputs

    def _output(self, batch: Batch) -> Tensor | None:
        """Log-probabilities or generated ids on the device; None where its memory is too small for the batch."""
        try:
            if batch.jobs[0].mode == "generate":
                return self.reader.greedy(batch, self.end_ids)
            return self.reader.answer_logprobs(batch)
        except torch.OutOfMemoryError:
            if len(batch.jobs) == 1:
                raise
        return None

    def _predictions(self, batches: list[Batch], outputs: list[Tensor]) -> Iterator[tuple[Job, Prediction]]:
        for batch, output in zip(batches, outputs, strict=True):
            values = iter(output.tolist())
            for job in batch.jobs:
                if job.mode == "generate":
                    # A row may not profit from a neighbour with longer options: cut at its own limit.
                    ids = list(takewhile(lambda token: token not in self.end_ids, next(values)[: job.limit]))
                    text = self.encoder.tokenizer.decode(ids, skip_special_tokens=True)
                    yield job, _judged(job, text, self.encoder)
                else:
                    logprobs = list(islice(values, len(job.answers)))
                    yield job, _likeliest(job, logprobs, self.normalize_length and job.mode == "text")


def _likeliest(job: Job, logprobs: list[float], per_token: bool) -> Prediction:
    lengths = [len(ids) if per_token else 1 for ids in job.answers]
    scores = [logprob / length for logprob, length in zip(logprobs, lengths, strict=True)]
    numbers = [index for index, score in enumerate(scores) if not math.isnan(score)]
    best = max(numbers, key=scores.__getitem__, default=-1)  # a model that has diverged answers nothing
    example = job.example
    return Prediction(
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


def _judged(job: Job, text: str, encoder: Encoder) -> Prediction:
    example, value = job.example, None
    if not example.options:
        points = free_credit(text, example)
        value = None if example.score is None else number_in(text)
        return Prediction(job.index, -1, -1, points >= 0.5, None, text, value, example.score, points)
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
