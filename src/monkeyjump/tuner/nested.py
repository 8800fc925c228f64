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
from torch import nn

from monkeyjump.config import MonkeyJumpConfig
from monkeyjump.errors import ConfigError, MonkeyJumpWarning
from monkeyjump.routing.granularity import row_weights
from monkeyjump.routing.ranks import RankSelector
from monkeyjump.tuner.block import REMEMBERED
from monkeyjump.tuner.inputs import expanded_rows
from monkeyjump.tuner.learned import LearnedBlockRouter


@dataclass
class TaskCall:
    """What one forward of a block knows about tasks."""

    task_ids: torch.Tensor | None  # int64 [B, 1], or [B, T] for packed rows; None: the nearest
    weights: torch.Tensor | None  # [B, T], see `row_weights`; None where no state is needed


class NestedRouter(LearnedBlockRouter):
    """The tasks of the rows that enter one block, turned into the ranks that its projections use."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.calls: dict[str, TaskCall] = {}
        self.kept_calls: dict[tuple[str, int], TaskCall] = {}

    def decide(self, active: list[str], h: torch.Tensor, training: bool) -> None:
        for name in active:
            call = self.kept_calls.get((name, h.data_ptr())) if self.recomputing else None
            self.calls[name] = self._call(self.configs[name], h) if call is None else call
            if self.group.staging and not torch.compiler.is_compiling():  # as in BlockRouter, for the recomputation
                self.kept_calls.pop((name, h.data_ptr()), None)
                while len(self.kept_calls) >= REMEMBERED:
                    self.kept_calls.pop(next(iter(self.kept_calls)))
                self.kept_calls[name, h.data_ptr()] = self.calls[name]

    def after(self, module: nn.Module, args: tuple, output: Any) -> None:
        self.calls = {}

    def gate_all(self, adapter_name: str, positions: list[int], x: torch.Tensor) -> list[torch.Tensor]:
        return [self.gate(adapter_name, position, x) for position in positions]

    def gate(self, adapter_name: str, position: int, x: torch.Tensor) -> torch.Tensor:
        """The factor on every rank for the rows of x: [B, 1, R], or [B, T, R] for packed rows."""
        if adapter_name not in self.calls:
            raise RuntimeError(f"a projection of block {self.path!r} ran outside its block: call the whole block.")
        call = self.calls[adapter_name]
        selector: RankSelector = self.layers[adapter_name][position].monkeyjump_router[adapter_name]  # type: ignore[assignment]
        task_ids = call.task_ids
        if task_ids is None:
            task_ids = self._nearest(adapter_name, position, selector, x)
        elif call.weights is not None:
            self._stage_task_loss(adapter_name, position, selector, x)
        gate = selector(task_ids.to(x.device))
        if x.dim() == 2:  # a module that flattens its tokens
            gate = gate.expand(*self.shape, -1).reshape(-1, gate.shape[-1])
        return gate

    def observe(self, *args: Any) -> None:
        """Nothing more to learn from a projection's output."""

    def _call(self, config: MonkeyJumpConfig, h: torch.Tensor) -> TaskCall:
        group = self.group
        shape = (h.shape[0], h.shape[1])
        if group.task_ids is None:
            if group.staging:
                raise ConfigError(
                    "placement='nested' (MoRE) learns one choice of ranks per task and needs `task_ids` in training, "
                    "one integer per row of the batch: add them to the batch (with the Trainer also set "
                    "remove_unused_columns=False)."
                )
            return TaskCall(None, row_weights(group.call_inputs(shape, h.device), config.task_rep))
        task_ids = self._task_ids(config, h)
        weights = None
        if config.contrastive_weight > 0 and group.staging:
            if task_ids.shape[1] > 1:
                raise ConfigError(
                    f"contrastive_weight={config.contrastive_weight} compares one state per row with the tasks, but "
                    "these rows hold several packed sequences: do not pack, or set contrastive_weight=0."
                )
            weights = row_weights(group.call_inputs(shape, h.device), config.task_rep)
        return TaskCall(task_ids, weights)

    def _task_ids(self, config: MonkeyJumpConfig, h: torch.Tensor) -> torch.Tensor:
        assert self.group.task_ids is not None
        task_ids = self.group.task_ids.reshape(-1).to(h.device).long()
        cheap = task_ids.device.type == "cpu" and not torch.compiler.is_compiling()  # elsewhere a look synchronises
        if cheap and not bool(((task_ids >= 0) & (task_ids < config.tasks)).all()):
            raise ConfigError(
                f"task_ids={task_ids.tolist()} must lie in 0..{config.tasks - 1}: raise tasks={config.tasks} to the "
                "number of tasks in the data."
            )
        seq_idx = self.group.arguments.get("seq_idx")
        if seq_idx is not None:
            return task_ids[seq_idx.clamp_min(0).long()]
        rows = expanded_rows(task_ids, h.shape[0])
        if rows.shape[0] != h.shape[0]:
            raise ConfigError(
                f"task_ids has {rows.shape[0]} entries for a batch of {h.shape[0]} rows: give one per row."
            )
        return rows.unsqueeze(1)

    def _nearest(self, name: str, position: int, selector: RankSelector, x: torch.Tensor) -> torch.Tensor:
        """The task of each row by its state, [B, 1]; decided on the prompt, then kept."""
        group, config = self.group, self.configs[name]
        key = (self._key_of(name, position), name)
        if group.kept is not None and key in group.kept:
            task_ids = expanded_rows(group.kept[key], self.shape[0])
        else:
            if selector.tasks.shape[1] != x.shape[-1]:
                raise ConfigError(
                    f"without `task_ids` the nearest task embedding decides, but task_width={config.task_width} "
                    f"embeddings cannot be compared with states of width {x.shape[-1]}: pass task_ids, or set "
                    "task_width=None."
                )
            self._say_so(name)
            task_ids = selector.task_logits(self._row_state(name, x)).argmax(-1, keepdim=True)
        group.fresh[key] = task_ids
        return task_ids

    def _row_state(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """The state that stands for each row, fp32 [B, D]."""
        weights = self.calls[name].weights
        assert weights is not None
        if x.shape[:-1].numel() != weights.numel():
            raise ConfigError(
                f"a projection of block {self.path!r} sees {tuple(x.shape[:-1])} tokens, but the block was entered by "
                f"{self.shape}: no state of its own stands for a row. Exclude it with exclude_modules, or pass "
                "task_ids and set contrastive_weight=0."
            )
        x = x.reshape(*self.shape, x.shape[-1])
        # a row of zeros in `weights` must also silence what padding may hold: NaN times 0 is NaN
        real = (weights > 0).unsqueeze(-1).to(x.device)
        x = x.masked_fill(~real, 0.0).to(torch.promote_types(x.dtype, torch.float32))
        return torch.einsum("bt,btd->bd", weights.to(x), x)

    def _stage_task_loss(self, name: str, position: int, selector: RankSelector, x: torch.Tensor) -> None:
        """Cross-entropy of the row's state against the true task, the authors' contrastive loss."""
        task_ids = self.calls[name].task_ids
        assert task_ids is not None
        config = self.configs[name]
        if not self._with_gradients(config):
            return
        logits = selector.task_logits(self._row_state(name, x))
        loss = F.cross_entropy(logits, task_ids.squeeze(1).to(logits.device))
        if self.group.staging and not self.recomputing:
            self.statements[name, position].stage_contrastive(loss)

    def _say_so(self, name: str) -> None:
        if name not in self.group.told and not torch.compiler.is_compiling():
            self.group.told.add(name)
            warnings.warn(
                f"adapter {name!r} routes by task but got no `task_ids`: each projection uses the task whose embedding "
                "is nearest to the prompt. Pass task_ids (one per row) to decide yourself.",
                MonkeyJumpWarning,
                stacklevel=2,
            )
