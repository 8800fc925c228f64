"""The router of one block: it makes gates when the block is entered, and the block's projections read them.

Shapes: B batch, T tokens, D hidden width, E routed projections of the block, G gates of one projection.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from monkeyjump.config import MonkeyJumpConfig
from monkeyjump.errors import ConfigError
from monkeyjump.ops.lowrank import GateColumns
from monkeyjump.tuner.call import BlocksCall, expanded_rows, hidden_states, running
from monkeyjump.tuner.layer import MonkeyJumpLayer
from monkeyjump.tuner.placement import Block
from monkeyjump.tuner.recomputation import recomputes_forward, refuse_unknown_recomputation

if TYPE_CHECKING:
    from monkeyjump.tuner.block_list import BlockList


class BlockRouter:
    """The gates of one block, for every adapter that routes it."""

    def __init__(self, blocks: BlockList, block: Block, module: nn.Module) -> None:
        self.blocks = blocks
        self.module = module
        self.key = block.key
        self.path = block.path
        self.names: dict[str, tuple[str, ...]] = {}  # adapter name -> its experts, in order
        self.configs: dict[str, MonkeyJumpConfig] = {}
        self.layers: dict[str, list[MonkeyJumpLayer]] = {}
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
        for table in (self.names, self.configs, self.layers):
            table.pop(adapter_name, None)
        self.blocks.initialized.discard(adapter_name)

    def active(self) -> list[str]:
        return [
            name
            for name, layers in self.layers.items()
            if name in layers[0].running_adapters() and not layers[0].disable_adapters and not layers[0].merged
        ]

    def before(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        return None if recomputes_forward(module) else self.begin(module, args, kwargs)

    def after(self, module: nn.Module, args: tuple, output: Any) -> None:
        if not recomputes_forward(module):
            self.end(module, args, output)

    def begin(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Decide for every active adapter. This runs when the block is entered."""
        active = self.active()
        if active or self.collects():
            call = self.call()
            h = hidden_states(args, kwargs, self.path)
            call.shape = (h.shape[0], h.shape[1])
            self.decide(active, h, module.training, call)

    def end(self, module: nn.Module, args: tuple, output: Any) -> None:
        call = running().blocks
        if call is not None:
            for name in self.layers:
                call.gates.pop(name, None)
            if call.alone:
                self.blocks.close(module, args, output)

    def collects(self) -> bool:
        """Whether the states that enter the block are wanted even while no adapter is active."""
        return False

    def decide(self, active: list[str], h: Tensor, training: bool, call: BlocksCall) -> None:
        """Put the gates of the active adapters for the states h [B, T, D] into the call."""
        raise NotImplementedError

    def call(self) -> BlocksCall:
        """The call of the stack of blocks that runs in this thread; one of its own for a block called by itself."""
        call = running().blocks
        if call is None or call.blocks is not self.blocks:
            refuse_unknown_recomputation(self.path)
            call = self.blocks.open()
            call.alone = True
        return call

    def gates_each(self, adapter_name: str) -> int:
        """Gates of one projection."""
        return 1

    def gate(self, adapter_name: str, position: int, x: Tensor) -> Tensor:
        """The gates of the tokens of x, [..., G]; mostly one."""
        first, number = position * self.gates_each(adapter_name), self.gates_each(adapter_name)
        return self._fitted(self._gates_of(adapter_name).narrow(-1, first, number), x, adapter_name, position)

    def gate_all(self, adapter_name: str, positions: list[int], x: Tensor) -> GateColumns | list[Tensor]:
        """The gates of projections that read the same x, as columns of one tensor where that is possible."""
        wide = self._fitted(self._gates_of(adapter_name), x, adapter_name, positions[0])
        number = self.gates_each(adapter_name)
        return GateColumns(wide, tuple(number * position for position in positions), number)

    def experts_by_key(self, adapter_name: str) -> dict[str, tuple[str, ...]]:
        """The experts of this router, under the key that a trace has for it."""
        return {self.key: self.names[adapter_name]}

    def without_knocked_out(self, adapter_name: str, gates: Tensor, call: BlocksCall, position: int = -1) -> Tensor:
        """The gates [..., E] with zeros for the experts that this call does without."""
        if not call.call.knocked_out:
            return gates
        key = self._key_of(adapter_name, position)
        off, names = call.call.knocked_out.get(key, ()), self.experts_by_key(adapter_name)[key]
        return gates * gates.new_tensor([float(name not in off) for name in names])

    def _key_of(self, name: str, position: int) -> str:
        """How a user names the router. Not for code that is traced: it differs between blocks."""
        return self.key

    def observes(self, adapter_name: str) -> bool:
        """Whether `observe` wants to see the projections of this adapter."""
        return False

    def observe(self, adapter_name: str, position: int, x: Tensor, base: Tensor, gate: Tensor) -> None:
        """Take losses on what experts do. It runs after a routed projection, with its input, frozen output and gate."""

    def _gates_of(self, adapter_name: str) -> Tensor:
        call = running().blocks
        if call is None or adapter_name not in call.gates:
            refuse_unknown_recomputation(self.path)
            raise self._outside()
        return call.gates[adapter_name]

    def _outside(self) -> RuntimeError:
        return RuntimeError(
            f"a routed projection of block {self.path!r} ran outside its block: call the whole block, which computes "
            "the gates."
        )

    def _fitted(self, gate: Tensor, x: Tensor, adapter_name: str, position: int) -> Tensor:
        """Bring gates [B, T or 1, G] into the leading shape of x: [..., G]."""
        shape = self.call().shape
        if x.dim() == 2 and gate.dim() == 3:  # a module that flattens its tokens
            gate = gate.expand(*shape, -1).reshape(-1, gate.shape[-1])
        rows_only = gate.dim() == 3 and gate.shape[1] == 1 and x.shape[0] == gate.shape[0]
        if x.shape[:-1] != gate.shape[:-1] and not rows_only:
            expert = self.names[adapter_name][position * self.gates_each(adapter_name)]
            raise ConfigError(
                f"projection {expert!r} of block {self.path!r} sees tokens of shape {tuple(x.shape[:-1])}, but the "
                f"block was entered by {tuple(shape)}: it cannot be routed token by token. Add it to "
                "shared_modules, or use granularity='sequence' or 'task'."
            )
        return gate.to(x.device)

    def _task_ids(self, adapter_name: str, call: BlocksCall, h: Tensor) -> Tensor | None:
        """The task of every row of h [B, 1], or of every token of packed rows [B, T]; None where nobody has told."""
        if call.call.task_ids is None:
            return None
        task_ids = call.call.task_ids.reshape(-1).to(h.device)
        seq_idx = call.arguments.get("seq_idx")
        if seq_idx is not None:  # packed: one id per sequence of the row
            return task_ids[seq_idx.clamp_min(0).long()]
        rows = expanded_rows(task_ids, h.shape[0])
        if rows.shape[0] != h.shape[0]:
            raise ConfigError(
                f"task_ids has {rows.shape[0]} entries for a batch of {h.shape[0]} rows: give one per row."
            )
        if call.call.row_adapters is not None:  # the tasks of another adapter's rows may be none of this one's
            rows = call.call.row_adapters.chosen(adapter_name, rows, torch.zeros_like(rows))
        return rows.unsqueeze(1)
