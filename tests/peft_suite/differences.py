"""The list of intended differences between PEFT's LoRA and our methods: which tests, which failure, and why."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import monkeyjump as mj
from tests.peft_suite.configs import method_names, our_config


@dataclass(frozen=True)
class Difference:
    """Tests that fail by intention: on these methods, with this error."""

    reason: str
    tests: str = "*"  # a shell pattern for file::class::test[parameters]
    error: str = ""  # a regular expression that is found in "ErrorType: message"
    methods: tuple[str, ...] = ()  # empty: all

    def concerns(self, test: str, method: str) -> bool:
        return fnmatchcase(test, f"*{self.tests}*") and (not self.methods or method in self.methods)

    def explains(self, error: str) -> bool:
        return re.search(self.error, error, re.DOTALL) is not None


def load(path: Path) -> list[Difference]:
    groups = _groups()
    entries = tomllib.loads(path.read_text(encoding="utf-8"))["difference"]
    found = []
    for entry in entries:
        names = [name for part in entry.pop("methods", []) for name in groups.get(part, [part])]
        found.append(Difference(methods=tuple(names), **entry))
    return found


def _groups() -> dict[str, list[str]]:
    """Names that stand for several methods in the list."""
    routed = [name for name in method_names() if _routes(our_config(name, {}))]
    return {"routed": routed, "always on": [name for name in method_names() if name not in routed]}


def _routes(config: mj.MonkeyJumpConfig) -> bool:
    return config.layers_to_route != []
