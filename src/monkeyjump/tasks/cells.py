"""Values inside a row, whatever the file made of them: nested columns, lists written as text, labels read as floats."""

from __future__ import annotations

import ast
import hashlib
import json
import math
import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from monkeyjump.errors import ConfigError

Row = Mapping[str, Any]

_ARRAY = re.compile(r"array\((\[.*?\])(?:,\s*dtype=[^)]*)?\)", re.DOTALL)  # how pandas writes a list column to CSV
_ROW_TEXT = json.JSONEncoder(
    sort_keys=True, ensure_ascii=True, default=lambda v: hashlib.sha256(v).hexdigest() if type(v) is bytes else str(v)
)


class BadLabelError(ValueError):
    """A row that cannot be rendered. Raised by render functions; `Task.example` adds task, row and fix."""


class NoCellError(BadLabelError):
    """A path that leads nowhere in a row."""


def falls_below(value: Any, fraction: float) -> bool:
    """Whether the hash of a row falls in the first part of the hash range: splits that need no second pass."""
    content = _ROW_TEXT.encode(value).encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") < fraction * 2**64


def columns_of(template: str) -> list[str]:
    """The columns a template names, as paths: "{goal} and {choices.text[0]}" -> goal, choices.text[0]."""
    try:
        return [field for _, field, _, _ in string.Formatter().parse(template) if field is not None]
    except ValueError as error:
        raise ConfigError(
            f"template {template!r} is not one ({error}): write columns as {{name}}, a brace itself twice.",
            title="bad task",
        ) from error


def filled(template: str, row: Row) -> str:
    """A template with the values of a row; a value that is missing or NaN is an empty text."""
    try:
        return _Filler().vformat(template, (), row)
    except (ValueError, TypeError) as error:
        raise BadLabelError(f"template {template!r} cannot be filled ({error})") from error


class _Filler(string.Formatter):
    """Follows paths through values of the data alone: attributes of Python objects are not reached."""

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, str]:
        value = lookup(kwargs, field_name)
        return ("" if missing(value) else value), field_name


def has_column(row: Row, path: str) -> bool:
    """Whether a row has the column that a path begins in, or columns that flatten it (choices.label, choices.text)."""
    return _beginning(row, path)[1] > 0 or any(str(name).startswith(f"{path}.") for name in row)


def lookup(row: Row, path: str) -> Any:
    """The value at a path: a column of that very name, as pandas flattens them, or a place inside a column."""
    parts, depth = _beginning(row, path)
    if not depth:
        raise NoCellError(f"there is no column {path!r}")
    value: Any = row[".".join(parts[:depth])]
    for end, part in enumerate(parts[depth:], depth):
        value = _inside(opened(value), part, ".".join(parts[:end]))
    return value


def _beginning(row: Row, path: str) -> tuple[list[str], int]:
    """The parts of a path, and how many of them the longest column that begins it has; 0: there is none."""
    parts = re.findall(r"[^.\[\]]+", path) or [path]
    return parts, next((count for count in range(len(parts), 0, -1) if ".".join(parts[:count]) in row), 0)


def _inside(value: Any, part: str, where: str) -> Any:
    if isinstance(value, Mapping) and part in value:
        return value[part]
    if isinstance(value, list) and part.lstrip("-").isdigit() and -len(value) <= int(part) < len(value):
        return value[int(part)]
    if isinstance(value, list) and value and all(isinstance(entry, Mapping) and part in entry for entry in value):
        return [entry[part] for entry in value]  # [{label: A, text: x}, ...]
    there = f" (it has {', '.join(map(str, value))})" if isinstance(value, Mapping) else ""
    raise NoCellError(f"{where!r} holds no {part!r}{there}")


def opened(value: Any) -> Any:
    """A nested value, also where a CSV cell holds it as text: JSON, or what Python prints for it."""
    if not isinstance(value, str) or not value.strip().startswith(("[", "{")):
        return value
    for parse, text in ((json.loads, value), (ast.literal_eval, _ARRAY.sub(r"\1", value))):
        try:
            return parse(text.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    return value


def listed(value: Any, path: str) -> list[Any]:
    """The list at a path, for options that come with the row."""
    found = opened(value)
    if isinstance(found, list | tuple):
        return list(found)
    raise BadLabelError(f"{path}={value!r} is no list of options")


def most_frequent(answers: Sequence[str]) -> str:
    """The answer of most people; of equally frequent ones the first."""
    return Counter(answers).most_common(1)[0][0]


def missing(value: Any) -> bool:
    """Whether a cell is empty: nothing, or the NaN that stands for it in tables of numbers."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def spellings(value: Any) -> list[str]:
    """How a task may write a label: JSON's true is no Python True, and pandas makes 1.0 of a 1 near empty cells."""
    text = str(value).strip()
    if text.lower() in ("true", "false"):
        return [text, text.lower()]
    found = number(value)
    return [text, str(int(found))] if found is not None and found.is_integer() else [text]


def index_of(value: Any, texts: Sequence[Any]) -> int | None:
    """Where a label stands among the values it may have; None if nowhere. True is no 1."""
    known = [spellings(text)[-1] if isinstance(text, bool) else str(text) for text in texts]
    return next((known.index(text) for text in spellings(value) if text in known), None)


def as_position(value: Any, count: int) -> int | None:
    """A label as a position among `count` options, be it "1", 1.0 or true; None if it is no such number."""
    found = {"true": 1.0, "false": 0.0}.get(spellings(value)[-1], number(value))
    return int(found) if found is not None and found.is_integer() and 0 <= found < count else None


def pick(value: Any, allowed: Sequence[Any]) -> int:
    """The same as `index_of`, for labels that must be one of these."""
    for index, known in enumerate(allowed):  # the usual case
        if known == value and type(known) is type(value):
            return index
    found = None if missing(value) else index_of(value, allowed)
    if found is None:
        raise BadLabelError(f"label {value!r} is not one of {', '.join(map(repr, allowed))}")
    return found


def number(value: Any) -> float | None:
    """A number that a cell holds, also as text; None for anything else, NaN and infinities among it."""
    try:
        found = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None
