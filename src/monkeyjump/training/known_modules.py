"""A model that knows its modules, its parameters and its mode, for as long as they do not change.

A Trainer asks for all parameters and sets the mode of all modules several times in every step. With the modules of a
few hundred adapters each walk takes milliseconds of the host, which a captured step does not leave.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_KNOWN = "_known_parameters"
_MODE, _MODULES = f"{_KNOWN}: mode", f"{_KNOWN}: modules"


class _Knows(nn.Module):
    """Before the class of a model: answers from what is known. No adapter may be added or removed meanwhile."""

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return iter(vars(self)[_KNOWN]) if recurse else super().parameters(recurse)

    def modules(self, remove_duplicate: bool = True) -> Iterator[nn.Module]:
        return iter(vars(self)[_MODULES]) if remove_duplicate else super().modules(remove_duplicate)

    def train(self, mode: bool = True) -> Any:
        """Nothing is done where this was the last to set a mode; somebody may have changed that of single modules."""
        known = vars(self)
        if self.training != mode or known.get(_MODE) != mode:
            super().train(mode)
            known[_MODE] = mode
        return self


class _KnowsNumber(_Knows):
    """The same before a class of Transformers, which counts its parameters in every step."""

    def num_parameters(self, *args: Any, **kwargs: Any) -> int:
        key = f"{_KNOWN}: {args} {kwargs}"
        if key not in vars(self):
            vars(self)[key] = super().num_parameters(*args, **kwargs)  # type: ignore[misc]
        return vars(self)[key]


@contextmanager
def known_modules(model: nn.Module) -> Iterator[None]:
    """No walks through all modules inside, neither of the model nor of the base model in it."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    before = [(holder, type(holder)) for holder in dict.fromkeys((model, base))]
    for holder, kind in before:
        vars(holder).update({_KNOWN: list(holder.parameters()), _MODULES: list(holder.modules())})
        knowing = _KnowsNumber if hasattr(kind, "num_parameters") else _Knows
        holder.__class__ = type(kind.__name__, (knowing, kind), {"__module__": kind.__module__})
    try:
        yield
    finally:
        for holder, kind in before:
            holder.__class__ = kind
            for name in [name for name in vars(holder) if name.startswith(_KNOWN)]:
                del vars(holder)[name]
