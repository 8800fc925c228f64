"""Settings with their help and the values they may have: one vocabulary for the configuration and for its options.

Each function returns a dataclass field; an adapter may list such fields as its `options`. None is allowed where it is
the default, or where `none` says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, field
from typing import Any

from monkeyjump.registry import did_you_mean

Test = Callable[[Any], bool]


def setting(
    text: str,
    default: Any = None,
    allows: Test | None = None,
    rule: str = "",
    fix: str = "",
    none: bool = False,
    **schema: Any,
) -> Any:
    """A setting of any kind; a value that it does not allow is told the rule and the fix.

    `schema` says what is allowed in the keywords of JSON schema, which the reference page and editors read.
    """
    if "type" in schema and (none or default is None):
        schema["type"] = [schema["type"], "null"]

    def problem(value: Any) -> str:
        fine = allows is None or (value is None and (none or default is None)) or allows(value)
        return "" if fine else f"must be {rule}: {fix}."

    return field(default=default, metadata={"help": text, "problem": problem, "schema": schema})


def choice(text: str, *allowed: str | None) -> Any:
    """A setting that is one of these, the first by default; its help lists them where it does not explain them."""
    known = [str(value) for value in allowed]

    def problem(value: Any) -> str:
        fix = f"choose one of {', '.join(known)}.{did_you_mean(str(value), known)}"
        return "" if value in allowed else f"is not known: {fix}"

    text = text if text.endswith(".") else f"{text}: {', '.join(known)}."
    return field(default=allowed[0], metadata={"help": text, "problem": problem, "schema": {"enum": list(allowed)}})


def integer(text: str, default: int | None, least: int, fix: str, none: bool = False) -> Any:
    def allows(value: Any) -> bool:
        return is_int(value) and value >= least

    return setting(text, default, allows, f"an integer >= {least}", fix, none, type="integer", minimum=least)


def positive(text: str, default: float | None, fix: str) -> Any:
    return _number(text, default, lambda value: value > 0, "a number > 0", fix, exclusiveMinimum=0)


def weight(text: str, default: float, fix: str) -> Any:
    return _number(text, default, lambda value: value >= 0, "a number >= 0", fix, minimum=0)


def fraction(text: str, default: float, fix: str) -> Any:
    return _number(text, default, lambda value: 0 <= value < 1, "in [0, 1)", fix, minimum=0, exclusiveMaximum=1)


def _number(text: str, default: float | None, fits: Test, rule: str, fix: str, **limits: Any) -> Any:
    return setting(text, default, lambda value: is_number(value) and fits(value), rule, fix, type="number", **limits)


def names(text: str, rule: str, fix: str, lone: bool = False) -> Any:
    """A list of texts, or one text by itself where it may be `lone`."""
    return _several(text, None, lambda value: isinstance(value, str), rule, fix, lone, {"type": "string"})


def numbers(
    text: str, default: int | None, least: int, rule: str, fix: str, lone: bool = False, empty: bool = True
) -> Any:
    """A list of integers, or one by itself where it may be `lone`."""
    kind = {"type": "integer", "minimum": least}
    return _several(text, default, lambda value: is_int(value) and value >= least, rule, fix, lone, kind, empty)


def _several(
    text: str, default: Any, fits: Test, rule: str, fix: str, lone: bool, kind: Any, empty: bool = True
) -> Any:
    def allows(value: Any) -> bool:
        is_list = isinstance(value, (list, tuple))
        return all(map(fits, value)) and (empty or len(value) > 0) if is_list else lone and fits(value)

    entries = {"type": "array", "items": kind} | ({} if empty else {"minItems": 1})
    null = [{"type": "null"}] if default is None else []
    return setting(text, default, allows, rule, fix, anyOf=[entries, *[kind] * lone, *null])


def flag(text: str, default: bool = False) -> Any:
    fix = f"leave it out for {default}"
    return setting(text, default, lambda value: isinstance(value, bool), "True or False", fix, type="boolean")


def value_problems(values: Mapping[str, Any], settings: Mapping[str, Field[Any]]) -> list[str]:
    """What is wrong with each value by itself: the setting, its value, the rule and the fix."""
    told = {name: settings[name].metadata.get("problem", lambda value: "")(value) for name, value in values.items()}
    return [f"{name}={values[name]!r} {words}" for name, words in told.items() if words]


def broken(rules: Mapping[str, object]) -> list[str]:
    """The problems of a table in which each has the condition that it is one."""
    return [problem for problem, found in rules.items() if found]


def described(settings: Iterable[Field[Any]]) -> str:
    """The reference of those that are settings: name, default and help."""
    own = [each for each in settings if "problem" in each.metadata]
    return "\n".join(f"  {each.name} = {each.default!r}: {each.metadata['help']}" for each in own)


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
