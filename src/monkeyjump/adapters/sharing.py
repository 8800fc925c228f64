"""Adapters that read the same tensor: the first of them applies the A's of all, so that the tensor is read once.

No model code says which projections share an input. The linears of one parent that could are put together in their
order (q, k, v, o; gate, up), and whoever turns up with another tensor than the one before it starts a group of its own:
after one forward the groups are right, and at no time is anything computed from the wrong tensor.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from monkeyjump.adapters.lora import LoraAdapter


class SharedDown:
    """z = A x of some adapters, made at once by the first that is called and handed to the others."""

    def __init__(self) -> None:
        self.members: list[LoraAdapter] = []
        self._x: weakref.ref[torch.Tensor] | None = None
        self._made: dict[int, torch.Tensor] = {}

    def join(self, adapter: LoraAdapter) -> None:
        self.members.append(adapter)
        adapter.shared = self

    def leave(self, adapter: LoraAdapter) -> None:
        self.members = [member for member in self.members if member is not adapter]

    def down(self, adapter: LoraAdapter, x: torch.Tensor, dropout: float) -> torch.Tensor:
        """z of this adapter, [N, R] fp32."""
        from monkeyjump.ops import gated_lora as ops

        if adapter is self.members[0]:
            made = ops.down(x, [member.A for member in self.members], dropout)
            self._x = weakref.ref(x)
            self._made = {id(member): z for member, z in zip(self.members, made, strict=True)}
        elif self._x is None or self._x() is not x or id(adapter) not in self._made:
            return self._split(adapter).down(adapter, x, dropout)
        return self._made.pop(id(adapter))

    def _split(self, adapter: LoraAdapter) -> SharedDown:
        """A group of its own for this adapter and those after it."""
        place = next(i for i, member in enumerate(self.members) if member is adapter)
        group = SharedDown()
        for member in self.members[place:]:
            group.join(member)
        self.members = self.members[:place]
        return group

    def __getstate__(self) -> dict[str, Any]:
        return {"members": self.members, "_x": None, "_made": {}}
