"""The one error that users see for their own input, with every problem and its fix, and the class of our warnings."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any


class ConfigError(ValueError):
    """Input that cannot work. `problems` holds one sentence per problem: field, value, rule, fix."""

    def __init__(self, problems: str | Sequence[str], title: str = "invalid configuration") -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        if len(self.problems) == 1:
            message = f"{title}: {self.problems[0]}"
        else:
            lines = "\n".join(f"  - {problem}" for problem in self.problems)
            message = f"{title}, {len(self.problems)} problems:\n{lines}"
        super().__init__(message)


class NoMemoryError(ConfigError):
    """Settings that do not fit into the memory of this machine."""


class InUseError(ConfigError):
    """A folder in which another process trains."""


class MonkeyJumpWarning(UserWarning):
    """Every warning of this package has this class, so that a filter can name them wherever they seem to come from."""


def require(module: str, why: str, extra: str) -> Any:
    """A module of an optional package; where it is missing, the error says what needs it and how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f'{why}: pip install "monkeyjump[{extra}]".', title="missing package") from error
