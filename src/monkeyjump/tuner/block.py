"""One block: the hidden state that enters it becomes gates, which its projections read.

Shapes: B batch, T tokens, D hidden width, E routed projections of the block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from monkeyjump.config import MonkeyJumpConfig
from monkeyjump.errors import ConfigError
from monkeyjump.ops.settings import GateColumns
from monkeyjump.routing.router import Decision, Staged, route, shuffled_gates, task_gates, uniform_gates
from monkeyjump.tuner.inputs import expanded_rows, hidden_states, in_backward, real_tokens
from monkeyjump.tuner.layer import MonkeyJumpLayer
from monkeyjump.tuner.placement import Block

if TYPE_CHECKING:
    from monkeyjump.tuner.group import BlockGroup

REMEMBERED = 8  # training forwards a block keeps the gates of, for recomputation in a later backward


class BlockRouter:
    """The gates of one block."""

    def __init__(self, group: BlockGroup, block: Block, module: nn.Module) -> None:
        self.group = group
        self.key = block.key
        self.path = block.path
        self.names: dict[str, tuple[str, ...]] = {}  # adapter name -> its experts, in order
        self.configs: dict[str, MonkeyJumpConfig] = {}
        self.layers: dict[str, list[MonkeyJumpLayer]] = {}
        self.gates: dict[str, torch.Tensor] = {}
        self.remembered: dict[tuple[str, int], torch.Tensor] = {}
        self.shape: tuple[int, int] = (0, 0)
        self._handles = [
            module.register_forward_pre_hook(self.before, with_kwargs=True),
            module.register_forward_hook(self.after),
        ]

    def add(self, adapter_name: str, config: MonkeyJumpConfig, block: Block, layers: list[MonkeyJumpLayer]) -> None:
        self.names[adapter_name] = block.names
        self.configs[adapter_name] = config
        self.layers[adapter_name] = layers
        for position, layer in enumerate(layers):
            layer.routers[adapter_name] = (self, position)

    def forget(self, adapter_name: str) -> None:
        for table in (self.names, self.configs, self.layers, self.gates):
            table.pop(adapter_name, None)
        self.group.initialized.discard(adapter_name)

    def active(self) -> list[str]:
        return [
            name
            for name, layers in self.layers.items()
            if name in layers[0].active_adapters and not layers[0].disable_adapters and not layers[0].merged
        ]

    def before(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        active, collector = self.active(), self.group.context.collector
        if not active and collector is None:
            return
        h = hidden_states(args, kwargs, self.path)
        self.shape = (h.shape[0], h.shape[1])
        if collector is not None:
            collector.observe(self, h)
        recomputing = in_backward()
        for name in active:
            gates = self._recall(name, h) if recomputing else None
            if gates is None:
                gates = self._decide(name, h, module.training)
                self._remember(name, h, gates)
            self.gates[name] = gates
            trace = self.group.context.trace
            if trace is not None and not recomputing:
                mask = real_tokens(self.group.arguments.get("attention_mask"), h.shape[:2])
                trace.record(self.key, name, self.names[name], gates.expand(*h.shape[:2], -1), mask)

    def after(self, module: nn.Module, args: tuple, output: Any) -> None:
        self.gates = {}

    def gate(self, adapter_name: str, position: int, x: torch.Tensor) -> torch.Tensor:
        """The gate of the tokens of x, [..., 1]."""
        return self._fitted(self._gates_of(adapter_name)[..., position, None], x, adapter_name, position)

    def gate_all(self, adapter_name: str, positions: list[int], x: torch.Tensor) -> GateColumns | list[torch.Tensor]:
        """The gates of projections that read the same x, as columns of one tensor where they are."""
        wide = self._fitted(self._gates_of(adapter_name), x, adapter_name, positions[0])
        return GateColumns(wide, tuple(positions), 1)

    def observes(self, adapter_name: str) -> bool:
        """Whether `observe` wants to see the projections of this adapter."""
        return False

    def observe(
        self, adapter_name: str, position: int, x: torch.Tensor, base: torch.Tensor, gate: torch.Tensor
    ) -> None:
        """Called after a routed projection, with its input, frozen output and gate: for losses on what experts do."""

    def _gates_of(self, adapter_name: str) -> torch.Tensor:
        if adapter_name not in self.gates:
            raise RuntimeError(
                f"a routed projection of block {self.path!r} ran outside its block: call the whole block, which "
                "computes the gates."
            )
        return self.gates[adapter_name]

    def _fitted(self, gate: torch.Tensor, x: torch.Tensor, adapter_name: str, position: int) -> torch.Tensor:
        """Gates [B, T or 1, G] in the leading shape of x: [..., G]."""
        if x.dim() == 2 and gate.dim() == 3:  # a module that flattens its tokens
            gate = gate.expand(*self.shape, -1).reshape(-1, gate.shape[-1])
        rows_only = gate.dim() == 3 and gate.shape[1] == 1 and x.shape[0] == gate.shape[0]
        if x.shape[:-1] != gate.shape[:-1] and not rows_only:
            expert = self.names[adapter_name][position]
            raise ConfigError(
                f"projection {expert!r} of block {self.path!r} sees tokens of shape {tuple(x.shape[:-1])}, but the "
                f"block was entered by {tuple(self.shape)}: it cannot be routed token by token. Add it to "
                "shared_modules, or use granularity='sequence' or 'task'."
            )
        return gate.to(x.device)

    def _remember(self, name: str, h: torch.Tensor, gates: torch.Tensor) -> None:
        """Keep the gates of a training forward for its recomputation under gradient checkpointing.

        Between the two, another forward may have moved the centres and brought another mask. The key is the memory of
        h: checkpointing keeps h alive until it recomputes, so no later tensor can have taken its place.
        """
        if self.group.staging and not torch.compiler.is_compiling():
            while len(self.remembered) >= REMEMBERED:
                self.remembered.pop(next(iter(self.remembered)))
            self.remembered.pop((name, h.data_ptr()), None)
            self.remembered[name, h.data_ptr()] = gates

    def _recall(self, name: str, h: torch.Tensor) -> torch.Tensor | None:
        gates = self.remembered.get((name, h.data_ptr()))
        if gates is not None and (self.configs[name].jitter > 0 or self.configs[name].router == "shuffled"):
            self._route(name, h, training=True)  # draws what the forward drew, for the dropout after it
        return gates

    def _decide(self, name: str, h: torch.Tensor, training: bool) -> torch.Tensor:
        config, layers, group = self.configs[name], self.layers[name], self.group
        if config.router == "uniform":
            return uniform_gates(h, len(layers), config)
        if config.granularity == "task":
            return self._task_gates(config, len(layers), h)
        if config.granularity == "sequence" and group.kept is not None and (self.path, name) in group.kept:
            gates = expanded_rows(group.kept[self.path, name], h.shape[0])
            group.fresh[self.path, name] = gates
            return gates
        decision = self._route(name, h, training)
        if config.granularity == "sequence" and not training:
            group.fresh[self.path, name] = decision.gates[:, -1:]
        return decision.gates

    def _route(self, name: str, h: torch.Tensor, training: bool) -> Decision:
        config, layers = self.configs[name], self.layers[name]
        centers = [layer.monkeyjump_center[name] for layer in layers]
        if h.shape[-1] != centers[0].shape[0]:
            raise ConfigError(
                f"block {self.path!r} is entered by states of width {h.shape[-1]}, but the centres of adapter "
                f"{name!r} have width {centers[0].shape[0]}: the block list does not carry the model's hidden state."
            )
        mean = layers[0].monkeyjump_mean[name] if config.route_space == "centered" else None
        decision = route(
            h.detach().to(centers[0].device),
            centers,
            mean,
            self.group.selection(name, config, h),
            config,
            training=training,
            into=self._staged(name) if self.group.staging else None,
        )
        if config.router == "shuffled":
            decision.gates = shuffled_gates(decision.gates, self.group.mask(self.shape, h.device))
        return decision

    def _staged(self, name: str) -> Staged:
        layers = self.layers[name]
        return Staged(
            [layer.monkeyjump_staged_sum[name] for layer in layers],
            [layer.monkeyjump_staged_count[name] for layer in layers],
        )

    def _task_gates(self, config: MonkeyJumpConfig, experts: int, h: torch.Tensor) -> torch.Tensor:
        task_ids = self.group.task_ids
        if task_ids is None:
            raise ConfigError(
                "granularity='task' needs `task_ids`, one integer per row of the batch: add them to the batch "
                "(with the Trainer also set remove_unused_columns=False), or choose granularity='token'."
            )
        task_ids = task_ids.reshape(-1).to(h.device)
        seq_idx = self.group.arguments.get("seq_idx")
        if seq_idx is not None:  # packed: one id per sequence of the row
            return task_gates(task_ids[seq_idx.clamp_min(0).long()], experts, config)
        rows = expanded_rows(task_ids, h.shape[0])
        if rows.shape[0] != h.shape[0]:
            raise ConfigError(
                f"task_ids has {rows.shape[0]} entries for a batch of {h.shape[0]} rows: give one per row."
            )
        return task_gates(rows.unsqueeze(1), experts, config)
