"""What a user wrote, checked against a pydantic model: every problem is one sentence with field, value and rule."""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterator
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from monkeyjump.errors import ConfigError
from monkeyjump.registry import did_you_mean


class Section(BaseModel):
    """Keys and values. Unknown keys are errors, and neither 4.0 nor "4" is a 4: nothing is guessed."""

    model_config = ConfigDict(extra="forbid", strict=True)


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise PydanticCustomError("rule", "must be a number")
    return value


Number = Annotated[float, Field(strict=False), BeforeValidator(_no_bool)]  # YAML reads 1e-4 as a text
M = TypeVar("M", bound=Section)


def validated(model: type[M], content: Any, title: str, check: Callable[[M], list[str]] = lambda _: []) -> M:
    """The content as a `model`; `check` finds what single keys cannot show. All problems are one `ConfigError`."""
    try:
        found = model.model_validate(content)
    except ValidationError as error:
        raise ConfigError([_sentence(model, entry) for entry in error.errors()], title=title) from None
    problems = check(found)
    if problems:
        raise ConfigError(problems, title=title)
    return found


def keys(model: type[Section], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key with its field, those of sections as `section.key`."""
    for name, field in model.model_fields.items():
        inner = section_of(field.annotation)
        if inner is None:
            yield f"{prefix}{name}", field
        else:
            yield from keys(inner, f"{prefix}{name}.")


def section_of(annotation: Any) -> type[Section] | None:
    """The model of a key that is a section."""
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


_WORDS = {
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be finite",
    "bool_type": "must be true or false",
    "string_type": "must be text; put words such as no in quotes",
    "string_too_short": "must not be empty",
    "too_short": "must not be empty",
    "list_type": "must be a list",
    "dict_type": "must be a section of names and values",
    "model_type": "must be a section of keys and values",
    "greater_than": "must be above {gt:g}",
    "greater_than_equal": "must be at least {ge:g}",
    "less_than": "must be below {lt:g}",
    "less_than_equal": "must be at most {le:g}",
    "literal_error": "must be {expected}",
    "rule": "{msg}",
}


def _sentence(model: type[Section], error: Any) -> str:
    where = [str(part) for part in error["loc"]]
    name = ".".join(where)
    home, field = _place(model, where)
    if error["type"] == "extra_forbidden":
        return _unknown_key(model, home, where)
    about = f": {field.description}" if field is not None and field.description else ""
    if error["type"] == "missing":
        return f"{name!r} is missing{about}."
    rule = _WORDS.get(error["type"], "{msg}").format(msg=error["msg"], **error.get("ctx", {}))
    if error["type"] == "literal_error":  # as YAML spells them
        rule = rule.replace("'", "").replace("True", "true").replace("False", "false")
    parts = () if field is None else (field.annotation, *typing.get_args(field.annotation))
    if type(None) in parts:
        rule += ", or null"
    options = [option for part in parts for option in typing.get_args(part) if isinstance(option, str)]
    hint = did_you_mean(str(error["input"]), options) if error["type"] == "literal_error" else ""
    return f"{name}={error['input']!r} {rule}{about}.{hint}"


def _unknown_key(model: type[Section], home: type[Section], where: list[str]) -> str:
    """The nearest key of the same section, or else a key of that name in another one: `lr` is `train.lr`."""
    key, known = where[-1], list(home.model_fields)
    elsewhere = [name for name, _ in keys(model) if name.rpartition(".")[2] == key]
    hint = f" Did you mean {elsewhere[0]!r}?" if elsewhere else did_you_mean(key, known)
    return f"unknown key {'.'.join(where)!r}.{hint} Known here: {', '.join(known)}."


def _place(model: type[Section], where: list[str]) -> tuple[type[Section], Any]:
    """The section and the field that an error lies in."""
    home, field = model, None
    for part in where:
        inner = section_of(field.annotation) if field is not None else model
        if inner is None or part not in inner.model_fields:
            return inner or home, field if inner is None else None
        home, field = inner, inner.model_fields[part]
    return home, field
