"""Runs that do nothing but succeed, fail, die or hang, and say when they did what."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class OutOfMemoryError(RuntimeError):
    """It has the name of torch's, which takes seconds to import."""


@dataclass(frozen=True)
class FakeSettings:
    folder: Path
    modes: tuple[str, ...] = ("eager", "compile")
    together: int = 0


class FakeRun:
    def __init__(self, variant: str, settings: FakeSettings) -> None:
        self.variant, self.settings, self.began = variant, settings, time.time()
        self.turns = dict.fromkeys(settings.modes, 0)

    def warm_up(self) -> None:
        folder = self.settings.folder
        print("noise that must not reach the parent")
        if self.variant == "raises":
            raise ValueError("no such thing")
        if self.variant == "dies":
            print("last words", file=sys.stderr, flush=True)
            os._exit(3)
        if self.variant == "hangs":
            time.sleep(60)
        if self.variant == "greedy" and not (folder / "greedy").exists():
            (folder / "greedy").touch()
            raise OutOfMemoryError("too little")
        (folder / f"{self.variant}.began").touch()
        while len(list(folder.glob("*.began"))) < self.settings.together:  # all at the same time, or never
            time.sleep(0.02)
        self.prepared = time.time()

    def row(self, mode: str) -> dict[str, Any]:
        self.turns[mode] += 1
        ms = 10.0 ** self.turns[mode]
        started = time.time()
        if self.variant == "dies late" and mode == "compile":
            os._exit(4)
        if self.variant == "dies later" and self.turns[mode] == 2:
            os._exit(5)
        if self.variant == "compiles not" and mode == "compile":
            raise RuntimeError("no graph")
        time.sleep(0.05)
        return {
            "status": "ok",
            "began": self.began,
            "prepared": self.prepared,
            "times_ms": [ms],
            "median_ms": ms,
            "tokens_per_second": 1000 / ms,
            "started": started,
            "ended": time.time(),
        }
