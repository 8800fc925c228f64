"""Peak memory where no allocator counts it (CPU): the bytes of all tensors alive at once, seen as they are made."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Counted(TorchDispatchMode):
    """Counts the storages that operations make; what a kernel uses inside and frees again is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        for storage in storages((args, kwargs)):
            self._see(storage, 0)  # there before, or counted when it was made
        result = func(*args, **(kwargs or {}))
        for storage in storages(result):
            self._see(storage, storage.nbytes())
        self.peak = max(self.peak, self.alive)
        return result

    def _see(self, storage: torch.UntypedStorage, size: int) -> None:
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self.alive += size
            weakref.finalize(storage, self._freed, storage._cdata, size)

    def _freed(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.alive -= size


def storages(tree: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def bytes_of(tensors: list[torch.Tensor]) -> int:
    """Bytes of tensors, each storage once."""
    return sum({storage._cdata: storage.nbytes() for storage in storages(tensors)}.values())


def peak_of(call: Callable[[], object]) -> int:
    """Most bytes of tensors that one call had alive at once, beside what was there before it."""
    counted = _Counted()
    with counted:
        call()
    return counted.peak
