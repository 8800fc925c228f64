"""What a model answers, in one of three ways.

| mode | a prediction is |
|---|---|
| `letter` | the option whose letter is the most likely beginning of the answer |
| `text` | the option whose text, end token included, is the most likely answer per token |
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import chain, islice, takewhile
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from monkeyjump.errors import MonkeyJumpWarning
from monkeyjump.evaluation.answers import free_credit, match_option, number_in
from monkeyjump.evaluation.decode import Decoder
from monkeyjump.evaluation.forward import AnswerReader, evaluating
from monkeyjump.evaluation.jobs import Batch, Job, Mode, make_batches, make_jobs, waves
from monkeyjump.tasks.encode import EncodeCounts, Encoder
from monkeyjump.tasks.task import Example

NO_ANSWER = "(no valid answer)"  # counted as an answer of its own where no option was named
Sides = Mapping[str, Callable[[], AbstractContextManager[Any]]]  # what is scored, and what switches the model to it


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

    @property
    def nll(self) -> float | None:
        """Minus the log of the right option's share among the options, in nats; None where options have no scores."""
        if self.scores is None or not 0 <= self.gold < len(self.scores):
            return None
        top = max(self.scores)
        return top + math.log(sum(math.exp(score - top) for score in self.scores)) - self.scores[self.gold]


def predict(
    model: nn.Module,
    encoder: Encoder,
    examples: Sequence[Example],
    mode: Mode,
    batch_tokens: int | None = None,
) -> list[Prediction]:
    """Predictions in the order of the examples; those the encoder drops as too long are left out (it counts them)."""
    jobs = make_jobs(encoder, examples, mode)
    found = Scorer(model, encoder, batch_tokens).score([jobs], {"": nullcontext})[""]
    return [found[job] for job in jobs]


class Scorer:
    """Runs jobs through a model, once for each side: the base model, the adapter."""

    def __init__(
        self, model: nn.Module, encoder: Encoder, batch_tokens: int | None = None, progress: Any = None
    ) -> None:
        """`batch_tokens`: padded tokens of one forward; None: by device. `progress`: a tqdm bar."""
        self.reader = AnswerReader(model, encoder.tokenizer.pad_token_id or 0, encoder.pictures)
        self.encoder = encoder
        self.batch_tokens = batch_tokens or self.reader.batch_tokens()
        self.progress = tqdm(disable=True) if progress is None else progress
        self.end_ids = end_ids(model, encoder.tokenizer)

    def score(self, lists: Iterable[list[Job]], sides: Sides) -> dict[str, dict[Job, Prediction]]:
        """The predictions of every side.

        Lists may be made beside the device: while all sides run one wave of them, a thread puts the next into batches
        and another reads results.
        """
        allowed, found = self.batch_tokens, {side: list[Future[list[tuple[Job, Prediction]]]]() for side in sides}
        parts = waves(lists, self.batch_tokens)
        with evaluating(self.reader.model), ThreadPoolExecutor(2) as pool:
            coming = pool.submit(next, parts, None)
            while (batches := coming.result()) is not None:
                coming = pool.submit(next, parts, None)
                for side, switched in sides.items():
                    self.progress.set_description(side, refresh=False)
                    with switched():
                        batches, outputs = self.run(batches)
                    found[side].append(pool.submit(self._predictions, batches, _fetched(outputs)))
        if self.batch_tokens < allowed:
            warnings.warn(
                f"batches of {allowed:,} tokens did not fit in memory and were made smaller: "
                f"batch_tokens={self.batch_tokens} fits.",
                MonkeyJumpWarning,
                stacklevel=2,
            )
        return {side: dict(chain.from_iterable(part.result() for part in parts)) for side, parts in found.items()}

    def run(self, batches: Sequence[Batch]) -> tuple[list[Batch], list[Tensor]]:
        """Start all batches without waiting; return those that ran and what they will hold.

        Where memory runs out, the batch and all that follow are made again with half as many tokens.
        """
        waiting, done, outputs = deque(batches), [], []
        decoder = Decoder(self.reader, self.end_ids) if any(b.jobs[0].mode == "generate" for b in batches) else None
        while waiting:
            batch, output = waiting.popleft(), None
            answer = decoder.answers if decoder and batch.jobs[0].mode == "generate" else self.reader.answer_logprobs
            try:
                output = answer(batch)
            except torch.OutOfMemoryError:
                if len(batch.jobs) == 1:
                    raise
            if output is None:  # outside of the handler, which would hold what the forward has made
                self.batch_tokens = min(self.batch_tokens, batch.cost) // 2
                remaining = [job for part in (batch, *waiting) for job in part.jobs]
                waiting = deque(make_batches(remaining, self.batch_tokens))
                continue
            done.append(batch)
            outputs.append(output)
            self.progress.update(len(batch.jobs))
        return done, outputs

    def _predictions(self, batches: list[Batch], outputs: Iterator[Tensor]) -> list[tuple[Job, Prediction]]:
        found = []
        for batch, output in zip(batches, outputs, strict=True):
            values = iter(output.tolist())
            for job in batch.jobs:
                if job.mode == "generate":
                    # A row may not profit from a neighbour with longer options: cut at its own limit.
                    ids = list(takewhile(lambda token: token not in self.end_ids, next(values)[: job.limit]))
                    text = self.encoder.tokenizer.decode(ids, skip_special_tokens=True)
                    found.append((job, _judged(job, text, self.encoder)))
                else:
                    logprobs = list(islice(values, len(job.answers)))
                    found.append((job, _likeliest(job, logprobs)))
        return found


@dataclass
class Memory:
    """What scoring adapters of one base model needs only once: the jobs of examples, and the base model's answers.

    Examples are recognised by their content, so that other rows, as another seed may give, are encoded and scored.
    """

    _base: dict[Job, Prediction] = field(default_factory=dict)
    _encoded: dict[Any, list[tuple[list[Example], list[Job], EncodeCounts]]] = field(default_factory=dict)

    def jobs(self, encoder: Encoder, examples: list[Example], mode: Mode) -> list[Job]:
        """The same as `make_jobs`, with its counts."""
        task, counts = examples[0].task, encoder.counts
        key = task, encoder.task_ids.get(task), encoder.max_length, encoder.answer_format, mode
        for seen, jobs, known in self._encoded.setdefault(key, []):
            if seen == examples:
                for name, count in vars(counts).items():
                    count[task] += getattr(known, name)[task]
                return jobs
        jobs = make_jobs(encoder, examples, mode)
        self._encoded[key].append((examples, jobs, deepcopy(counts)))
        return jobs

    def score(self, scorer: Scorer, lists: list[Future[list[Job]]], sides: Sides) -> dict[str, dict[Job, Prediction]]:
        """The same as `scorer.score`, without the base model where it has answered all of this before."""
        known = "base" in sides and all(job in self._base for jobs in lists for job in jobs.result())
        if known:
            scorer.progress.update(sum(len(jobs.result()) for jobs in lists))
        left = {side: switched for side, switched in sides.items() if not (known and side == "base")}
        found = scorer.score((jobs.result() for jobs in lists), left)
        self._base.update(found.get("base", {}))
        return {**({"base": self._base} if known else {}), **found}


def _fetched(outputs: list[Tensor]) -> Iterator[Tensor]:
    """Outputs on the host. Copies are started here; who reads the first waits for them, and for no later work."""
    copies = [output.to("cpu", non_blocking=True) for output in outputs]
    copied = torch.cuda.Event() if outputs and outputs[0].is_cuda else None
    if copied is not None:
        copied.record()

    def read() -> Iterator[Tensor]:
        if copied is not None:
            copied.synchronize()
        yield from copies

    return read()


def _likeliest(job: Job, logprobs: list[float]) -> Prediction:
    scores, example = logprobs, job.example
    if job.mode == "text":
        scores = [logprob / len(ids) for logprob, ids in zip(logprobs, job.answers, strict=True)]
    numbers = (index for index, score in enumerate(scores) if not math.isnan(score))
    best = max(numbers, key=scores.__getitem__, default=-1)  # a model that has diverged answers nothing
    value = None
    if example.score is not None and best >= 0:  # the mean of the options, weighted by their probabilities
        weights = [math.exp(logprob - max(logprobs)) for logprob in logprobs]
        value = sum(w * float(text) for w, text in zip(weights, example.options, strict=True)) / sum(weights)
    correct = best == example.label
    return Prediction(job.index, best, example.label, correct, tuple(scores), None, value, example.score)


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
