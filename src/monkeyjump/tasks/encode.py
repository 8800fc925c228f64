"""Examples to token ids: the chat template once, then the answer and eos. The loss is on the answer and eos only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.metadata import version
from itertools import islice
from typing import Any

import numpy as np

from monkeyjump.errors import ConfigError
from monkeyjump.tasks import cache
from monkeyjump.tasks.media import BadMediaError, Media
from monkeyjump.tasks.pictures import FRAMES, Pictures
from monkeyjump.tasks.task import ANSWER_FORMATS, AnswerFormat, BadMedia, Example

IGNORE = -100  # what cross-entropy skips
_MARK = "<the message>"
# a message with whatever a template may change
_UNUSUAL = "\"{{ 'é' }}\" <b>&amp;</b>\n\n\tB: </think> [INST] \\ %s 1,000.00 " * 500 + "end"
_WORTH_KEEPING = 200  # prompts that are kept on disk once they are tokenized
_SHOWN_PROBLEMS = 3  # bad pictures that are told; the others are counted
_CHUNK = 1024  # rows tokenized in one call: the tokenizer works in parallel inside


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """One training sequence: prompt, answer, eos. Its labels are what follows the prompt."""

    input_ids: np.ndarray  # int32 [T]
    prompt_length: int
    task_id: int
    media: tuple[Media, ...] = ()

    def __len__(self) -> int:
        return len(self.input_ids)


@dataclass
class EncodeCounts:
    """What encoding did to the data, per task: report it, nothing is lost silently."""

    encoded: Counter[str] = field(default_factory=Counter)
    truncated: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    unreadable: Counter[str] = field(default_factory=Counter)


Rows = list[np.ndarray | None]  # of ids; None for an example that is left out


class Encoder:
    """Turns examples into ids for one tokenizer, answer format and length.

    A text over `max_length` loses the far end of its context, by the same amount in training and evaluation (room is
    kept for the longest option). One that does not fit without any context is dropped and counted.
    """

    def __init__(
        self,
        tokenizer: Any,
        task_ids: Mapping[str, int] | None = None,
        *,
        max_length: int = 1024,
        answer_format: AnswerFormat = "letter",
        bad_media: BadMedia = "raise",
        frames: int = FRAMES,
    ) -> None:
        visual = tokenizer if hasattr(tokenizer, "processor") else None
        tokenizer = tokenizer if visual is None else visual.tokenizer
        problems = []
        if answer_format not in ANSWER_FORMATS:
            problems.append(f"answer_format={answer_format!r} must be one of {', '.join(ANSWER_FORMATS)}.")
        if max_length < 8:
            problems.append(f"max_length={max_length} must be at least 8 tokens; 1024 is the default.")
        if getattr(tokenizer, "eos_token_id", None) is None:
            problems.append("tokenizer: it has no eos token, so answers cannot end. Set tokenizer.eos_token.")
        if getattr(tokenizer, "chat_template", None) is None:
            problems.append("tokenizer: it has no chat template. Load it with monkeyjump.models.load_tokenizer.")
        if problems:
            raise ConfigError(problems)
        self.tokenizer, self.task_ids = tokenizer, dict(task_ids or {})
        self.max_length, self.answer_format, self.bad_media = max_length, answer_format, bad_media
        self.pictures = None if visual is None else Pictures(visual, frames)
        self.counts = EncodeCounts()
        self._around: dict[tuple[str, ...], list[str]] = {}

    # -- the pieces evaluation needs ------------------------------------------------------------

    def target_ids(self, texts: Iterable[str]) -> dict[str, list[int]]:
        """Answers as ids, closed with eos; each is tokenized once."""
        unique = list(dict.fromkeys(texts))
        return {text: [*ids, self.tokenizer.eos_token_id] for text, ids in zip(unique, self._ids(unique), strict=True)}

    def prompt_ids(self, examples: Sequence[Example]) -> list[list[int] | None]:
        """The prompts of a task's examples, their contexts cut if need be, from the cache where they were made before.

        None stands for one that does not fit even without context, or whose pictures cannot be used: it is counted.
        """

        def make() -> list[list[int] | None]:
            starts = range(0, len(examples), _CHUNK)
            return [ids for start in starts for ids in self._prompts(examples[start : start + _CHUNK])]

        kept = len(examples) >= _WORTH_KEEPING and not any(example.media for example in examples)
        if not kept or self.identity is None:
            return make()
        rows = self.kept(
            cache.key("prompts", self.identity, *examples),
            examples[0].task,
            lambda: [None if ids is None else np.array(ids, dtype=np.int32) for ids in make()],
        )
        return [None if row is None else row.tolist() for row in rows]

    def kept(
        self, name: str, task: str, make: Callable[[], Rows], unchanged: Callable[[], bool] = lambda: True
    ) -> Rows:
        """Rows of numbers from the cache, with the counts of their making; those made now are kept if `unchanged`."""
        counts = (self.counts.encoded, self.counts.truncated, self.counts.dropped)
        content = cache.read(name)
        if content is not None:
            stored = np.frombuffer(content, dtype=np.int32)
            for count, more in zip(counts, stored[:3].tolist(), strict=True):
                count.update({task: more} if more else {})
            lengths, numbers = np.split(stored[4:], [stored[3]])
            ends = lengths.clip(0).cumsum().tolist()
            return [None if n < 0 else numbers[end - n : end] for n, end in zip(lengths.tolist(), ends, strict=True)]
        before = [count[task] for count in counts]
        rows = make()
        if unchanged():
            head = [count[task] - known for count, known in zip(counts, before, strict=True)]
            head += [len(rows), *(-1 if row is None else len(row) for row in rows)]
            cache.write(
                name, np.concatenate([head, *(row for row in rows if row is not None)]).astype(np.int32).tobytes()
            )
        return rows

    def prompt_text(self, example: Example) -> str:
        """The whole prompt as text: what the chat template makes of the question."""
        message = example.prompt(self.answer_format)
        kinds = tuple(media.kind for media in example.media)
        if kinds not in self._around:
            # What the template puts before and after a message; empty for one that also changes messages. Putting them
            # around a text takes a thirtieth of the time of the template.
            around = self._rendered(_MARK, example.media).split(_MARK)
            same = len(around) == 2 and self._rendered(_UNUSUAL, example.media) == _UNUSUAL.join(around)
            self._around[kinds] = around if same else []
        if self._around[kinds] and message == message.strip():  # templates often trim
            return message.join(self._around[kinds])
        return self._rendered(message, example.media)

    def _rendered(self, message: str, media: Sequence[Media]) -> str:
        return self.rendered([{"role": "user", "content": message}], media)

    def rendered(self, messages: Sequence[Mapping[str, str]], media: Sequence[Media]) -> str:
        """A conversation in the chat template, up to where the answer begins; pictures stand before its first text."""
        given: list[dict[str, Any]] = [dict(message) for message in messages]
        if self.pictures is not None:
            for message in given:
                message["content"] = [{"type": "text", "text": message["content"]}]
            given[0]["content"][:0] = [{"type": each.kind} for each in media]
        return self.tokenizer.apply_chat_template(given, tokenize=False, add_generation_prompt=True)

    def _prompts(self, examples: Sequence[Example]) -> list[list[int] | None]:
        """The ids of prompts that fit; None for others, which are counted."""
        if self.pictures is None and any(example.media for example in examples):
            raise ConfigError(
                f"task {examples[0].task!r} shows pictures, and the model reads none. Use one that does (vlm-tiny runs "
                "anywhere), or leave the task out."
            )
        bad = self._bad(examples)
        self.counts.unreadable.update(example.task for example, is_bad in zip(examples, bad, strict=True) if is_bad)
        good = [example for example, is_bad in zip(examples, bad, strict=True) if not is_bad]
        fitted = iter([self._fit(*each) for each in zip(good, self._whole(good), strict=True)])
        return [None if is_bad else next(fitted) for is_bad in bad]

    def _whole(self, examples: Sequence[Example]) -> list[list[int]]:
        """The ids of prompts, however long, with the placeholders of their pictures."""
        texts = [self.prompt_text(example) for example in examples]
        return [
            self.pictures.ids(text, ids, example.media) if self.pictures is not None and example.media else ids
            for example, text, ids in zip(examples, texts, self._ids(texts), strict=True)
        ]

    def _bad(self, examples: Sequence[Example]) -> list[bool]:
        """Which examples are left out because of their pictures. Where that was not asked for, they are one error."""
        if self.pictures is None:
            return [False] * len(examples)
        self.pictures.measure((media for example in examples for media in example.media), examples[0].task)
        found = [self.pictures.problem(each.media, each.prompt(self.answer_format)) for each in examples]
        told = [f"task {each.task!r}: {problem}" for each, problem in zip(examples, found, strict=True) if problem]
        if told and self.bad_media == "raise":
            told = list(dict.fromkeys(told))
            more = len(told) - _SHOWN_PROBLEMS
            told[_SHOWN_PROBLEMS:] = [f"{more} more rows like these are bad."] if more > 0 else []
            raise BadMediaError(told)
        return [problem is not None for problem in found]

    # -- training sequences ---------------------------------------------------------------------

    def encode_all(self, examples: Iterable[Example]) -> list[Encoded]:
        return list(self.stream(examples))

    def stream(self, examples: Iterable[Example], chunk_size: int = _CHUNK) -> Iterator[Encoded]:
        """Sequences in the order of the examples, dropped ones left out; holds at most a chunk in memory."""
        source, eos = iter(examples), self.tokenizer.eos_token_id
        while chunk := list(islice(source, chunk_size)):
            answers = self._ids([example.target(self.answer_format) for example in chunk])
            for example, prompt, answer in zip(chunk, self._prompts(chunk), answers, strict=True):
                if prompt is not None:
                    self.counts.encoded[example.task] += 1
                    sequence = np.array([*prompt, *answer, eos], dtype=np.int32)
                    yield Encoded(sequence, len(prompt), self.task_ids.get(example.task, 0), example.media)

    @cached_property
    def identity(self) -> str | None:
        """A hash of all that ids follow from beside the example; None for a tokenizer that does not tell how it works.

        A prompt is rendered for it, because templates may read the clock.
        """
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            return None
        rendered = self._ids([self.prompt_text(Example(question="?"))])  # first: it sets the backend's own options
        names = ("chat_template", "special_tokens_map", "eos_token_id", "split_special_tokens")
        known = [getattr(self.tokenizer, name, None) for name in names]
        packages = [version(name) for name in ("transformers", "tokenizers")]
        settings = (self.answer_format, self.max_length)
        return cache.key(type(self.tokenizer), backend.to_str(), rendered, known, settings, packages)

    # -- fitting --------------------------------------------------------------------------------

    def _ids(self, texts: list[str]) -> list[list[int]]:
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is not None and len(texts) > 1:  # without offsets, which nobody reads here: half the time
            first = self.tokenizer(texts[:1], add_special_tokens=False)["input_ids"]  # it sets the backend's options
            found = [each.ids for each in backend.encode_batch_fast(texts, add_special_tokens=False)]
            if found[:1] == first:  # or the tokenizer does more than its backend
                return found
        return self.tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []

    def _fit(self, example: Example, ids: list[int]) -> list[int] | None:
        targets = example.targets(self.answer_format)
        if len(ids) + 1 + max(len(text.encode()) for text in targets) <= self.max_length:
            return ids  # the usual case, without tokenizing every option: there are never more tokens than bytes
        room = self.max_length - max(map(len, self.target_ids(targets).values()))
        if len(ids) <= room:
            return ids
        (bare,) = self._whole([replace(example, context="")])
        if len(bare) > room:
            self.counts.dropped[example.task] += 1
            return None
        self.counts.truncated[example.task] += 1
        spans = self._spans(example.context)
        keep = len(spans) - (len(ids) - room)
        while keep > 0:
            if example.cut == "start":
                context = example.context[spans[-keep][0] :].lstrip()
            else:
                context = example.context[: spans[keep - 1][1]].rstrip()
            (cut,) = self._whole([replace(example, context=context)])
            if len(cut) <= room:
                return cut
            keep -= len(cut) - room
        return bare

    def _spans(self, context: str) -> list[tuple[int, int]]:
        """Where each token of the context begins and ends in the text: cuts fall between tokens."""
        if getattr(self.tokenizer, "is_fast", False):
            return self.tokenizer(context, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        return [(index, index + 1) for index in range(len(context))]
