"""Names for things users can ask for: adapters, methods, tasks, models."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


def did_you_mean(name: str, known: list[str]) -> str:
    """A hint such as " Did you mean 'sst2'?", or nothing when no known name is close."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else ""


class Registry(Generic[T]):
    """An ordered name -> object table whose errors tell the user what would have worked."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def add(self, name: str, entry: T) -> T:
        if name in self._entries:
            raise ValueError(f"{self.kind} {name!r} is registered already; choose another name.")
        self._entries[name] = entry
        return entry

    def get(self, name: str) -> T:
        try:
            return self._entries[name]
        except KeyError:
            known = self.names()
            raise KeyError(
                f"unknown {self.kind} {name!r}.{did_you_mean(name, known)} Known: {', '.join(known) or '(none)'}."
            ) from None

    def names(self) -> list[str]:
        return list(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
