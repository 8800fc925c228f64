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
    try:
        import yaml
    except ImportError as error:
        raise ConfigError(
            f"task file {str(path)!r}: reading YAML needs the package `pyyaml`. Run `pip install 'monkeyjump[cli]'`."
        ) from error
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"task file {str(path)!r} cannot be read ({error.strerror}). Check the path.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"task file {str(path)!r} is not YAML: {error}") from error
    problems = _problems(content)
    if problems:
        raise ConfigError([f"task file {str(path)!r}: {problem}" for problem in problems], title="bad task file")
    data = {key: str(path.parent / value) if key in SPLITS else value for key, value in content.pop("data").items()}
    return simple_task(data=data, **content)


def _problems(content: Any) -> list[str]:
    if not isinstance(content, dict):
        return [f"it must hold keys such as name and prompt, not a {type(content).__name__}."]
    known = list(_KEYS)
    problems = [f"unknown key {key!r}.{did_you_mean(str(key), known)}" for key in content if key not in known]
    problems += [f"{key!r} is missing." for key in ("name", "prompt", "answer", "data") if not content.get(key)]
    metric = content.get("metric")
    if metric is not None and metric not in METRICS:
        problems.append(
            f"metric={metric!r} must be one of {', '.join(METRICS)}.{did_you_mean(str(metric), list(METRICS))}"
        )
    data = content.get("data") or {}
    if not isinstance(data, dict) or not ("hub" in data or "train" in data or "test" in data):
        problems.append("data must name files ({train: a.jsonl, test: b.jsonl}) or a dataset ({hub: owner/name}).")
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
        for _, field, _, _ in string.Formatter().parse(str(template)):
            if field is not None:
                found.append(field.split(".")[0].split("[")[0])
    return found


def _fixed_options(options: Options) -> tuple[str, ...] | None:
    """The options, where they do not depend on the row."""
    if options is None or isinstance(options, str):
        return None
    texts = tuple(map(str, options.values() if isinstance(options, Mapping) else options))
    return None if _columns(*texts) else texts


def _renderer(prompt: str, context: str, options: Options, answer: str) -> Callable[[Row], Example]:
    def render(row: Row) -> Example:
        question, cuttable = prompt.format_map(row), context.format_map(row)
        if options is None:
            return Example(question=question, context=cuttable, free_answer=str(row[answer]))
        texts, label = _choose(options, row, row[answer])
        score = _number(texts[label])
        return Example(question=question, context=cuttable, options=texts, label=label, score=score)

    return render


def _choose(options: Options, row: Row, value: Any) -> tuple[tuple[str, ...], int]:
    """The options of a row and the index of its answer: a key of the mapping; else a text, an index or a letter."""
    if isinstance(options, Mapping):
        texts = tuple(map(str, options.values()))
        keys = list(options)
        if value not in keys:
            raise BadLabelError(f"answer {value!r} is not one of the keys {', '.join(map(repr, keys))}")
        return texts, keys.index(value)
    source = row[options] if isinstance(options, str) else options or ()
    texts = tuple(str(option) if isinstance(options, str) else str(option).format_map(row) for option in source)
    text = str(value).strip()
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


def _number(text: str) -> float | None:
    """Options that are numbers can be ranked: the gold number, for Spearman."""
    try:
        return float(text)
    except ValueError:
        return None
