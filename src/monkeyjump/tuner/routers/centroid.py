"""Monkey Jump's router in one block: tokens are compared with one centre per projection.

Shapes: B batch, T tokens, D hidden width, E routed projections of the block.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from monkeyjump.config import MonkeyJumpConfig
from monkeyjump.errors import ConfigError
from monkeyjump.routing.centroid import Staged, decide, shuffled_gates, task_gates, uniform_gates
from monkeyjump.tuner.call import BlocksCall, expanded_rows
from monkeyjump.tuner.layer import MonkeyJumpLayer
from monkeyjump.tuner.placement import Block
from monkeyjump.tuner.routers.base import BlockRouter


class CentroidRouter(BlockRouter):
    """Makes gates without parameters or gradients: by centres, by task, or the same for all (a control)."""

    def add(self, adapter_name: str, config: MonkeyJumpConfig, block: Block, layers: list[MonkeyJumpLayer]) -> None:
        super().add(adapter_name, config, block, layers)
        if config.expert_unit == "rank":
            self.names[adapter_name] = tuple(f"{name}.{rank}" for name in block.names for rank in range(config.units))

    def gates_each(self, adapter_name: str) -> int:
        return self.configs[adapter_name].units

    def collects(self) -> bool:
        return self.blocks.context.collector is not None

    def decide(self, active: list[str], h: Tensor, training: bool, call: BlocksCall) -> None:
        collector, trace = self.blocks.context.collector, self.blocks.context.trace
        if collector is not None:
            collector.observe(self, h, call)
        for name in active:
            gates = call.gates_of.get((self.path, name)) if call.recomputing else None
            if gates is not None:
                if self.configs[name].jitter > 0 or self.configs[name].router == "shuffled":
                    self._route(name, h, True, call)  # draws as the forward did, so that later dropout agrees with it
            else:
                gates = self.without_knocked_out(name, self._decided(name, h, training, call), call)
                if call.staging and not torch.compiler.is_compiling():
                    call.gates_of[self.path, name] = gates
            call.gates[name] = gates
            if trace is not None and not call.recomputing:
                mask, kinds = call.real_tokens(call.shape, h.device), call.kinds(call.shape)
                p = self._probabilities(name, h, call) if trace.probabilities_wanted else None
                p = None if p is None else p.expand(*call.shape, -1)
                trace.record(self.key, name, self.names[name], gates.expand(*call.shape, -1), mask, kinds, p)

    def _decided(self, name: str, h: Tensor, training: bool, call: BlocksCall) -> Tensor:
        config = self.configs[name]
        if config.router == "uniform":
            return uniform_gates(h, len(self.names[name]), config)
        if config.granularity == "task":
            task_ids = self._task_ids(name, call, h)
            if task_ids is None:
                raise ConfigError(
                    "granularity='task' needs `task_ids`, one integer per row of the batch: add them to the batch "
                    "(with the Trainer also set remove_unused_columns=False), or choose granularity='token'."
                )
            return task_gates(task_ids, len(self.names[name]), config)
        if config.granularity == "sequence" and call.kept is not None and (self.path, name) in call.kept:
            gates = expanded_rows(call.kept[self.path, name], h.shape[0])
            call.fresh[self.path, name] = gates
            return gates
        gates = self._route(name, h, training, call)
        if config.granularity == "sequence" and not training:
            call.fresh[self.path, name] = gates[:, -1:]
        return gates

    def _probabilities(self, name: str, h: Tensor, call: BlocksCall) -> Tensor | None:
        """The softmax over all experts, before the top k of them are taken; None where no state is compared here."""
        config = self.configs[name]
        if config.router != "centroid" or config.granularity == "task" or (self.path, name) in (call.kept or {}):
            return None
        centers = _each(layer.monkeyjump_center[name] for layer in self.layers[name])
        mean = self.layers[name][0].monkeyjump_mean[name] if config.route_space == "centered" else None
        selection = call.selection(name, config, call.shape, h.device)
        every = replace(config, top_k=len(centers), renormalize=False, mean_gate=None)
        return decide(h.detach().to(centers[0].device), centers, mean, selection, every)

    def _route(self, name: str, h: Tensor, training: bool, call: BlocksCall) -> Tensor:
        config, layers = self.configs[name], self.layers[name]
        centers = _each(layer.monkeyjump_center[name] for layer in layers)
        if h.shape[-1] != centers[0].shape[0]:
            raise ConfigError(
                f"block {self.path!r} is entered by states of width {h.shape[-1]}, but the centres of adapter "
                f"{name!r} have width {centers[0].shape[0]}: the block list does not carry the model's hidden state."
            )
        mean = layers[0].monkeyjump_mean[name] if config.route_space == "centered" else None
        staged = None
        if call.staging and call.statistics:
            counts = [layer.monkeyjump_staged_count[name] for layer in layers]
            counts = [count for own in counts for count in (own.unbind() if own.dim() else (own,))]
            staged = Staged(_each(layer.monkeyjump_staged_sum[name] for layer in layers), counts)
        selection = call.selection(name, config, call.shape, h.device)
        h = h.detach().to(centers[0].device)
        gates = decide(h, centers, mean, selection, config, training=training, into=staged)
        if config.router == "shuffled":
            gates = shuffled_gates(gates, call.real_tokens(call.shape, h.device))
        return gates


def _each(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The vectors [D] of all experts; a projection holds one, or one for each of its ranks, [R, D]."""
    return [row for tensor in tensors for row in (tensor.unbind() if tensor.dim() > 1 else (tensor,))]
