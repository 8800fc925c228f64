"""MixLoRA's feed-forward experts: N whole feed-forwards per block that share one frozen base (Li et al., 2024).

Nothing of the model's code is replaced. The feed-forward module is called with its rows repeated, one copy for each of
the k experts of a token; its projections add, row by row, the delta of that row's expert; its own code applies the
activation and the product to all rows; and the copies are then combined with the router's weights:

    y = sum_k w_k E_{n_k}(x),    E_n(x) = (W_d + D_dn)( act((W_g + D_gn) x) * (W_u + D_un) x )

What is equal for all copies is computed once: the frozen gate and up projections, and the rank-r activations of their
adapters. There is no loop over experts, no gather and no look at values on the host.

Shapes: B batch, T tokens, D hidden width, N experts, K experts per token; `...`: the leading shape, mostly [B, T].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from monkeyjump.config import MonkeyJumpConfig
from monkeyjump.errors import ConfigError
from monkeyjump.routing.learned import LearnedDecision
from monkeyjump.tuner.call import BlocksCall, hidden_states, running
from monkeyjump.tuner.layer import MonkeyJumpLayer
from monkeyjump.tuner.placement import Block
from monkeyjump.tuner.routers.learned import BLOCK, LearnedRouterOfBlock

if TYPE_CHECKING:
    from monkeyjump.tuner.block_list import BlockList


@dataclass
class Slots:
    """One call of a feed-forward: K copies of its rows, the expert of every copy and its weight."""

    source: Tensor  # [..., D], what the feed-forward was called with
    repeated: Tensor  # [K * B, T, D], what it goes on with
    experts: Tensor  # [K, ..., N] one-hot
    weights: Tensor  # [K, ..., 1] fp32, sum 1 over K


def open_slots(x: Tensor, decision: LearnedDecision, k: int) -> Slots:
    """Repeat the rows of x once for each of the k experts that its tokens have chosen, in the order of the experts."""
    place = decision.chosen.long().cumsum(-1)
    slot = torch.arange(1, k + 1, device=place.device).view(k, *[1] * place.dim())
    experts = ((place == slot) & decision.chosen).to(decision.gates.dtype)
    return Slots(
        source=x,
        repeated=x.repeat(k, *[1] * (x.dim() - 1)),
        experts=experts,
        weights=(experts * decision.gates).sum(-1, keepdim=True),
    )


def close_slots(slots: Slots, output: Tensor) -> Tensor:
    """sum_k w_k y_k, formed as y_1 + sum_{k > 1} w_k (y_k - y_1).

    The weights sum to 1, so this is the same; and copies that agree, as all do at the start, give exactly their value.
    """
    first, *others = output.unflatten(0, (slots.weights.shape[0], -1)).unbind(0)
    weights = slots.weights.to(output.dtype)
    result = first
    for weight, other in zip(weights[1:].unbind(0), others, strict=True):
        result = result + weight * (other - first)
    return result


def _for_every_copy(value: Any, x: Tensor, slots: Slots) -> Any:
    """The repeated rows for x; other values per token, such as a residual that the module adds, repeated too."""
    if value is x:
        return slots.repeated
    if not isinstance(value, Tensor) or value.shape[: x.dim() - 1] != x.shape[:-1]:
        return value
    return value.repeat(slots.weights.shape[0], *[1] * (value.dim() - 1))


class FeedForwardExperts(LearnedRouterOfBlock):
    """The experts of one feed-forward: hooks on it and on its adapted projections, and what they share in one call."""

    def __init__(self, blocks: BlockList, block: Block, module: nn.Module) -> None:
        super().__init__(blocks, block, module)
        self.feed_forward = block.feed_forward
        self.hooked: list[MonkeyJumpLayer] = []
        inner = module.get_submodule(block.feed_forward.removeprefix(f"{block.path}."))
        self._handles += [
            inner.register_forward_pre_hook(self.enter, with_kwargs=True),
            inner.register_forward_hook(self.leave),
        ]

    def add(self, adapter_name: str, config: MonkeyJumpConfig, block: Block, layers: list[MonkeyJumpLayer]) -> None:
        super().add(adapter_name, config, block, layers)
        for layer in layers:
            if not any(layer is known for known in self.hooked):  # an earlier adapter may have hooked it
                self.hooked.append(layer)
                self._handles += [
                    layer.register_forward_pre_hook(self.before_projection),
                    layer.register_forward_hook(self.after_projection),
                ]

    def decide(self, active: list[str], h: Tensor, training: bool, call: BlocksCall) -> None:
        """Note the mask, which is known here; the experts are chosen where the feed-forward is entered."""
        call.mask = call.real_tokens(call.shape, h.device)

    def enter(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Route the rows that enter the feed-forward, and repeat them once for each of their experts."""
        active = self.active()
        if not active:
            return None
        call = self.call()
        call.slots = None
        if len(active) > 1:
            raise ConfigError(
                f"adapters {active} are active together, but only one at a time can hold feed-forward experts: "
                "call model.set_adapter with one of them."
            )
        x = hidden_states(args, kwargs, self.feed_forward)
        name, experts = active[0], self.experts[active[0]]
        if self.configs[name].learns_router:
            decision: LearnedDecision = self.layers[name][0].monkeyjump_router[name](x)
            self._note(name, BLOCK, x, decision, self.layers[name])
            k = self.configs[name].top_k or experts
        else:  # the control: every expert, each with the same weight
            gates = torch.full((*x.shape[:2], experts), 1 / experts, device=x.device)
            decision, k = LearnedDecision(gates, gates, torch.ones_like(gates, dtype=torch.bool)), experts
        slots = call.slots = open_slots(x, decision, k)
        # the copy of an expert that is knocked out runs without a delta: its share of the frozen output stays
        slots.experts = self.without_knocked_out(name, slots.experts, call)
        given = [_for_every_copy(value, x, slots) for value in args]
        return tuple(given), {name: _for_every_copy(value, x, slots) for name, value in kwargs.items()}

    def leave(self, module: nn.Module, args: tuple, output: Any) -> Any:
        slots = self._slots()
        if slots is None:
            return None
        self.call().slots = None
        if not isinstance(output, Tensor) or output.shape != slots.repeated.shape:
            raise ConfigError(
                f"feed-forward {self.feed_forward!r} does not return one state per token, of the width it was given: "
                "it cannot carry whole feed-forward experts; use placement='projection'."
            )
        return close_slots(slots, output)

    @staticmethod
    def _slots() -> Slots | None:
        """The slots of the feed-forward that runs in this thread."""
        call = running().blocks
        return None if call is None else call.slots

    def before_projection(self, layer: nn.Module, args: tuple) -> tuple | None:
        """A projection that reads the input of the feed-forward sees it once, not repeated."""
        slots = self._slots()
        if slots is not None and args and args[0] is slots.repeated:
            return (slots.source, *args[1:])
        return None

    def after_projection(self, layer: nn.Module, args: tuple, output: Tensor) -> Tensor | None:
        slots = self._slots()
        if slots is None or args[0] is not slots.source:
            return None
        return output.expand(slots.weights.shape[0], *slots.source.shape[:-1], -1).flatten(0, 1)

    def gate_all(self, adapter_name: str, positions: list[int], x: Tensor) -> list[Tensor]:
        return [self.gate(adapter_name, position, x) for position in positions]

    def gate(self, adapter_name: str, position: int, x: Tensor) -> Tensor:
        """Which expert each row of x belongs to: [K, ..., N] for the input of the feed-forward, else [K * B, T, N]."""
        slots = self._slots()
        if slots is None:
            raise RuntimeError(f"a projection of {self.feed_forward!r} ran outside it: call the feed-forward.")
        if x is slots.source:
            return slots.experts
        rows = slots.experts.flatten(0, 1)
        if x.shape[:-1] != rows.shape[:-1]:
            raise ConfigError(
                f"projection {self.names[adapter_name][position]!r} of {self.feed_forward!r} sees tokens of shape "
                f"{tuple(x.shape[:-1])}, not {tuple(rows.shape[:-1])}: it cannot carry an expert per "
                "token; use placement='projection'."
            )
        return rows.to(x.device)


class IdleRouter(LearnedRouterOfBlock):
    """The router of a block without feed-forward targets: nothing depends on it but its own balance loss.

    MixLoRA on attention alone is plain LoRA and one router per block, and its parameters are counted with that router.
    """

    def add(self, adapter_name: str, config: MonkeyJumpConfig, block: Block, layers: list[MonkeyJumpLayer]) -> None:
        super().add(adapter_name, config, block, layers)
        layers[0].routers.pop(adapter_name)  # its adapter is always on

    def begin(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Route, for the balance loss; without one, give the router a gradient of zero instead of none."""
        super().begin(module, args, kwargs)
        call = running().blocks
        if call is None or not self.active():
            return None
        h = hidden_states(args, kwargs, self.path)
        for name in self.active():
            balanced = module.training and self.configs[name].learned.aux_loss_weight > 0
            if not balanced and torch.is_grad_enabled():
                h = h + 0.0 * call.gates[name].sum().to(h.dtype)
        return ((h, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": h})
