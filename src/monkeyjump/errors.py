"""The one error that users see for their own input, with every problem and its fix, and the class of our warnings."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence


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


def need(module: str, extra: str, what: str) -> None:
    """Say which extra brings a package that is not installed."""
    if importlib.util.find_spec(module) is None:
        raise ConfigError(f'{module} is needed for {what}: pip install "monkeyjump[{extra}]".', title="missing package")


class MonkeyJumpWarning(UserWarning):
    """Every warning of this package has this class, so that a filter can name them wherever they seem to come from."""
