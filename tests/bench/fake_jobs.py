"""Jobs that do nothing but succeed, fail, die or hang, and say when they did what."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


class OutOfMemoryError(RuntimeError):
    """Named as torch's, which takes seconds to import."""


def prepare(variant: str, settings: dict[str, Any]) -> Callable[[], Iterator[dict[str, Any]]]:
    began = time.time()
    folder = Path(settings["folder"])
    print("noise that must not reach the parent")
    if variant == "raises":
        raise ValueError("no such thing")
    if variant == "dies":
        print("last words", file=sys.stderr, flush=True)
        os._exit(3)
    if variant == "hangs":
        time.sleep(60)
    if variant == "greedy" and not (folder / "greedy").exists():
        (folder / "greedy").touch()
        raise OutOfMemoryError("too little")
    (folder / f"{variant}.began").touch()
    while len(list(folder.glob("*.began"))) < settings.get("together", 0):  # all at the same time, or never
        time.sleep(0.02)
    prepared = time.time()
    turns: list[float] = []

    def rows() -> Iterator[dict[str, Any]]:
        turns.append(10.0 * 10 ** len(turns))
        for mode in settings["modes"]:
            started = time.time()
            if variant == "dies late" and mode == "compile":
                os._exit(4)
            if variant == "dies later" and len(turns) == 2:
                os._exit(5)
            time.sleep(0.1)
            yield {
                "variant": variant,
                "mode": mode,
                "status": "ok",
                "began": began,
                "prepared": prepared,
                "times_ms": turns[-1:],
                "median_ms": turns[-1],
                "tokens_per_second": 1000 / turns[-1],
                "started": started,
                "ended": time.time(),
            }

    return rows
