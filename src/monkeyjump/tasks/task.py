"""A task is a row: where its data is, which columns it needs, how a data row becomes a question, how it is scored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from monkeyjump.errors import ConfigError
from monkeyjump.tasks.cells import BadLabelError, Row, has_column, lookup
from monkeyjump.tasks.media import BadMediaError, Media, media_in

Split = Literal["train", "validation", "test"]
AnswerFormat = Literal["letter", "text"]
Metric = Literal["accuracy", "spearman", "exact_match", "relaxed_accuracy", "vqa_accuracy"]
Modality = Literal["text", "image", "video"]
BadMedia = Literal["raise", "drop"]

SPLITS: tuple[Split, ...] = ("train", "validation", "test")
ANSWER_FORMATS: tuple[AnswerFormat, ...] = ("letter", "text")
MODALITIES: tuple[Modality, ...] = get_args(Modality)
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True, slots=True)
class Example:
    """One question. Only `context` may be cut when a text is too long; question, options and answer never are."""

    question: str
    options: tuple[str, ...] = ()  # empty: a free answer
    label: int = -1  # index of the right option; -1 for a free answer
    context: str = ""
    free_answer: str = ""
    score: float | None = None  # the gold number of a regression task; the options are then numbers too
    cut: Literal["end", "start"] = "end"  # which end of the context is given up first
    task: str = ""
    answers: tuple[str, ...] = ()  # what several people answered; `free_answer` is then the most frequent
    metric: Metric = "exact_match"  # how a free answer is judged
    media: tuple[Media, ...] = ()  # pictures and clips, in the order in which the message shows them before its text

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Example:
        """The example that `dataclasses.asdict` and JSON have been through."""
        lists = {name: tuple(fields[name]) for name in ("options", "answers")}
        return cls(**fields | lists | {"media": tuple(Media(**media) for media in fields["media"])})

    @property
    def lettered(self) -> bool:
        """Whether letters name the options; there are not enough for a hundred classes, which are named by their text.

        Such options are not listed in the prompt: the list would be longer than all else.
        """
        return 0 < len(self.options) <= len(LETTERS)

    @property
    def answer(self) -> str:
        """The right answer in words."""
        return self.options[self.label] if self.options else self.free_answer

    @property
    def letter(self) -> str:
        """The right option's letter; empty where there is none."""
        return LETTERS[self.label] if self.lettered else ""

    def target(self, answer_format: AnswerFormat) -> str:
        """What the model is taught to say."""
        return self.letter if answer_format == "letter" and self.lettered else self.answer

    def targets(self, answer_format: AnswerFormat) -> list[str]:
        """What the model could say: one string per option, in order; for a free answer only the right one."""
        if not self.options:
            return [self.free_answer]
        by_letter = answer_format == "letter" and self.lettered
        return list(LETTERS[: len(self.options)]) if by_letter else list(self.options)

    def prompt(self, answer_format: AnswerFormat) -> str:
        """The user's message: context, question, lettered options, and which form of answer is wanted."""
        parts = [self.context, self.question] if self.context else [self.question]
        if self.lettered:
            parts += [f"{letter}. {option}" for letter, option in zip(LETTERS, self.options, strict=False)]
            parts.append("Answer with the letter." if answer_format == "letter" else "Answer with the option's text.")
        elif self.options:
            parts.append("Answer with the name alone.")
        return "\n".join(parts)


@dataclass(frozen=True)
class HubSource:
    """A dataset on the Hugging Face hub. `splits` maps our names to its names.

    A dataset with one labelled split gives `held_out` of it to test, by a hash; rows of one `group` stay together. One
    whose pictures are in archives is read from a copy; `unpack` says how to make it, `media` where paths count from.
    """

    id: str
    config: str | None = None
    revision: str = "main"
    splits: Mapping[str, str] = field(default_factory=lambda: {"train": "train", "test": "validation"})
    held_out: float = 0.0
    group: Callable[[Row], Any] | None = None
    media: str = ""
    unpack: str = ""


@dataclass(frozen=True)
class FileSource:
    """Files on this disk, one per split: what `tasks.files` can read."""

    files: Mapping[str, Path]


@dataclass(frozen=True)
class GeneratedSource:
    """Rows our own code makes, the same for the same seed."""

    generate: Callable[[str, int], Sequence[Row]]  # split, seed


Source = HubSource | FileSource | GeneratedSource


@dataclass(frozen=True)
class Task:
    """What the library knows about a task. `fields`: columns a row must have; "a|b" means either."""

    name: str
    family: str
    render: Callable[[Row], Example]
    fields: tuple[str, ...]
    source: Source
    options: tuple[str, ...] | None = None  # where every row has the same ones
    metric: Metric = "accuracy"
    modality: Modality = "text"
    description: str = ""
    media: tuple[str, ...] = ()  # columns that hold the pictures or clips, at least one of them in every row
    kind: Callable[[Row], Modality] | None = None  # where rows of one task differ: what this one has
    absent: tuple[Split, ...] = ()  # splits that do not exist and are passed over
    bad_media: BadMedia = "raise"  # drop: a row without its pictures gets one that nobody can read, and is left out

    def example(self, row: Row, number: int = 1, folder: Path | None = None) -> Example:
        """Render one row; `number` counts rows from 1, for error messages; paths of pictures count from `folder`."""
        self._check_columns(row, number)
        try:
            media = self._media(row, number, folder)
            example = replace(self.render(row), task=self.name, metric=self.metric, media=media)
        except BadLabelError as error:
            raise self._problem(f"row {number}: {error}. Correct the row, or the task's options.") from error
        if example.options and not 0 <= example.label < len(example.options):
            raise self._problem(
                f"row {number}: label {example.label} is outside the {len(example.options)} options "
                f"({', '.join(example.options)}). Correct the row, or the task's options."
            )
        return example

    def _media(self, row: Row, number: int, folder: Path | None) -> tuple[Media, ...]:
        kind = self.kind(row) if self.kind else self.modality
        if kind == "text":
            return ()
        try:
            found = tuple(media for column in self.media for media in media_in(lookup(row, column), kind, folder))
            if found:
                return found
            columns = " or ".join(map(repr, self.media))
            raise BadMediaError(f"there is no {kind} in {columns}. Fill the cell, or leave the row out.")
        except BadMediaError as error:
            if self.bad_media == "drop":
                return (Media(kind, b""),)
            raise BadMediaError(f"task {self.name!r}, row {number}: {error.problems[0]}") from error

    def _check_columns(self, row: Row, number: int) -> None:
        missing = [
            name
            for name in (*self.fields, *self.media)
            if name not in row and not any(has_column(row, part) for part in name.split("|"))
        ]
        if missing:
            names = ", ".join(repr(name.replace("|", "' or '")) for name in missing)
            there = ", ".join(map(repr, row)) or "none"
            raise self._problem(
                f"row {number} has no column {names}; its columns are {there}. Rename the column, or the task's field."
            )

    def _problem(self, message: str) -> ConfigError:
        return ConfigError(f"task {self.name!r}, {message}", title="bad data")
