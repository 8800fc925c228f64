"""Tasks of the user's own, in a few lines of Python or a YAML of about ten.

name: tickets
prompt: "Ticket: {text}\\nWhich team should take it?"   # columns in braces
context: "{history}"                                     # optional: the part that may be cut when too long
options: [billing, shipping, technical]                  # optional; or {0: billing, 1: shipping}; or a column
answer: team                                             # a column: an option's text, its index, or its letter
data: {train: train.jsonl, test: test.jsonl}             # beside this file; or data: {hub: owner/name, config: ...}
"""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from monkeyjump.errors import ConfigError
from monkeyjump.registry import did_you_mean
from monkeyjump.tasks.task import (
    LETTERS,
    METRICS,
    SPLITS,
    BadLabelError,
    Example,
    FileSource,
    HubSource,
    Metric,
    Row,
    Source,
    Task,
)
from monkeyjump.yaml_files import parse_yaml

Options = Sequence[str] | Mapping[Any, str] | str | None
_KEYS = ("name", "prompt", "context", "options", "answer", "data", "metric", "family", "description")


def simple_task(
    name: str,
    *,
    prompt: str,
    answer: str,
    data: Mapping[str, Any],
    options: Options = None,
    context: str = "",
    metric: Metric | None = None,
    **labels: str,
) -> Task:
    """A task from templates. `labels`: family, description. See the module's text for what the arguments may be."""
    columns = _columns(
        prompt, context, *(options if isinstance(options, Sequence) and not isinstance(options, str) else ())
    )
    columns += [answer, *([options] if isinstance(options, str) else [])]
    return Task(
        name=name,
        family=labels.get("family", "custom"),
        render=_renderer(prompt, context, options, answer),
        fields=tuple(dict.fromkeys(columns)),
        source=_source(name, data),
        options=_fixed_options(options),
        metric=metric or ("accuracy" if options is not None else "exact_match"),
        description=labels.get("description", ""),
    )


def load_task_file(path: str | Path) -> Task:
    """A task from YAML; every problem of the file at once."""
    path = Path(path).expanduser()
    source = f"task file {str(path)!r}"
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{source} cannot be read ({error.strerror}). Check the path.") from error
    content = _given(parse_yaml(text, source, as_written=True))  # an option is `no` or `010`, as the user wrote it
    if isinstance(content.get("data"), dict):
        content["data"] = _given(content["data"])
    problems = _problems(content)
    if problems:
        raise ConfigError([f"{source}: {problem}" for problem in problems], title="bad task file")
    data = content.pop("data")
    if "hub" not in data:
        data = {split: str(path.parent / file) for split, file in data.items()}
    return simple_task(data=data, **content)


def _given(content: dict[str, Any]) -> dict[str, Any]:
    """What has a value: a key left empty is as one left out."""
    return {key: value for key, value in content.items() if value not in ("", "null", "~")}


def _problems(content: dict[str, Any]) -> list[str]:
    known = list(_KEYS)
    problems = [f"unknown key {key!r}.{did_you_mean(str(key), known)}" for key in content if key not in known]
    problems += [f"{key!r} is missing." for key in ("name", "prompt", "answer", "data") if not content.get(key)]
    metric = content.get("metric")
    if metric is not None and metric not in METRICS:
        problems.append(
            f"metric={metric!r} must be one of {', '.join(METRICS)}.{did_you_mean(str(metric), list(METRICS))}"
        )
    names = ("name", "prompt", "context", "answer", "family", "description")
    problems += [f"{key}={content[key]!r} must be text." for key in names if not isinstance(content.get(key, ""), str)]
    data = content.get("data") or {}
    if not isinstance(data, dict) or not ("hub" in data or "train" in data or "test" in data):
        problems.append("data must name files ({train: a.jsonl, test: b.jsonl}) or a dataset ({hub: owner/name}).")
    elif not all(isinstance(value, str) for value in data.values()):
        problems.append(f"data={data} must give every key one text.")
    elif "hub" not in data:
        problems += [f"data: unknown split {key!r}; use {', '.join(SPLITS)}." for key in data if key not in SPLITS]
    return problems


def _source(name: str, data: Mapping[str, Any]) -> Source:
    if "hub" in data:
        splits: dict[str, str] = {split: data[split] for split in SPLITS if split in data}
        splits = splits or {"train": "train", "test": "test"}
        return HubSource(data["hub"], data.get("config"), data.get("revision", "main"), splits)
    files = {split: Path(path).expanduser() for split, path in data.items()}
    missing = [str(path) for path in files.values() if not path.is_file()]
    if missing:
        raise ConfigError(f"task {name!r}: no such data file: {', '.join(missing)}. Paths count from the task's file.")
    return FileSource(files)


def _columns(*templates: Any) -> list[str]:
    """The columns a template names: "{goal} and {aim}" -> goal, aim."""
    found = []
    for template in templates:
        try:
            fields = [field for _, field, _, _ in string.Formatter().parse(str(template)) if field is not None]
        except ValueError as error:
            raise ConfigError(
                f"template {template!r} is not one ({error}): write columns as {{name}}, a brace itself twice.",
                title="bad task",
            ) from error
        found += [field.split(".")[0].split("[")[0] for field in fields]
    return found


def _fixed_options(options: Options) -> tuple[str, ...] | None:
    """The options, where they do not depend on the row."""
    if options is None or isinstance(options, str):
        return None
    texts = tuple(map(str, options.values() if isinstance(options, Mapping) else options))
    return None if _columns(*texts) else texts


def _renderer(prompt: str, context: str, options: Options, answer: str) -> Callable[[Row], Example]:
    def render(row: Row) -> Example:
        question, cuttable = _filled(prompt, row), _filled(context, row)
        if options is None:
            return Example(question=question, context=cuttable, free_answer=str(row[answer]))
        texts, label = _choose(options, row, row[answer])
        score = _number(texts[label])
        return Example(question=question, context=cuttable, options=texts, label=label, score=score)

    return render


def _filled(template: str, row: Row) -> str:
    try:
        return template.format_map(row)
    except (LookupError, ValueError, AttributeError, TypeError) as error:
        raise BadLabelError(f"template {template!r} cannot be filled ({error!r})") from error


def _choose(options: Options, row: Row, value: Any) -> tuple[tuple[str, ...], int]:
    """The options of a row and the index of its answer: a key of the mapping; else a text, an index or a letter."""
    if isinstance(options, Mapping):
        texts = tuple(map(str, options.values()))
        keys = list(map(_as_text, options))
        if _as_text(value) not in keys:
            raise BadLabelError(f"answer {value!r} is not one of the keys {', '.join(keys)}")
        return texts, keys.index(_as_text(value))
    source = row[options] if isinstance(options, str) else options or ()
    texts = tuple(str(option) if isinstance(options, str) else _filled(str(option), row) for option in source)
    text = _as_text(value)
    if text in texts:
        return texts, texts.index(text)
    if isinstance(value, int) and 0 <= value < len(texts):
        return texts, int(value)
    if len(text) == 1 and text in LETTERS[: len(texts)]:
        return texts, LETTERS.index(text)
    raise BadLabelError(
        f"answer {value!r} is neither one of the options ({', '.join(texts)}), "
        f"nor an index from 0 to {len(texts) - 1}, nor a letter from A to {LETTERS[max(len(texts) - 1, 0)]}"
    )


def _as_text(value: Any) -> str:
    """A value of the data as a task file spells it: JSON's true is no Python True."""
    return str(value).lower() if isinstance(value, bool) else str(value).strip()


def _number(text: str) -> float | None:
    """Options that are numbers can be ranked: the gold number, for Spearman."""
    try:
        return float(text)
    except ValueError:
        return None
