"""A group of projections that read the same tensor: the first of them computes all, so that the tensor is read once."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from monkeyjump.adapters.base import fits_tokens
from monkeyjump.ops import dispatch
from monkeyjump.ops.settings import GateColumns
from monkeyjump.tuner.inputs import in_backward

if TYPE_CHECKING:
    from monkeyjump.ops.grouped import Frozen
    from monkeyjump.tuner.layer import MonkeyJumpLayer
    from monkeyjump.tuner.fast.packed_weights import Packed
    from monkeyjump.tuner.sharing import Family


class SharedInput:
    """The projections of one group and what the first of them made for the others."""

    def __init__(self, family: Family, members: list[MonkeyJumpLayer]) -> None:
        self.family = family
        self.members = members
        self.traceable = False  # whether a compiler may take the group for granted
        self.opens = self.closes = True  # whether it is the first, and the last, of its round
        self._packed: Packed | None = None
        self._seen: tuple[weakref.ref[torch.Tensor], int] | None = None  # the tensor and its version
        self._made: dict[int, torch.Tensor] = {}
        self._traced: tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None = None  # the tensor and the outputs for it

    def output(self, layer: MonkeyJumpLayer, x: torch.Tensor) -> torch.Tensor | None:
        """The output of this projection, adapter included; None if it has to be computed by itself."""
        if layer is self.members[0]:
            if self.family.misjudged and not in_backward():
                return self.family.reopen(layer, x)
            self._seen = (weakref.ref(x), _version(x))
            self._made = self._make(x)
        elif not any(layer is member for member in self.members):  # a replica of a member
            return None
        elif self._seen is None or self._seen[0]() is not x or self._seen[1] != _version(x):
            self.family.misjudged = True
            return None
        return self._made.pop(id(layer), None)

    def traced_output(self, place: int, x: torch.Tensor) -> torch.Tensor | None:
        """The same for a compiler, which cannot trace weak references: `place` is the projection's in the group."""
        if not self.traceable or not dispatch.uses_kernels(x):
            return None
        if place == 0:
            ys = self._outputs(x, self._traced_seed(x))
            self._traced = (x, ys) if len(self.members) > 1 and ys is not None else None
            return None if ys is None else ys[0]
        if self._traced is None or self._traced[0] is not x:
            return None
        y = self._traced[1][place]
        if place == len(self.members) - 1:
            self._traced = None  # or the compiled graph would hand it out
        return y

    def _traced_seed(self, x: torch.Tensor) -> torch.Tensor | None:
        """One for all groups of a parent module: the first of them draws it, the last one lets it go."""
        first, round = self.first(), self.family.round
        if not first.training or not first.dropout:
            return None
        if round.given is not None:
            return round.given
        from monkeyjump.ops.custom_group import drawn_seed

        seed = drawn_seed(x) if self.opens else round.seed
        round.seed = None if self.closes else seed
        return seed

    def first(self) -> Any:
        """The adapter of the first member; those of the others have its kind and its settings."""
        return self.members[0].monkeyjump_adapter[self.family.adapter_name]

    def prepare(self) -> None:
        """Find out whether a compiler may trace this group: called before it does."""
        dtypes = {getattr(getattr(member.base_layer, "weight", None), "dtype", None) for member in self.members}
        dtype = dtypes.pop()
        alike = dtype is not None and not dtypes and self._computable(dtype)
        self.traceable = alike and (len(self.members) == 1 or self._together() is not None)

    def clear(self) -> None:
        self._made, self._traced = {}, None

    def _make(self, x: torch.Tensor) -> dict[int, torch.Tensor]:
        if not dispatch.uses_kernels(x) or not self._computable(x.dtype):
            return {}
        name, members = self.family.adapter_name, self.members
        seed = None
        if self.first().training and self.first().dropout:
            seed = self.family.seed([member.monkeyjump_adapter[name] for member in members], x.device)
        ys = self._outputs(x, seed)
        return {} if ys is None else {id(member): y for member, y in zip(members, ys, strict=True)}

    def _computable(self, dtype: torch.dtype) -> bool:
        return all(_computable(member, self.family.adapter_name, dtype) for member in self.members)

    def _outputs(self, x: torch.Tensor, seed: torch.Tensor | None) -> tuple[torch.Tensor, ...] | None:
        """The outputs of all members; None if their gates do not fit together."""
        from monkeyjump.ops.grouped import Projection, grouped_lora

        name, members = self.family.adapter_name, self.members
        routing = members[0].routers.get(name)  # of the whole group, or none
        places = [member.routers[name][1] for member in members] if routing else []
        given: Any = routing[0].gate_all(name, places, x) if routing else [None] * len(members)
        columns = given if isinstance(given, GateColumns) else None
        gates = given if columns is None else columns.apart()
        shapes = {None if gate is None else gate.shape for gate in gates}
        if len(shapes) > 1 or not fits_tokens(gates[0], x):
            return None
        projections = []
        for member, gate in zip(members, gates, strict=True):
            base: Any = member.base_layer
            adapter: Any = member.monkeyjump_adapter[name]
            projections.append(Projection(base.weight, base.bias, adapter.A, adapter.B, gate, adapter.rank_scale()))
        dropout = adapter.dropout if adapter.training else 0.0
        return grouped_lora(x, projections, adapter.scaling, dropout, seed, self._together(), columns)

    def _together(self) -> Frozen | None:
        """The weights of all members as one, or None where that cannot be."""
        if torch.compiler.is_compiling():  # `prepare` has looked
            return None if self._packed is None else self._packed.frozen
        if self._packed is not None and not self._packed.intact():
            self._packed, self.family.packs = None, False  # somebody moves the weights: leave them alone
        if self._packed is None and self.family.packs and len(self.members) > 1:
            from monkeyjump.tuner.fast.packed_weights import Packed, managed

            linears: list[Any] = [member.base_layer for member in self.members]
            if Packed.possible(linears):
                self.family.packs = not managed(self.members[0].context.outermost)
                self._packed = Packed(linears) if self.family.packs else None
        return None if self._packed is None else self._packed.frozen

    def __getstate__(self) -> dict[str, Any]:
        """A copy has weights of its own, and no outputs."""
        return {**vars(self), "_packed": None, "_seen": None, "_made": {}, "_traced": None, "traceable": False}


def _version(x: torch.Tensor) -> int:
    return 0 if x.is_inference() else x._version


def _computable(layer: MonkeyJumpLayer, adapter_name: str, dtype: torch.dtype) -> bool:
    """Whether a projection is nothing but a frozen `nn.Linear` and this one adapter, and nobody looks inside.

    Quantising, sharding and offloading replace the linear, hook into it, or replace its forward.
    """
    base, adapter = layer.base_layer, layer.monkeyjump_adapter[adapter_name]
    if type(base) is not nn.Linear or "forward" in vars(base) or layer.active_adapters != [adapter_name]:
        return False
    if base._forward_hooks or base._forward_pre_hooks or adapter._forward_hooks or adapter._forward_pre_hooks:
        return False
    if layer.disable_adapters or layer.merged or layer.quantization_backend is not None:
        return False
    # a weight of another class (quantised, sharded) computes in its own way
    if type(base.weight) is not nn.Parameter or base.weight.dtype != dtype or base.weight.requires_grad:
        return False
    if base.bias is not None and base.bias.requires_grad:
        return False
    router = layer.routers.get(adapter_name)
    return router is None or not router[0].observes(adapter_name)
