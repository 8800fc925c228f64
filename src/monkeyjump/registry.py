"""Names for things users can ask for: adapters, methods, tasks, models."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar

T = TypeVar("T")


def did_you_mean(name: str, known: list[str]) -> str:
    """A hint such as " Did you mean 'sst2'?", or nothing when no known name is close."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else ""


class Registry(Generic[T]):
    """An ordered name -> object table whose errors tell the user what would have worked.

    `homes` holds the names that come with the library and the module of each, which registers it when it is imported:
    asking whether a name is known imports nothing.
    """

    def __init__(self, kind: str, homes: Mapping[str, str] | None = None) -> None:
        self.kind = kind
        self._homes = dict(homes or {})
        self._entries: dict[str, T] = {}

    def add(self, name: str, entry: T) -> T:
        taken = name in self._homes and getattr(entry, "__module__", None) != self._homes[name]
        if taken or name in self._entries:
            raise ValueError(f"{self.kind} {name!r} is registered already; choose another name.")
        self._entries[name] = entry
        return entry

    def remove(self, name: str) -> None:
        """Forget an entry that was added; those of the library stay."""
        if name in self._homes:
            raise ValueError(f"{self.kind} {name!r} comes with the library and stays.")
        del self._entries[name]

    def get(self, name: str) -> T:
        if name in self._homes and name not in self._entries:
            importlib.import_module(self._homes[name])
        try:
            return self._entries[name]
        except KeyError:
            known = self.names()
            raise KeyError(
                f"unknown {self.kind} {name!r}.{did_you_mean(name, known)} Known: {', '.join(known) or '(none)'}."
            ) from None

    def names(self) -> list[str]:
        return [*self._homes, *(name for name in self._entries if name not in self._homes)]

    def built_in(self, name: str) -> bool:
        """Whether it comes with the library."""
        return name in self._homes

    def __contains__(self, name: object) -> bool:
        return name in self._homes or name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())


# Here and not beside the classes, so that a configuration can be checked before any adapter is imported.
ADAPTERS: Registry[Any] = Registry(
    "adapter",
    homes={
        name: f"monkeyjump.adapters.{name}"
        for name in ("lora", "lora_fa", "adalora", "propulsion", "dora", "vera", "ia3", "flylora", "lime")
    },
)
