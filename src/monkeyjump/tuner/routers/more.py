"""MoRE's placement: the first ranks of one adapter per projection, as many as the row's task has chosen.

A row brings its task in `task_ids`. Without them, outside training, every projection takes the task whose embedding is
nearest to the state that stands for the row (`task_rep`); the choice is made on the prompt and kept for all decode
steps.

Shapes: B batch, T tokens, D width, K tasks, R ranks.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monkeyjump.errors import ConfigError, MonkeyJumpWarning
from monkeyjump.routing.granularity import row_weights
from monkeyjump.routing.more_ranks import RankSelector
from monkeyjump.tuner.call import BlocksCall, expanded_rows, running
from monkeyjump.tuner.routers.learned import LearnedRouterOfBlock


@dataclass
class RowTasks:
    """What one forward of a block knows about the tasks of its rows."""

    task_ids: Tensor | None  # int64 [B, 1], or [B, T] for packed rows; None: the nearest
    weights: Tensor | None  # [B, T], see `row_weights`; None where no state is needed


class MoreRouter(LearnedRouterOfBlock):
    """The tasks of the rows that enter one block, turned into the ranks that its projections use."""

    def decide(self, active: list[str], h: Tensor, training: bool, call: BlocksCall) -> None:
        traced = self.blocks.context.trace is not None
        call.mask = call.real_tokens(call.shape, h.device) if traced else None
        for name in active:
            call.tasks[name] = self._tasks(name, h, call)

    def experts_by_key(self, adapter_name: str) -> dict[str, tuple[str, ...]]:
        """There are none: ranks are taken, not experts."""
        return {}

    def end(self, module: nn.Module, args: tuple, output: Any) -> None:
        super().end(module, args, output)
        call = running().blocks
        if call is not None:
            for name in self.layers:
                call.tasks.pop(name, None)

    def gate_all(self, adapter_name: str, positions: list[int], x: Tensor) -> list[Tensor]:
        return [self.gate(adapter_name, position, x) for position in positions]

    def gate(self, adapter_name: str, position: int, x: Tensor) -> Tensor:
        """The factor on every rank for the rows of x: [B, 1, R], or [B, T, R] for packed rows."""
        call = self.call()
        if adapter_name not in call.tasks:
            raise self._outside()
        tasks: RowTasks = call.tasks[adapter_name]
        selector: RankSelector = self.layers[adapter_name][position].monkeyjump_router[adapter_name]  # type: ignore[assignment]
        task_ids = tasks.task_ids
        if task_ids is None:
            task_ids = self._nearest(adapter_name, position, selector, x, call)
        elif tasks.weights is not None:
            self._stage_task_loss(adapter_name, position, selector, x, call)
        gate = selector(task_ids.to(x.device))
        trace = self.blocks.context.trace
        if trace is not None and not call.recomputing:
            key, names = self._key_of(adapter_name, position), tuple(f"expert {n}" for n in range(gate.shape[-1]))
            wide, kinds = gate.expand(*call.shape, -1), call.kinds(call.shape)
            trace.record(key, adapter_name, names, wide, call.mask, kinds)
        if x.dim() == 2:  # a module that flattens its tokens
            gate = gate.expand(*call.shape, -1).reshape(-1, gate.shape[-1])
        return gate

    def observe(self, *args: Any) -> None:
        """MoRE takes no loss from the output of a projection."""

    def _tasks(self, name: str, h: Tensor, call: BlocksCall) -> RowTasks:
        config, task_ids = self.configs[name], self._task_ids(name, call, h)
        if task_ids is None:
            if call.staging:
                raise ConfigError(
                    "placement='nested' (MoRE) learns one choice of ranks per task and needs `task_ids` in training, "
                    "one integer per row of the batch: add them to the batch (with the Trainer also set "
                    "remove_unused_columns=False)."
                )
            return RowTasks(None, row_weights(call.inputs(call.shape, h.device), config.more.task_rep))
        cheap = task_ids.device.type == "cpu" and not torch.compiler.is_compiling()  # a GPU would have to wait
        if cheap and not bool(((task_ids >= 0) & (task_ids < config.more.tasks)).all()):
            raise ConfigError(
                f"task_ids={task_ids.flatten().tolist()} must lie in 0..{config.more.tasks - 1}: raise "
                f"tasks={config.more.tasks} to the number of tasks in the data."
            )
        weights = None
        if config.contrastive_weight > 0 and (call.staging or call.recomputing):
            if task_ids.shape[1] > 1:
                raise ConfigError(
                    f"contrastive_weight={config.contrastive_weight} compares one state per row with the tasks, but "
                    "these rows hold several packed sequences: do not pack, or set contrastive_weight=0."
                )
            weights = row_weights(call.inputs(call.shape, h.device), config.more.task_rep)
        return RowTasks(task_ids.long(), weights)

    def _nearest(self, name: str, position: int, selector: RankSelector, x: Tensor, call: BlocksCall) -> Tensor:
        """The task of each row by its state, [B, 1]; decided on the prompt, then kept."""
        config, key = self.configs[name], (self._key_of(name, position), name)
        if call.kept is not None and key in call.kept:
            task_ids = expanded_rows(call.kept[key], call.shape[0])
        else:
            if selector.tasks.shape[1] != x.shape[-1]:
                raise ConfigError(
                    f"without `task_ids` the nearest task embedding decides, but task_width={config.more.task_width} "
                    f"embeddings cannot be compared with states of width {x.shape[-1]}: pass task_ids, or set "
                    "task_width=None."
                )
            if name not in self.blocks.told and not torch.compiler.is_compiling():
                self.blocks.told.add(name)
                warnings.warn(
                    f"adapter {name!r} routes by task but got no `task_ids`: each projection uses the task whose "
                    "embedding is nearest to the prompt. Pass task_ids (one per row) to decide yourself.",
                    MonkeyJumpWarning,
                    stacklevel=2,
                )
            task_ids = selector.task_logits(self._row_state(name, x, call)).argmax(-1, keepdim=True)
        call.fresh[key] = task_ids
        return task_ids

    def _row_state(self, name: str, x: Tensor, call: BlocksCall) -> Tensor:
        """The state that stands for each row, fp32 [B, D]."""
        weights = call.tasks[name].weights
        assert weights is not None
        if x.shape[:-1].numel() != weights.numel():
            raise ConfigError(
                f"a projection of block {self.path!r} sees {tuple(x.shape[:-1])} tokens, but the block was entered by "
                f"{call.shape}: no state of its own stands for a row. Exclude it with exclude_modules, or pass "
                "task_ids and set contrastive_weight=0."
            )
        x = x.reshape(*call.shape, x.shape[-1])
        # a row of zeros in `weights` must also silence what padding may hold: NaN times 0 is NaN
        real = (weights > 0).unsqueeze(-1).to(x.device)
        x = x.masked_fill(~real, 0.0).to(torch.promote_types(x.dtype, torch.float32))
        return torch.einsum("bt,btd->bd", weights.to(x), x)

    def _stage_task_loss(self, name: str, position: int, selector: RankSelector, x: Tensor, call: BlocksCall) -> None:
        """Cross-entropy of the row's state against the true task, the authors' contrastive loss."""
        task_ids = call.tasks[name].task_ids
        if not self._with_gradients(self.configs[name], call):
            return
        logits = selector.task_logits(self._row_state(name, x, call))
        loss = F.cross_entropy(logits, task_ids.squeeze(1).to(logits.device))
        if call.staging:
            self.statements[name, position].contrastive = loss
