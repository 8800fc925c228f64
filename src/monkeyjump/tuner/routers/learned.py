"""Learned routers in a block, and experts on each projection: gates that carry gradients.

Unlike centroid gates these are made again in a recomputation, by the same operations, so that both passes save the same
tensors.

Shapes: B batch, T tokens, D hidden width, E gates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from monkeyjump.config import MonkeyJumpConfig
from monkeyjump.errors import ConfigError
from monkeyjump.ops.lowrank import GateColumns
from monkeyjump.routing import learned
from monkeyjump.routing.centroid import uniform_gates
from monkeyjump.routing.learned import LearnedDecision
from monkeyjump.tuner.call import BlocksCall
from monkeyjump.tuner.layer import MonkeyJumpLayer
from monkeyjump.tuner.placement import Block
from monkeyjump.tuner.routers.base import BlockRouter
from monkeyjump.tuner.training.router_losses import Statement

if TYPE_CHECKING:
    from monkeyjump.tuner.block_list import BlockList

BLOCK = -1  # stands for a position where a router serves all projections of its block


class LearnedRouterOfBlock(BlockRouter):
    """The gates of one block whose router is trained, or whose projections hold several experts each."""

    def __init__(self, blocks: BlockList, block: Block, module: nn.Module) -> None:
        super().__init__(blocks, block, module)
        self.reads_norm = False
        self.experts: dict[str, int] = {}
        self.statements: dict[tuple[str, int], Statement] = {}  # by adapter name and position

    def add(self, adapter_name: str, config: MonkeyJumpConfig, block: Block, layers: list[MonkeyJumpLayer]) -> None:
        super().add(adapter_name, config, block, layers)
        self.experts[adapter_name] = block.experts
        for position in range(BLOCK, len(block.names)):
            statement = self.blocks.context.losses.statement(adapter_name, self._key_of(adapter_name, position), config)
            self.statements[adapter_name, position] = statement
        if block.norm and not self.reads_norm:
            self.reads_norm = True
            norm = self.module.get_submodule(block.norm.removeprefix(f"{self.path}."))
            self._handles.append(norm.register_forward_hook(self.after_norm))

    def forget(self, adapter_name: str) -> None:
        for name, position in list(self.statements):
            if name == adapter_name:
                self.blocks.context.losses.forget(name, self._key_of(name, position))
                del self.statements[name, position]
        super().forget(adapter_name)

    def decide(self, active: list[str], h: Tensor, training: bool, call: BlocksCall) -> None:
        wanted = training or self.blocks.context.trace is not None
        call.mask = call.real_tokens(call.shape, h.device) if wanted else None
        for name in active:
            config = self.configs[name]
            if not config.learns_router:
                gates = uniform_gates(h, self.experts[name], config)
                call.gates[name] = self.without_knocked_out(name, gates, call)
                self._trace(name, BLOCK, call.gates[name].expand(*call.shape, -1), call)
            elif not routes_alone(config) and config.learned.router_input == "block":
                call.gates[name] = self._decide_learned(name, BLOCK, h)

    def after_norm(self, module: nn.Module, args: tuple, output: Tensor) -> None:
        """The gates of routers that read the block's input after its first norm."""
        for name in self.active():
            if self.configs[name].learned.router_input == "norm":
                self.call().gates[name] = self._decide_learned(name, BLOCK, output)

    def gate(self, adapter_name: str, position: int, x: Tensor) -> Tensor:
        """The gate of the tokens of x: [..., 1] where the projection is one expert, [..., N] where it holds N."""
        config = self.configs[adapter_name]
        if routes_alone(config):
            return self._decide_learned(adapter_name, position, x)
        if config.placement == "block":
            return super().gate(adapter_name, position, x)
        return self._fitted(self._gates_of(adapter_name), x, adapter_name, position)

    def gate_all(self, adapter_name: str, positions: list[int], x: Tensor) -> GateColumns | list[Tensor]:
        if not routes_alone(self.configs[adapter_name]):
            if self.configs[adapter_name].placement == "block":
                return super().gate_all(adapter_name, positions, x)
            wide = self.gate(adapter_name, positions[0], x)  # the experts of every projection have the same gates
            return GateColumns(wide, (0,) * len(positions), wide.shape[-1])
        routers: list[Any] = [self.layers[adapter_name][p].monkeyjump_router[adapter_name] for p in positions]
        decision = None if self.call().call.knocked_out else learned.decide_together(routers, x)
        if decision is None:
            return [self.gate(adapter_name, position, x) for position in positions]
        if self.layers[adapter_name][positions[0]].training:
            columns = LearnedDecision(
                decision.gates, decision.probabilities.flatten(-2), decision.chosen.flatten(-2), decision.per_token
            )
            call = self.call()
            mask = self._fitted_mask(x, call)
            self._stage_balance(adapter_name, positions, columns, mask, call)
            for position, chosen in zip(positions, decision.chosen.unbind(-2), strict=True):
                self._count_tokens(adapter_name, [self.layers[adapter_name][position]], chosen, mask, call)
        experts = decision.gates.shape[-1]
        gates = GateColumns(decision.gates.flatten(-2), tuple(range(0, experts * len(positions), experts)), experts)
        if self.blocks.context.trace is not None:
            each = zip(positions, gates.by_projection(), decision.probabilities.unbind(-2), strict=True)
            for position, gate, probabilities in each:
                self._trace(adapter_name, position, gate, self.call(), probabilities)
        return gates

    def observes(self, adapter_name: str) -> bool:
        return self.configs[adapter_name].contrastive_weight > 0

    def observe(self, adapter_name: str, position: int, x: Tensor, base: Tensor, gate: Tensor) -> None:
        """Stage the contrastive loss between the experts of one projection."""
        config, layer, call = self.configs[adapter_name], self.layers[adapter_name][position], self.call()
        if config.contrastive_weight == 0 or not layer.training or not self._with_gradients(config, call):
            return
        experts = gate.shape[-1]
        x, base = x.flatten(0, -2), base.flatten(0, -2)
        used = gate.expand(*gate.shape[:1], x.shape[0] // gate.shape[0], -1) if gate.dim() == 3 else gate
        used = used.flatten(0, -2) > 0
        mask = self._fitted_mask(x, call)
        if mask is not None:
            used = used & mask.flatten().unsqueeze(-1)
        picked = learned.sample_tokens(x.shape[0], experts, mask, x.device)
        if picked is not None:
            x, base, used = x[picked], base[picked], used[picked]
        loss = learned.contrastive_loss(layer.monkeyjump_adapter[adapter_name].expert_outputs(x, base), used)  # type: ignore[operator]
        if call.staging:
            self.statements[adapter_name, position].contrastive = loss

    def _decide_learned(self, name: str, position: int, x: Tensor) -> Tensor:
        """The gates for x by the router of a position, which for a whole block hangs on its first projection."""
        layer = self.layers[name][max(position, 0)]
        config, router = self.configs[name], layer.monkeyjump_router[name]
        if x.shape[-1] != router.width:
            raise ConfigError(
                f"block {self.path!r} is entered by states of width {x.shape[-1]}, but the router of adapter {name!r} "
                f"expects {router.width}: the block list does not carry the model's hidden state."
            )
        decision: LearnedDecision = router(x)
        counted = [layer] if routes_alone(config) else self.layers[name]
        self._note(name, position, x, decision, counted)
        return self.without_knocked_out(name, decision.gates, self.call(), position)

    def _note(
        self, name: str, position: int, x: Tensor, decision: LearnedDecision, counted: list[MonkeyJumpLayer]
    ) -> None:
        """Record a decision: stage its balance loss, count the tokens of its experts, and trace its gates."""
        call = self.call()
        if counted[0].training:
            mask = self._fitted_mask(x, call)
            self._stage_balance(name, [position], decision, mask, call)
            self._count_tokens(name, counted, decision.chosen, mask, call)
        self._trace(name, position, decision.gates, call, decision.probabilities)

    @torch.no_grad()
    def _count_tokens(
        self, name: str, layers: list[MonkeyJumpLayer], chosen: Tensor, mask: Tensor | None, call: BlocksCall
    ) -> None:
        """Tell AdaLoRA's experts, once the forward has finished, how many of the real tokens they got."""
        if call.staging and (self.configs[name].adapter_options or {}).get("score_per_token"):
            used = chosen.flatten(0, -2)
            real = torch.ones_like(used[:, :1]) if mask is None else mask.flatten().unsqueeze(-1)
            counts = torch.cat([used & real, real], dim=-1).sum(0)
            for layer in layers:
                adapter: Any = layer.monkeyjump_adapter[name]
                if torch.compiler.is_compiling():  # a graph that serves all blocks has no list of adapters to add to
                    adapter.count_tokens(counts)
                else:
                    call.counted.append((adapter, counts))

    def _stage_balance(
        self, name: str, positions: Sequence[int], decision: LearnedDecision, mask: Tensor | None, call: BlocksCall
    ) -> None:
        """Stage the loads and probabilities of one router, or of several that lie side by side in the decision."""
        config, shape, probability = self.configs[name], (len(positions), -1), None
        if config.learned.aux_loss_weight > 0 and self._with_gradients(config, call):
            load, probability = learned.load_and_probability(decision, mask)
        elif call.staging:
            with torch.no_grad():
                load, _ = learned.load_and_probability(decision, mask)
        if call.staging:
            shares = [None] * len(positions) if probability is None else probability.view(shape).unbind()
            for position, f, p in zip(positions, load.view(shape).unbind(), shares, strict=True):
                statement = self.statements[name, position]
                statement.load, statement.probability = f.detach(), p

    def _with_gradients(self, config: MonkeyJumpConfig, call: BlocksCall) -> bool:
        """Whether a loss on this pass can be trained; reentrant checkpointing hides the first pass from autograd."""
        if call.staging and not torch.is_grad_enabled():
            balance = config.learned.aux_loss_weight
            loss = f"aux_loss_weight={balance}" if balance else f"contrastive_weight={config.contrastive_weight}"
            raise ConfigError(
                f"{loss} needs gradients through the router, which reentrant gradient "
                "checkpointing does not give: use gradient_checkpointing_kwargs={'use_reentrant': False}."
            )
        return torch.is_grad_enabled()

    def _fitted_mask(self, x: Tensor, call: BlocksCall) -> Tensor | None:
        """The mask in the leading shape of x, which may be flattened."""
        mask = call.mask
        if mask is None:
            return None
        if x.shape[:-1].numel() != mask.numel():
            raise ConfigError(
                f"a projection of block {self.path!r} sees {x.shape[:-1].numel()} tokens, but the block was entered by "
                f"{mask.numel()}: which of them are padding is not known; add it to shared_modules."
            )
        return mask.reshape(x.shape[:-1]).to(x.device)

    def _trace(self, name: str, position: int, gates: Tensor, call: BlocksCall, p: Tensor | None = None) -> None:
        trace = self.blocks.context.trace
        if trace is not None and not call.recomputing:
            key, kinds = self._key_of(name, position), call.kinds(call.shape)
            wide = self.without_knocked_out(name, gates, call, position).reshape(*call.shape, -1)
            p = p.reshape(*call.shape, -1) if p is not None and trace.probabilities_wanted else None
            trace.record(key, name, self.experts_by_key(name)[key], wide, call.mask, kinds, p)

    def experts_by_key(self, adapter_name: str) -> dict[str, tuple[str, ...]]:
        config, names = self.configs[adapter_name], self.names[adapter_name]
        if config.placement != "block":
            names = tuple(f"expert {n}" for n in range(self.experts[adapter_name]))
        positions = range(len(self.names[adapter_name])) if routes_alone(config) else [BLOCK]
        return {self._key_of(adapter_name, position): names for position in positions}

    def _key_of(self, name: str, position: int) -> str:
        return self.key if position == BLOCK else f"{self.key}.{self.names[name][position]}"


def routes_alone(config: MonkeyJumpConfig) -> bool:
    """Whether every projection has a router of its own, on its own input."""
    return config.placement == "projection" and config.learns_router and config.projection.router_scope == "projection"
