"""Projections that read the same tensor: the first that is called computes all, so that the tensor is read once.

Which projections share their input is planned when adapters are placed, from the names that models give them. At the
call it is checked: a projection that comes with another tensor is computed by itself, and its group is taken apart. All
projections of a group use one dropout mask, whether they are computed together or not. Its seed is one of a vector that
is drawn once for a forward.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from monkeyjump.adapters.base import fits_tokens
from monkeyjump.adapters.lora import LoraAdapter
from monkeyjump.ops import dispatch
from monkeyjump.ops.lowrank import MOST_SEEDS, GateColumns
from monkeyjump.tuner.call import MadeAhead, ModelCall, running
from monkeyjump.tuner.module_paths import CROSS_ATTENTION
from monkeyjump.tuner.recomputation import refuse_unknown_recomputation

if TYPE_CHECKING:
    from monkeyjump.ops.lowrank import Frozen
    from monkeyjump.tuner.fast.packed_weights import PackedWeights
    from monkeyjump.tuner.layer import MonkeyJumpLayer

MOST_RANKS = 64  # of all projections of a group together; with more, computing them one by one is as fast
# Names of projections that read the same tensor where one module holds them.
SIBLINGS = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("query_proj", "key_proj", "value_proj"),
    ("q_lin", "k_lin", "v_lin"),
    ("q", "k", "v"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("wi_0", "wi_1"),
)


class SharedInput:
    """The projections of one group, for one adapter."""

    def __init__(self, adapter_name: str, members: list[MonkeyJumpLayer]) -> None:
        self.adapter_name = adapter_name
        self.members = members
        self.index = 0  # among the groups of the model
        self.apart = False  # whether some member was seen to read another tensor
        self.packs = True  # whether the weights may be put side by side
        self.traceable = False  # whether a compiler may take the group for granted
        self.given: Tensor | None = None  # the seed of the forward that runs, where compiled blocks look for it
        self._packed: PackedWeights | None = None
        self._traced: tuple[Tensor, dict[int, Tensor]] | None = None  # a tensor and the outputs for it

    def output(self, layer: MonkeyJumpLayer, x: Tensor) -> Tensor | None:
        """The output of this projection, adapter included; None if it has to be computed by itself."""
        place, call = layer.places[self.adapter_name], running().call
        if self.members[place] is not layer or not dispatch.uses_kernels(x):  # DataParallel copies are no members
            return None
        ahead = None if call is None else call.ahead
        if ahead is not None and ahead.outputs:
            if ahead.group is self and place in ahead.outputs:
                if ahead.x is x and ahead.version == _version(x):
                    return ahead.outputs.pop(place)
                self.apart = True
            elif ahead.group is not self:
                ahead.group.apart = True  # its other members read something else, or were not called
        alone = self.apart or call is None or len(self.members) == 1
        members = [layer] if alone else self.members
        if not all(_computable(member, self.adapter_name, x.dtype) for member in members):
            return None
        ys = self._outputs(x, members, self.seed(x.device))
        if ys is None or alone or call is None:
            return None if ys is None else ys[0]
        outputs = dict(enumerate(ys))
        y = outputs.pop(place)
        call.ahead = MadeAhead(self, x, _version(x), outputs)
        return y

    def traced_output(self, place: int, x: Tensor) -> Tensor | None:
        """`output` under a compiler. What is kept between two projections belongs to one graph and ends with it."""
        if not self.traceable or not dispatch.uses_kernels(x):
            return None
        if self._traced is not None and self._traced[0] is x and place in self._traced[1]:
            outputs = self._traced[1]
        else:
            ys = self._outputs(x, self.members, self.seed(x.device))
            if ys is None:
                return None
            outputs = dict(enumerate(ys))
        y = outputs.pop(place)
        self._traced = (x, outputs) if outputs else None  # else the compiled graph would return them
        return y

    def seed(self, device: torch.device) -> Tensor | None:
        """The seed of this forward's dropout mask; None where there is none, or the op is to draw one."""
        first, call = self.first(), running().call
        if not first.training or not first.dropout:
            return None
        if torch.compiler.is_compiling():
            blocks = running().blocks
            if blocks is None or not blocks.traced:  # one graph serves many blocks: it must not know the index
                return self.given
            return None if call is None or call.seeds is None else call.seeds.table(device)[self.index, 0]
        if call is None:
            refuse_unknown_recomputation(self.members[0].path)
        return None if call is None or call.seeds is None else call.seeds.rows(device)[self.index]

    def first(self) -> Any:
        """The adapter of the first member; those of the others have its kind and its settings."""
        return self.members[0].monkeyjump_adapter[self.adapter_name]

    def prepare(self) -> None:
        """Find out whether a compiler may trace this group. This runs before it does."""
        weights: list[Any] = [getattr(member.base_layer, "weight", None) for member in self.members]
        usable = all(isinstance(weight, Tensor) and dispatch.uses_kernels(weight) for weight in weights)
        alike = usable and len({weight.dtype for weight in weights}) == 1 and not self.apart
        alike = alike and all(_computable(member, self.adapter_name, weights[0].dtype) for member in self.members)
        self.traceable = alike and (len(self.members) == 1 or self._together() is not None)

    def _outputs(self, x: Tensor, members: list[MonkeyJumpLayer], seed: Tensor | None) -> tuple[Tensor, ...] | None:
        """The outputs of some members; None if their gates do not fit together."""
        from monkeyjump.ops.gated_lora import Projection, grouped_lora

        name = self.adapter_name
        routing = members[0].routers.get(name)  # one router for the whole group, or none
        places = [member.routers[name][1] for member in members] if routing else []
        given: Any = routing[0].gate_all(name, places, x) if routing else [None] * len(members)
        columns = given if isinstance(given, GateColumns) else None
        gates = given if columns is None else [None] * len(members)
        # a set of shapes would hash their lengths, which ties a compiled graph to them
        shapes = [None if gate is None else gate.shape for gate in gates]
        alike = all(shape == shapes[0] for shape in shapes)
        if not alike or not fits_tokens(gates[0] if columns is None else columns.tensor, x):
            return None
        projections = []
        for member, gate in zip(members, gates, strict=True):
            base: Any = member.base_layer
            adapter: Any = member.monkeyjump_adapter[name]
            projections.append(Projection(base.weight, base.bias, adapter.A, adapter.B, gate, adapter.rank_scale()))
        dropout = adapter.dropout if adapter.training else 0.0
        together = self._together() if len(members) > 1 else None
        return grouped_lora(x, projections, adapter.scaling, dropout, seed, together, columns)

    def _together(self) -> Frozen | None:
        """The weights of all members as one, or None where that cannot be."""
        if torch.compiler.is_compiling():  # `prepare` has checked the weights
            return None if self._packed is None else self._packed.frozen
        if self._packed is not None and not self._packed.intact():
            self._packed, self.packs = None, False  # somebody moves the weights: leave them alone
        if self._packed is None and self.packs and len(self.members) > 1:
            from monkeyjump.tuner.fast.packed_weights import PackedWeights, managed

            linears: list[Any] = [member.base_layer for member in self.members]
            if PackedWeights.possible(linears):
                self.packs = not managed(self.members[0].context.outermost)
                self._packed = PackedWeights(linears) if self.packs else None
        return None if self._packed is None else self._packed.frozen

    def __getstate__(self) -> dict[str, Any]:
        """A copy starts without packed weights, seeds and outputs: these belong to the original."""
        return {**vars(self), "_packed": None, "_traced": None, "given": None, "traceable": False}


class Seeds:
    """The seeds of one forward, one for each group."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._tables: dict[torch.device, Tensor] = {}
        self._rows: dict[torch.device, tuple[Tensor, ...]] = {}

    @classmethod
    def of(cls, table: Tensor) -> Seeds:
        """Seeds whose table has already been drawn."""
        seeds = cls(len(table))
        seeds._tables[table.device] = table
        return seeds

    def drawn(self) -> Tensor | None:
        """The table, if it has been drawn, on one device."""
        return next(iter(self._tables.values())) if len(self._tables) == 1 else None

    def table(self, device: torch.device) -> Tensor:
        """[groups, 2], of which the first column counts: every seed begins where a compiler expects a tensor to."""
        if device not in self._tables:
            self._tables[device] = torch.randint(MOST_SEEDS, (self.number, 2), device=device)
        return self._tables[device]

    def rows(self, device: torch.device) -> tuple[Tensor, ...]:
        if device not in self._rows:
            self._rows[device] = self.table(device)[:, 0].unbind()
        return self._rows[device]


class SharedInputs:
    """Holds all groups of a model, prepares them for compilers, and draws their seeds."""

    def __init__(self) -> None:
        self.groups: list[SharedInput] = []
        self._prepared = 0

    @property
    def prepared(self) -> bool:
        """Whether compiled code relies on the groups."""
        return self._prepared > 0

    def plan(self, adapter_name: str, layers: Iterable[MonkeyJumpLayer]) -> None:
        """Group the projections of an adapter by the input that they read."""
        found: dict[tuple, list[MonkeyJumpLayer]] = {}
        for layer in layers:
            adapter = layer.monkeyjump_adapter[adapter_name]
            self.leave(adapter_name, layer)
            if isinstance(adapter, LoraAdapter) and adapter.fused:
                parent, _, name = layer.path.rpartition(".")
                siblings = next((number for number, names in enumerate(SIBLINGS) if name in names), name)
                family = name if CROSS_ATTENTION.search(parent) else siblings
                kind = (type(adapter), *adapter.A.shape, adapter.B.shape[1], adapter_name in layer.routers)
                members = found.setdefault((parent, family, *kind), [])
                if (len(members) + 1) * adapter.B.shape[1] > MOST_RANKS:
                    members = found[parent, name, *kind] = []
                members.append(layer)
        for members in found.values():
            group = SharedInput(adapter_name, members)
            self.groups.append(group)
            for place, layer in enumerate(members):
                layer.shared[adapter_name], layer.places[adapter_name] = group, place
                adapter = layer.monkeyjump_adapter[adapter_name]
                adapter.seeds = group.seed  # type: ignore[assignment]
        self._number()

    def leave(self, adapter_name: str, layer: MonkeyJumpLayer) -> None:
        """Dissolve the group of a projection that loses this adapter."""
        group = layer.shared.get(adapter_name)
        if group is not None:
            for member in group.members:
                member.shared.pop(adapter_name, None)
                member.places.pop(adapter_name, None)
            self.groups.remove(group)
            self._number()

    def prepare(self) -> None:
        """Let compiled code rely on the groups, until `release`."""
        self._prepared += 1
        for group in self.groups:
            group.prepare()

    def release(self) -> None:
        """Undo one `prepare`. After the last of them compiled code may no longer rely on the groups."""
        self._prepared -= 1
        if not self.prepared:
            for group in self.groups:
                group.traceable, group.given = False, None

    def draw_seeds(self, call: ModelCall) -> None:
        """Give a training forward its seeds, which one kernel draws when the first mask is asked for."""
        if call.seeds is None:
            call.seeds = Seeds(len(self.groups))
            self.hand_out(call)

    def hand_out(self, call: ModelCall) -> None:
        """Put the seeds of a forward, or of the one that is recomputed, where compiled blocks look for them."""
        if self.prepared and call.seeds is not None and not torch.compiler.is_compiling():
            for group in self.groups:
                if group.traceable and group.first().dropout:
                    group.given = call.seeds.rows(group.first().A.device)[group.index]

    def _number(self) -> None:
        for index, group in enumerate(self.groups):
            group.index = index


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


def _computable(layer: MonkeyJumpLayer, adapter_name: str, dtype: torch.dtype) -> bool:
    """Whether a projection is nothing but a frozen `nn.Linear` and this one adapter, and nobody looks inside.

    Quantising, sharding and offloading replace the linear, hook into it, or replace its forward.
    """
    base, adapter = layer.base_layer, layer.monkeyjump_adapter[adapter_name]
    if type(base) is not nn.Linear or "forward" in vars(base) or layer.running_adapters() != [adapter_name]:
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
