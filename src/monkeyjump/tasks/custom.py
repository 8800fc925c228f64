"""Tasks of the user's own from templates, in a few lines of Python; `task_file` reads the same from YAML."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from monkeyjump.tasks import cells
from monkeyjump.tasks.cells import BadLabelError, NoCellError, Row
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
    offered = options.values() if isinstance(options, Mapping) else () if isinstance(options, str) else options or ()
    texts = tuple(map(str, offered))
    own = [options] if isinstance(options, str) else [column for text in texts for column in cells.columns_of(text)]
    return Task(
        name=name,
        family=more.get("family", "custom"),
        render=partial(_rendered, prompt, context, options, answer),
        fields=tuple(dict.fromkeys([*cells.columns_of(prompt), *cells.columns_of(context), *own, answer])),
        source=source,
        options=None if own or options is None else texts,
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


def _rendered(prompt: str, context: str, options: Options, answer: str, row: Row) -> Example:
    question, cuttable, value = cells.filled(prompt, row), cells.filled(context, row), cells.lookup(row, answer)
    if cells.missing(value) or value == "":
        raise BadLabelError(f"the answer (column {answer!r}) is empty")
    if options is None:
        several = cells.opened(value)  # answers of several people
        answers = tuple(map(str, several)) if isinstance(several, list | tuple) and several else ()
        answer_text = cells.most_frequent(answers) if answers else str(value)
        return Example(question=question, context=cuttable, free_answer=answer_text, answers=answers)
    texts, label = _choose(options, row, value)
    return Example(question=question, context=cuttable, options=texts, label=label, score=cells.number(texts[label]))


def _choose(options: Options, row: Row, value: Any) -> tuple[tuple[str, ...], int]:
    """The options of a row and the index of its answer: a label of theirs; else a text, an index or a letter."""
    if isinstance(options, Mapping):
        label = cells.index_of(value, keys := list(map(str, options)))
        if label is None:
            raise BadLabelError(f"answer {value!r} is not one of the keys {', '.join(keys)}")
        return tuple(map(str, options.values())), label
    if isinstance(options, str):
        labels, texts = _row_options(row, options)
    else:
        labels, texts = [], tuple(cells.filled(str(option), row) for option in options or ())
    letters = LETTERS[: len(texts)] if len(texts) <= len(LETTERS) else ""
    ways = (
        cells.index_of(value, labels),
        cells.index_of(value, texts),
        cells.as_position(value, len(texts)),
        cells.index_of(value, letters),
    )
    label = next((found for found in ways if found is not None), None)
    if label is None:
        raise BadLabelError(
            f"answer {value!r} is neither one of the options ({', '.join(texts)}), nor an index from 0 to "
            f"{len(texts) - 1}" + (f", nor a letter from A to {letters[-1]}" if letters else "")
        )
    return texts, label


def _row_options(row: Row, path: str) -> tuple[list[str], tuple[str, ...]]:
    """Labels (often none) and texts of the options that a column holds.

    Beside plain lists: {label: [A, B], text: [x, y]}, which ARC and its kin have, nested, as a list of pairs, or
    flattened into the columns choices.label and choices.text; and {A: x, B: y}.
    """
    parent = path.removesuffix(".text")
    try:
        texts = tuple(map(str, cells.listed(cells.lookup(row, f"{parent}.text"), path)))
    except NoCellError:
        found = cells.opened(cells.lookup(row, path))
        if isinstance(found, Mapping):
            return list(map(str, found)), tuple(map(str, found.values()))
        return [], tuple(map(str, cells.listed(found, path)))
    try:
        return [
            str(label).strip() for label in cells.listed(cells.lookup(row, f"{parent}.label"), f"{parent}.label")
        ], texts
    except NoCellError:
        return [], texts
