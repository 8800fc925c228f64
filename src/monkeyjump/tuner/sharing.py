"""Which projections read the same tensor, and may so be computed together.

No model code says which projections share an input: it is seen in a forward. The linears of one parent that could
share are watched, in their order (q, k, v, o; gate, up); those that were called one after the other with the same
tensor become a group when the first of them is called again, and not before a backward has gone through what was seen:
a forward and its recomputation under gradient checkpointing must do the same. Whoever later turns up with another
tensor computes by itself, and its group is watched anew.

A family uses one dropout mask in one round of calls, grouped or not: a run that is resumed, and watches again, draws
what the uninterrupted one draws.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from monkeyjump.adapters.lora import LoraAdapter
from monkeyjump.ops import dispatch
from monkeyjump.ops.settings import MOST_SEEDS, new_seed
from monkeyjump.tuner.inputs import in_backward, recomputed
from monkeyjump.tuner.fast.shared_inputs import SharedInput

if TYPE_CHECKING:
    from monkeyjump.tuner.layer import MonkeyJumpLayer

MOST_RANKS = 64  # of all projections of a group together: more are as well computed one by one


class Round:
    """One call of a parent module, as a compiler sees it: the seed of all masks, from the first group to the last."""

    def __init__(self) -> None:
        self.given: torch.Tensor | None = None  # drawn for this forward, with those of all rounds
        self.seed: torch.Tensor | None = None  # drawn by the first group
        # projections in the order of their calls, which need not be the model's
        self.called: list[MonkeyJumpLayer] = []

    def note(self, layer: MonkeyJumpLayer) -> None:
        if not any(layer is other for other in self.called):
            self.called.append(layer)

    def forget(self, layers: list[MonkeyJumpLayer]) -> None:
        self.called = [other for other in self.called if not any(other is layer for layer in layers)]

    def mark(self, groups: list[SharedInput]) -> None:
        """Tell each which is the first to be called, and which the last."""
        places = {id(layer): place for place, layer in enumerate(self.called)}
        groups = sorted(groups, key=lambda group: places[id(group.members[0])])
        for group in groups:
            group.opens, group.closes = group is groups[0], group is groups[-1]


class Family:
    """The linears of one parent module whose adapters are alike: who of them shares an input is found out here."""

    def __init__(self, adapter_name: str, round: Round) -> None:
        self.adapter_name = adapter_name
        self.round = round
        self.layers: list[MonkeyJumpLayer] = []
        self.misjudged = False  # some member of a group came with another tensor
        self.packs = True  # whether weights of a group may be put side by side
        self._seed: torch.Tensor | None = None
        self._masked: set[int] = set()  # adapters that have used this seed
        self._forget()

    def _forget(self) -> None:
        self._last: weakref.ref[torch.Tensor] | None = None
        self._follows: dict[int, bool] = {}  # layer -> whether it read what the one before it had read
        self._complete = False  # whether what was seen may be acted upon

    def join(self, layer: MonkeyJumpLayer) -> None:
        self.layers.append(layer)
        self._open()

    def leave(self, layer: MonkeyJumpLayer) -> None:
        self._open()
        self.layers = [other for other in self.layers if other is not layer]

    def watch(self, layer: MonkeyJumpLayer, x: torch.Tensor) -> torch.Tensor | None:
        """Note what a projection reads while there are no groups; its output once there are."""
        if not any(layer is other for other in self.layers):
            return None
        if layer is self.layers[0] and not in_backward() and self._settle():
            return layer.shared[self.adapter_name].output(layer, x)
        self.round.note(layer)
        same = self._last is not None and self._last() is x
        self._follows[id(layer)] = same and self._follows.get(id(layer), True)
        self._last = weakref.ref(x)
        if torch.is_grad_enabled() and x.requires_grad:
            x.register_hook(self._backward_came)
        else:
            self._complete = True
        return None

    def reopen(self, layer: MonkeyJumpLayer, x: torch.Tensor) -> torch.Tensor | None:
        """What was seen no longer holds: watch again."""
        self.misjudged = False
        self._open()
        return self.watch(layer, x)

    def _settle(self) -> bool:
        """Make groups of what was seen, if all was."""
        if not self._complete or len(self._follows) < len(self.layers):
            return False
        groups: list[list[MonkeyJumpLayer]] = []
        for layer in self.layers:
            if groups and self._follows[id(layer)] and self._room(groups[-1]):
                groups[-1].append(layer)
            else:
                groups.append([layer])
        for members in groups:
            group = SharedInput(self, members)
            for place, layer in enumerate(members):
                layer.shared[self.adapter_name], layer.places[self.adapter_name] = group, place
        return True

    def groups(self) -> list[SharedInput]:
        name = self.adapter_name
        return [layer.shared[name] for layer in self.layers if name in layer.shared and layer.places[name] == 0]

    def open(self) -> bool:
        """Whether there are no groups yet, and kernels that want them."""
        if not self.layers or self.groups():
            return False
        base = self.layers[0].base_layer
        return isinstance(base, nn.Linear) and dispatch.uses_kernels(base.weight)

    def prepare(self) -> None:
        """Make groups of what was seen, and see whether a compiler may trace them."""
        if self.open():
            self._settle()
        for group in self.groups():
            group.prepare()

    def clear(self) -> None:
        self.round.seed = None
        for group in self.groups():
            group.clear()

    def seed_of(self, adapter: LoraAdapter, device: torch.device) -> torch.Tensor | None:
        """The seed for one adapter; None for one that is no member (a replica), whose mask is its own."""
        if torch.compiler.is_compiling():  # a graph serves many families: it must not depend on this one
            return None
        known = any(adapter is layer.monkeyjump_adapter[self.adapter_name] for layer in self.layers)
        return self.seed([adapter], device) if known else None

    def seed(self, adapters: list[Any], device: torch.device) -> torch.Tensor:
        """The seed of this round of calls; a round is over when an adapter is called again."""
        called = {id(adapter) for adapter in adapters}
        if self._seed is None or called & self._masked:
            self._seed, self._masked = new_seed(device), set()
        self._masked |= called
        return self._seed.to(device)

    def _room(self, members: list[MonkeyJumpLayer]) -> bool:
        adapter: Any = members[0].monkeyjump_adapter[self.adapter_name]
        return (len(members) + 1) * adapter.B.shape[1] <= MOST_RANKS

    def _open(self) -> None:
        for layer in self.layers:
            layer.shared.pop(self.adapter_name, None)
        self.round.forget(self.layers)
        self._forget()

    def _backward_came(self, gradient: torch.Tensor) -> None:
        self._complete = True

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_last": None, "_follows": {}, "_complete": False, "_seed": None, "_masked": set()}


class Sharing:
    """All families of a model."""

    def __init__(self) -> None:
        self.families: dict[tuple, Family] = {}
        self.rounds: dict[tuple, Round] = {}  # by parent module
        self.prepared = False  # whether a compiler takes groups for granted
        self._masking: list[tuple[Round, torch.device]] = []  # those that it may trace, with dropout
        self._drawn_for: nn.Module | None = None  # the stack of blocks in whose training forward we are
        self._looked_at: nn.Module | None = None
        self._wrapped = False  # whether something in that recomputes

    def join(self, adapter_name: str, layer: MonkeyJumpLayer, routed: bool) -> None:
        """Let a projection share its pass over the input with the other linears of its parent module."""
        adapter = layer.monkeyjump_adapter[adapter_name]
        if isinstance(adapter, LoraAdapter) and adapter.fused:
            kind = (type(adapter), *adapter.A.shape, adapter.B.shape[1], routed)
            key = (adapter_name, layer.path.rpartition(".")[0], *kind)
            round = self.rounds.setdefault(key[:2], Round())
            family = self.families.setdefault(key, Family(adapter_name, round))
            family.join(layer)
            layer.families[adapter_name] = family
            adapter.seeds = family.seed_of

    def leave(self, adapter_name: str, layer: MonkeyJumpLayer) -> None:
        family = layer.families.pop(adapter_name, None)
        if family is not None:
            family.leave(layer)

    def waiting(self) -> bool:
        """Whether a forward and a backward would still tell which projections share their input."""
        return any(family.open() for family in self.families.values())

    def prepare(self) -> bool:
        """Let a compiler know the groups that were found; whether all were."""
        for family in self.families.values():
            family.prepare()
        self._masking = []
        for round in self.rounds.values():
            families = [family for family in self.families.values() if family.round is round]
            groups = [group for family in families for group in family.groups() if group.traceable]
            round.mark(groups)
            round.given = None
            if groups and groups[0].first().dropout > 0:
                self._masking.append((round, groups[0].first().A.device))
        if self._drawn_for is not None:
            self.draw(self._drawn_for)
        self.prepared = True
        return not self.waiting()

    def draw(self, model: nn.Module) -> None:
        """Seeds of a training forward for the compiled calls of all parent modules, in one kernel instead of one each.

        A recomputation must find the seed of its own forward, which by then may not be the last one: there, every
        round draws for itself, and what recomputes restores the state of the generator.
        """
        self._drawn_for = model
        again = bool(self._masking) and self._recomputes(model)
        for device in {device for _, device in self._masking}:
            here = [round for round, other in self._masking if other == device]
            # two to a row: each begins where a compiler expects a tensor to begin
            rows = [None] * len(here) if again else torch.randint(MOST_SEEDS, (len(here), 2), device=device).unbind()
            for round, row in zip(here, rows, strict=True):
                round.given = None if row is None else row[0]

    def _recomputes(self, model: nn.Module) -> bool:
        """Asked in every forward: the blocks, where Transformers switches it; wrappers anywhere once for a model."""
        if self._looked_at is not model:
            self._looked_at, self._wrapped = model, any(recomputed(module) for module in model.modules())
        blocks = (block for part in model.children() for block in part.children())
        return self._wrapped or recomputed(model) or any(recomputed(block) for block in blocks)

    def release(self) -> None:
        """No compiler may take groups for granted any more."""
        self.prepared = False
        for family in self.families.values():
            for group in family.groups():
                group.traceable = False
        self._masking, self._looked_at = [], None
        for round in self.rounds.values():
            round.given = None

    def end(self) -> None:
        """A forward is over: what was made and not asked for is let go."""
        self._drawn_for = None
        for family in self.families.values():
            family.clear()
