"""Tasks of the user's own from templates, in a few lines of Python; `task_file` reads the same from YAML."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from monkeyjump.errors import ConfigError
from monkeyjump.tasks.cells import (
    BadLabelError,
    Row,
    as_position,
    columns_of,
    filled,
    index_of,
    listed,
    lookup,
    missing,
    most_frequent,
    number,
    opened,
)
from monkeyjump.tasks.files import class_names
from monkeyjump.tasks.task import LETTERS, SPLITS, Example, FileSource, HubSource, Metric, Source, Task

Options = Sequence[str] | Mapping[Any, str] | str | None


def simple_task(
    name: str,
    *,
    prompt: str,
    answer: str,
    data: Mapping[str, Any],
    options: Options = None,
    context: str = "",
    metric: Metric | None = None,
    **more: Any,
) -> Task:
    """A task from templates. `more`: family, description, and `image` or `video`, the columns of pictures or clips.

    `options` is a list of texts or templates, a mapping from labels to texts, or a column: one with a list, or with
    labels and texts (`choices: {label: [...], text: [...]}`). `answer` is a column with a label, a text, an index or a
    letter. Columns may be paths into nested ones, such as `choices.text`. Files of `data` may be folders that hold a
    folder of pictures for every class: their rows have the columns `image` and `label`, their options are the classes.
    """
    source = _source(data)
    folders = [path for path in source.files.values() if os.path.isdir(path)] if isinstance(source, FileSource) else []
    image, video = more.get("image"), more.get("video")
    if folders:
        image = image or "image"
        options = options or sorted({name for folder in folders for name in class_names(folder)})
    media = image or video or ()
    given = options if isinstance(options, Sequence) and not isinstance(options, str) else ()
    columns = [column for template in (prompt, context, *given) for column in _columns(template)]
    columns += [answer, *([options] if isinstance(options, str) else [])]
    return Task(
        name=name,
        family=more.get("family", "custom"),
        render=_renderer(prompt, context, options, answer),
        fields=tuple(dict.fromkeys(columns)),
        source=source,
        options=_fixed_options(options),
        metric=metric or ("accuracy" if options is not None else "exact_match"),
        description=more.get("description", ""),
        modality="image" if image else "video" if video else "text",
        media=(media,) if isinstance(media, str) else tuple(media),
    )


def _source(data: Mapping[str, Any]) -> Source:
    if data.get("hub"):
        splits: dict[str, str] = {split: data[split] for split in SPLITS if data.get(split)}
        splits = splits or {"train": "train", "test": "test"}
        return HubSource(data["hub"], data.get("config"), data.get("revision") or "main", splits)
    return FileSource({split: Path(path).expanduser() for split, path in data.items()})


def _columns(template: Any) -> list[str]:
    try:
        return columns_of(str(template))
    except ValueError as error:
        raise ConfigError(
            f"template {template!r} is not one ({error}): write columns as {{name}}, a brace itself twice.",
            title="bad task",
        ) from error


def _fixed_options(options: Options) -> tuple[str, ...] | None:
    """The options, where they do not depend on the row."""
    if options is None or isinstance(options, str):
        return None
    texts = tuple(map(str, options.values() if isinstance(options, Mapping) else options))
    return None if any(map(_columns, texts)) else texts


def _renderer(prompt: str, context: str, options: Options, answer: str) -> Callable[[Row], Example]:
    def render(row: Row) -> Example:
        question, cuttable = filled(prompt, row), filled(context, row)
        value = _found(row, answer)
        if missing(value) or value == "":
            raise BadLabelError(f"the answer (column {answer!r}) is empty")
        if options is None:
            several = opened(value)  # answers of several people
            answers = tuple(map(str, several)) if isinstance(several, list | tuple) and several else ()
            answer_text = most_frequent(answers) if answers else str(value)
            return Example(question=question, context=cuttable, free_answer=answer_text, answers=answers)
        texts, label = _choose(options, row, value)
        return Example(question=question, context=cuttable, options=texts, label=label, score=number(texts[label]))

    return render


def _found(row: Row, path: str) -> Any:
    try:
        return lookup(row, path)
    except LookupError as error:
        raise BadLabelError(str(error.args[0])) from error


def _choose(options: Options, row: Row, value: Any) -> tuple[tuple[str, ...], int]:
    """The options of a row and the index of its answer: a label of theirs; else a text, an index or a letter."""
    if isinstance(options, Mapping):
        texts = tuple(map(str, options.values()))
        labels = list(map(str, options))
        label = index_of(value, labels)
        if label is None:
            raise BadLabelError(f"answer {value!r} is not one of the keys {', '.join(labels)}")
        return texts, label
    if isinstance(options, str):
        labels, texts = _row_options(row, options)
    else:
        labels, texts = [], tuple(filled(str(option), row) for option in options or ())
    for label in (
        index_of(value, labels),
        index_of(value, texts),
        as_position(value, len(texts)),
        _letter(value, texts),
    ):
        if label is not None:
            return texts, label
    letters = f", nor a letter from A to {LETTERS[len(texts) - 1]}" if 0 < len(texts) <= len(LETTERS) else ""
    raise BadLabelError(
        f"answer {value!r} is neither one of the options ({', '.join(texts)}), "
        f"nor an index from 0 to {len(texts) - 1}{letters}"
    )


def _row_options(row: Row, path: str) -> tuple[list[str], tuple[str, ...]]:
    """Labels (often none) and texts of the options that a column holds.

    Beside plain lists: {label: [A, B], text: [x, y]}, which ARC and its kin have, nested, as a list of pairs, or
    flattened into the columns choices.label and choices.text; and {A: x, B: y}.
    """
    parent = path.removesuffix(".text")
    try:
        texts, labels = listed(lookup(row, f"{parent}.text"), path), f"{parent}.label"
    except LookupError:
        found = opened(_found(row, path))
        if isinstance(found, Mapping):
            return list(map(str, found)), tuple(map(str, found.values()))
        return [], tuple(map(str, listed(found, path)))
    try:
        return [str(label).strip() for label in listed(lookup(row, labels), labels)], tuple(map(str, texts))
    except LookupError:
        return [], tuple(map(str, texts))


def _letter(value: Any, texts: Sequence[str]) -> int | None:
    known, text = LETTERS[: len(texts)] if len(texts) <= len(LETTERS) else "", str(value).strip()
    return known.index(text) if len(text) == 1 and text in known else None
