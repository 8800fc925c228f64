"""What is to be answered, encoded once, and how it is put into batches.

Examples of all tasks make one list. It is sorted by kind and length, so that even small tasks fill large batches and
little of a batch is padding. The same batches serve the base model and its adapter. A long list comes in several waves:
while the device runs one, the next is encoded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from monkeyjump.tasks.encode import Encoder
from monkeyjump.tasks.task import Example

if TYPE_CHECKING:
    from monkeyjump.evaluation.forward import Inputs

Mode = Literal["letter", "text", "generate"]
MODES: tuple[Mode, ...] = ("letter", "text", "generate")
FREE_ANSWER_TOKENS = 64  # what a free answer may take
_WAVE = 4  # full batches of a wave, once the device is busy
_ROOM = 8  # tokens beyond the longest option: "The answer is B."
# The shortest prompt of a large batch, as a part of the longest; rows that generate cost more than their prompts.
_ALIKE, _ALIKE_GENERATED = 0.8, 0.5
_GENERATED_ROWS = 256  # more would fill the memory with the cache, and tokens are not made faster
_LOGIT_WEIGHT = 4  # an answer position holds a row of logits: it counts as this many plain tokens of a batch
_CACHED_PER_TOKEN = 4  # every answer has its copy of the prompt's cache: as many cached tokens count as a plain one


@dataclass(frozen=True, eq=False)
class Job:
    """One example as token ids."""

    index: int  # place of the example among those of its task
    example: Example
    mode: Mode
    prompt: list[int]
    answers: list[list[int]]  # what the options are scored by; in generation their lengths set the limit
    task_id: int

    @cached_property
    def longest(self) -> int:
        return max(map(len, self.answers))

    @property
    def limit(self) -> int:
        """The most tokens that are generated."""
        return self.longest + _ROOM if self.example.options else FREE_ANSWER_TOKENS

    @cached_property
    def kind(self) -> tuple[bool, int]:
        """Jobs of one kind share a batch: whether they generate, and roughly how much is run after their prompts."""
        if self.mode == "generate":
            return True, self.limit.bit_length()
        return False, (self.longest - 1).bit_length()


@dataclass
class Batch:
    """Jobs of one kind that are run together."""

    jobs: list[Job]
    cost: int  # in padded tokens
    full: bool = False  # whether another job was there that did not fit
    inputs: Inputs | None = None  # on the device, made when they are first needed

    @property
    def continues(self) -> bool:
        """Whether answers are run after the prompts, on their KV cache."""
        return self.jobs[0].kind[1] > 0


def make_jobs(encoder: Encoder, examples: Sequence[Example], mode: Mode) -> list[Job]:
    """Encode the examples; those that the encoder drops as too long are left out (it counts them)."""
    form: Literal["letter", "text"] = "letter" if mode == "letter" else "text"
    options = [example.targets(form) for example in examples]
    ids = encoder.target_ids(text for texts in options for text in texts)
    if mode == "letter":
        ids = {text: found[:-1] for text, found in ids.items()}  # without the end token
    return [
        Job(index, example, mode, prompt, [ids[text] for text in texts], encoder.task_ids.get(example.task, 0))
        for index, (example, prompt, texts) in enumerate(
            zip(examples, encoder.prompt_ids(examples), options, strict=True)
        )
        if prompt is not None
    ]


def waves(lists: Iterable[list[Job]], batch_tokens: int) -> Iterator[list[Batch]]:
    """Batches of lists that come one after another, as soon as there are enough: for one batch, then two, then four.

    Small waves let the device begin at once; of large ones less is padding. Jobs that fill no batch wait for others of
    their length, because a small batch takes the host as long as a large one.
    """
    held: list[Job] = []
    wanted = 1
    for jobs in lists:
        held = held + jobs
        if sum(len(job.prompt) for job in held) < wanted * batch_tokens:
            continue
        made = make_batches(held, batch_tokens)
        enough = batch_tokens // 4 if wanted == 1 else math.inf  # at first the device has nothing to do
        ready = [batch for batch in made if batch.full or batch.cost >= enough]
        if ready:
            yield ready
            held = [job for batch in made if not batch.full and batch.cost < enough for job in batch.jobs]
            wanted = min(2 * wanted, _WAVE)
    if held:
        yield make_batches(held, batch_tokens)


def make_batches(jobs: Iterable[Job], batch_tokens: int) -> list[Batch]:
    """Batches of one kind and similar length, the longest first: what does not fit in memory shows at once."""
    batches: list[Batch] = []
    width = longest = answers = 0
    for job in sorted(jobs, key=lambda job: (job.kind, len(job.prompt), job.longest), reverse=True):
        if batches and batches[-1].jobs[0].kind == job.kind:
            batch, longest, answers = batches[-1], max(longest, job.longest), answers + len(job.answers)
            cost = _cost(job.kind, len(batch.jobs) + 1, width, answers, longest)
            # A batch that is large enough ends before its prompts get much shorter.
            part = _ALIKE_GENERATED if job.kind[0] else _ALIKE
            alike = len(job.prompt) >= part * width or batch.cost < batch_tokens // 4
            # Rows that generate are a power of two: a recorded step then serves many batches without idle rows.
            most = min(_GENERATED_ROWS, 1 << max(0, (batch_tokens // width).bit_length() - 1))
            fits = cost <= batch_tokens and not (job.kind[0] and len(batch.jobs) >= most)
            if fits and alike:
                batch.jobs.append(job)
                batch.cost = cost
                continue
            batch.full = not fits
        width, longest, answers = len(job.prompt), job.longest, len(job.answers)
        batches.append(Batch([job], _cost(job.kind, 1, width, answers, longest)))
    return batches


def _cost(kind: tuple[bool, int], rows: int, width: int, answers: int, longest: int) -> int:
    generates, continued = kind
    if generates or not continued:
        return rows * max(width, _LOGIT_WEIGHT)
    return max(rows * width, answers * (width + longest) // _CACHED_PER_TOKEN, answers * longest * _LOGIT_WEIGHT)
