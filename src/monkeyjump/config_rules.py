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
    text: str, default: Any = None, allows: Test | None = None, rule: str = "", fix: str = "", none: bool = False
) -> Any:
    """A setting of any kind; a value that it does not allow is told the rule and the fix."""

    def problem(value: Any) -> str:
        fine = allows is None or (value is None and (none or default is None)) or allows(value)
        return "" if fine else f"must be {rule}: {fix}."

    return field(default=default, metadata={"help": text, "problem": problem})


def choice(text: str, *allowed: str | None) -> Any:
    """A setting that is one of these, the first by default; its help lists them where it does not explain them."""
    known = [str(value) for value in allowed]

    def problem(value: Any) -> str:
        fix = f"choose one of {', '.join(known)}.{did_you_mean(str(value), known)}"
        return "" if value in allowed else f"is not known: {fix}"

    text = text if text.endswith(".") else f"{text}: {', '.join(known)}."
    return field(default=allowed[0], metadata={"help": text, "problem": problem})


def integer(text: str, default: int | None, least: int, fix: str, none: bool = False) -> Any:
    return setting(text, default, lambda value: is_int(value) and value >= least, f"an integer >= {least}", fix, none)


def positive(text: str, default: float | None, fix: str) -> Any:
    return setting(text, default, lambda value: is_number(value) and value > 0, "a number > 0", fix)


def weight(text: str, default: float, fix: str) -> Any:
    return setting(text, default, lambda value: is_number(value) and value >= 0, "a number >= 0", fix)


def fraction(text: str, default: float, fix: str) -> Any:
    return setting(text, default, lambda value: is_number(value) and 0 <= value < 1, "in [0, 1)", fix)


def flag(text: str) -> Any:
    return setting(text, False, lambda value: isinstance(value, bool), "True or False", "leave it out for False")


def value_problems(values: Mapping[str, Any], settings: Mapping[str, Field[Any]]) -> list[str]:
    """What is wrong with each value by itself: the setting, its value, the rule and the fix."""
    told = {name: settings[name].metadata.get("problem", lambda value: "")(value) for name, value in values.items()}
    return [f"{name}={values[name]!r} {words}" for name, words in told.items() if words]


def described(settings: Iterable[Field[Any]]) -> str:
    """The reference of those that are settings: name, default and help."""
    own = [each for each in settings if "problem" in each.metadata]
    return "\n".join(f"  {each.name} = {each.default!r}: {each.metadata['help']}" for each in own)


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
