"""Registers the method when PEFT is imported, and not before: PEFT brings torch, whose import takes seconds."""

from __future__ import annotations

import importlib
import sys
import threading
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class RegisterWithPeft:
    """A finder in front of all others. It finds nothing itself; it acts when what the others found has been imported.

    PEFT is often imported by a module of this package. Registering imports that module in turn, so it waits until the
    outermost import of PEFT or of this package is over.
    """

    def __init__(self) -> None:
        self._running = threading.local()

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "peft" and not name.startswith("monkeyjump."):
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in others if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self._follow(spec.loader)
        return spec

    def _follow(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # the instance's, which hides the one of its class
            depth = getattr(self._running, "depth", 0)
            self._running.depth = depth + 1
            try:
                execute(module)
            finally:
                self._running.depth = depth
            if not depth and "peft" in sys.modules and self in sys.meta_path:
                sys.meta_path.remove(self)
                register()

        loader.exec_module = exec_module


def register() -> None:
    importlib.import_module("monkeyjump.tuner.register").register()


def register_with_peft() -> None:
    """Register now if PEFT is there, else as soon as it is."""
    if "peft" in sys.modules:
        register()
    else:
        sys.meta_path.insert(0, RegisterWithPeft())
