"""Projections that read the same tensor: the first of them computes all, so that the tensor is read once.

No model code says which projections share an input. The linears of one parent that could are put together in their
order (q, k, v, o; gate, up), and whoever turns up with another tensor than the one before it starts a group of its own:
after one forward the groups are right, and at no time is anything returned that was computed from another tensor.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from monkeyjump.adapters.base import fits_tokens
from monkeyjump.ops import dispatch

if TYPE_CHECKING:
    from monkeyjump.tuner.layer import MonkeyJumpLayer


class SharedInput:
    """The projections of one group and what the first of them made for the others."""

    def __init__(self, adapter_name: str) -> None:
        self.adapter_name = adapter_name
        self.members: list[MonkeyJumpLayer] = []
        self._x: weakref.ref[torch.Tensor] | None = None
        self._made: dict[int, torch.Tensor] = {}

    def join(self, layer: MonkeyJumpLayer) -> None:
        self.members.append(layer)
        layer.shared[self.adapter_name] = self

    def leave(self, layer: MonkeyJumpLayer) -> None:
        self.members = [member for member in self.members if member is not layer]
        del layer.shared[self.adapter_name]

    def output(self, layer: MonkeyJumpLayer, x: torch.Tensor) -> torch.Tensor | None:
        """The output of this projection, adapter included; None if it has to be computed by itself."""
        if layer is self.members[0]:
            self._x = weakref.ref(x)
            self._made = self._make(x)
        elif self._x is None or self._x() is not x:
            return self._split(layer).output(layer, x)
        return self._made.pop(id(layer), None)

    def _make(self, x: torch.Tensor) -> dict[int, torch.Tensor]:
        name, members = self.adapter_name, self.members
        if not dispatch.uses_kernels(x):
            return {}
        if not all(_plain(member.base_layer, x.dtype) and _alone(member, name) for member in members):
            return {}
        gates = [member._gate(name, x) for member in members]
        if not all(fits_tokens(gate, x) and (gate is None) == (gates[0] is None) for gate in gates):
            return {}
        from monkeyjump.ops.grouped import Projection, grouped_lora

        projections = []
        for member, gate in zip(members, gates, strict=True):
            base: Any = member.base_layer
            adapter: Any = member.monkeyjump_adapter[name]
            projections.append(Projection(base.weight, base.bias, adapter.A, adapter.B, gate, adapter.rank_scale()))
        ys = grouped_lora(x, projections, adapter.scaling, adapter.dropout if adapter.training else 0.0)
        return {id(member): y for member, y in zip(members, ys, strict=True)}

    def _split(self, layer: MonkeyJumpLayer) -> SharedInput:
        """A group of its own for this projection and those after it."""
        place = next(i for i, member in enumerate(self.members) if member is layer)
        group = SharedInput(self.adapter_name)
        moved, self.members = self.members[place:], self.members[:place]
        for member in moved:
            group.join(member)
        return group

    def __getstate__(self) -> dict[str, Any]:
        return {"adapter_name": self.adapter_name, "members": self.members, "_x": None, "_made": {}}


def _plain(base: nn.Module, dtype: torch.dtype) -> bool:
    """A frozen `nn.Linear` whose forward nobody hooked into or replaced, as quantising, sharding, offloading do."""
    if type(base) is not nn.Linear or base._forward_hooks or base._forward_pre_hooks or "forward" in vars(base):
        return False
    return base.weight.dtype == dtype and not base.weight.requires_grad


def _alone(layer: MonkeyJumpLayer, adapter_name: str) -> bool:
    """Whether this adapter is the only one to act, and nobody wants to see what it acts on."""
    if layer.active_adapters != [adapter_name] or layer.disable_adapters or layer.merged:
        return False
    router = layer.routers.get(adapter_name)
    return router is None or not router[0].observes(adapter_name)
