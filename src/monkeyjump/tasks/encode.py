"""Examples to token ids: the chat template once, then the answer and eos. The loss is on the answer and eos only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from itertools import accumulate, islice
from typing import Any, Literal

import numpy as np

from monkeyjump.errors import ConfigError
from monkeyjump.tasks import cache
from monkeyjump.tasks.media import BadMediaError, Media
from monkeyjump.tasks.pictures import FRAMES, Pictures
from monkeyjump.tasks.task import ANSWER_FORMATS, AnswerFormat, Example

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


class Encoder:
    """Turns examples into ids for one tokenizer, answer format and length.

    A text over `max_length` loses the far end of its context, by the same amount in training and evaluation (room is
    kept for the longest option). One that does not fit without any context is dropped and counted, or raises.
    """

    def __init__(
        self,
        tokenizer: Any,
        task_ids: Mapping[str, int] | None = None,
        *,
        max_length: int = 1024,
        answer_format: AnswerFormat = "letter",
        too_long: Literal["drop", "raise"] = "drop",
        bad_media: Literal["raise", "drop"] = "raise",
        frames: int = FRAMES,
        system: str | None = None,
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
        self.tokenizer = tokenizer
        self.task_ids = dict(task_ids or {})
        self.max_length = max_length
        self.answer_format = answer_format
        self.too_long = too_long
        self.bad_media = bad_media
        self.pictures = None if visual is None else Pictures(visual, frames)
        self.system = system
        self.counts = EncodeCounts()
        self._around: dict[tuple[str, ...], list[str]] = {}

    # -- the pieces evaluation needs ------------------------------------------------------------

    def target_ids(self, text: str) -> list[int]:
        """An answer as ids, closed with eos."""
        return [*self._ids([text])[0], self.tokenizer.eos_token_id]

    def prompt_ids(self, example: Example) -> list[int] | None:
        """The prompt, its context cut if need be; None if it does not fit even without context (counted as dropped)."""
        return next(iter(self._prompts([example])))

    def many_target_ids(self, texts: Iterable[str]) -> dict[str, list[int]]:
        """`target_ids` of many answers, each tokenized once."""
        unique = list(dict.fromkeys(texts))
        return {text: [*ids, self.tokenizer.eos_token_id] for text, ids in zip(unique, self._ids(unique), strict=True)}

    def many_prompt_ids(self, examples: Sequence[Example]) -> list[list[int] | None]:
        """`prompt_ids` of many examples of one task, from the cache where they were made before."""
        task, counts = examples[0].task, (self.counts.truncated, self.counts.dropped)
        kept = len(examples) >= _WORTH_KEEPING and not any(example.media for example in examples)
        identity = self._identity if kept else None
        name = "" if identity is None else cache.key("prompts", identity, *examples)
        content = cache.read(name) if name else None
        if content is not None:
            stored = np.frombuffer(content, dtype=np.int32)
            for count, more in zip(counts, stored[:2].tolist(), strict=True):
                count.update({task: more} if more else {})
            lengths, ids = stored[2 : 2 + len(examples)].tolist(), stored[2 + len(examples) :].tolist()
            ends = accumulate(max(length, 0) for length in lengths)
            return [None if n < 0 else ids[end - n : end] for n, end in zip(lengths, ends, strict=True)]
        before, found = [count[task] for count in counts], list[list[int] | None]()
        for start in range(0, len(examples), _CHUNK):
            chunk = examples[start : start + _CHUNK]
            found += self._prompts(chunk)
        if name:
            numbers = [count[task] - known for count, known in zip(counts, before, strict=True)]
            numbers += [-1 if prompt is None else len(prompt) for prompt in found]
            cache.write(name, np.concatenate([numbers, *filter(None, found)]).astype(np.int32).tobytes())
        return found

    def prompt_text(self, example: Example, context: str | None = None) -> str:
        """The whole prompt as text: what the chat template makes of the question."""
        message = example.prompt(self.answer_format, context)
        kinds = tuple(media.kind for media in example.media)
        if kinds not in self._around:
            self._around[kinds] = self._find_around(example.media)
        if self._around[kinds] and message == message.strip():  # templates often trim
            return message.join(self._around[kinds])
        return self._rendered(message, example.media)

    def _rendered(self, message: str, media: Sequence[Media] = ()) -> str:
        messages: list[dict[str, Any]] = [] if self.system is None else [{"role": "system", "content": self.system}]
        content = message if self.pictures is None else self.pictures.content(media, message)
        messages.append({"role": "user", "content": content})
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    def _find_around(self, media: Sequence[Media]) -> list[str]:
        """What the template puts before and after a message; empty for one that also changes messages.

        Putting them around a text takes a thirtieth of the time of the template.
        """
        around = self._rendered(_MARK, media).split(_MARK)
        same = len(around) == 2 and self._rendered(_UNUSUAL, media) == _UNUSUAL.join(around)
        return around if same else []

    def _prompts(self, examples: Sequence[Example]) -> list[list[int] | None]:
        """The ids of prompts that fit; None for others, which are counted."""
        shown = [media for example in examples for media in example.media]
        if shown and self.pictures is None:
            raise ConfigError(
                f"task {examples[0].task!r} shows pictures, and the model reads none. Use one that does (vlm-tiny runs "
                "anywhere), or leave the task out."
            )
        bad = self._bad(examples)
        texts = [self.prompt_text(example) for example in examples]
        return [self._prompt(*each) for each in zip(examples, texts, self._ids(texts), bad, strict=True)]

    def _prompt(self, example: Example, text: str, ids: list[int], bad: bool) -> list[int] | None:
        if bad:
            self.counts.unreadable[example.task] += 1
            return None
        if example.media and self.pictures is not None:
            ids = self.pictures.ids(text, ids, example.media)
        return self._fit(example, ids)

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

    def _prompt_with(self, example: Example, context: str) -> list[int]:
        text = self.prompt_text(example, context=context)
        ids = self._ids([text])[0]
        return ids if self.pictures is None or not example.media else self.pictures.ids(text, ids, example.media)

    # -- training sequences ---------------------------------------------------------------------

    def encode(self, example: Example) -> Encoded | None:
        """One sequence, or None when it was dropped."""
        return next(self.stream([example]), None)

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
    def _identity(self) -> str | None:
        return self.identity()

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
        settings = (self.answer_format, self.max_length, self.too_long, self.system)
        packages = [version(name) for name in ("transformers", "tokenizers")]
        return cache.key(type(self.tokenizer), backend.to_str(), rendered, known, settings, packages)

    # -- fitting --------------------------------------------------------------------------------

    def _ids(self, texts: list[str]) -> list[list[int]]:
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is not None and len(texts) > 1:  # without offsets, which nobody reads here: half the time
            first = self.tokenizer(texts[:1], add_special_tokens=False)["input_ids"]  # it sets the backend's options
            found = [each.ids for each in backend.encode_batch_fast(texts, add_special_tokens=False)]
            if found[:1] == first:  # or the tokenizer does more than its backend
                return found
        return self.tokenizer(texts, add_special_tokens=False)["input_ids"]

    def _fit(self, example: Example, ids: list[int]) -> list[int] | None:
        targets = example.targets(self.answer_format)
        if len(ids) + 1 + max(len(text.encode()) for text in targets) <= self.max_length:
            return ids  # the usual case, without tokenizing every option: there are never more tokens than bytes
        longest = max(len(self.target_ids(text)) for text in targets)
        room = self.max_length - longest
        if len(ids) <= room:
            return ids
        bare = self._prompt_with(example, "")
        if len(bare) > room:
            self._drop(example, len(bare) + longest)
            return None
        self.counts.truncated[example.task] += 1
        pieces = self._spans(example.context)
        keep = len(pieces) - (len(ids) - room)
        while keep > 0:
            cut = self._prompt_with(example, self._cut(example, pieces, keep))
            if len(cut) <= room:
                return cut
            keep -= len(cut) - room
        return bare

    def _drop(self, example: Example, needed: int) -> None:
        if self.too_long == "raise":
            raise ConfigError(
                f"task {example.task!r}: question, options and answer need {needed} tokens without any context, "
                f"max_length={self.max_length} allows fewer. Raise max_length, or drop such rows with too_long='drop'. "
                f"The question begins: {example.question[:80]!r}",
                title="text too long",
            )
        self.counts.dropped[example.task] += 1

    def _spans(self, context: str) -> list[tuple[int, int]]:
        """Where each token of the context begins and ends in the text: cuts fall between tokens."""
        if getattr(self.tokenizer, "is_fast", False):
            return self.tokenizer(context, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        return [(index, index + 1) for index in range(len(context))]

    @staticmethod
    def _cut(example: Example, spans: list[tuple[int, int]], keep: int) -> str:
        if example.cut == "start":
            return example.context[spans[-keep][0] :].lstrip()
        return example.context[: spans[keep - 1][1]].rstrip()
