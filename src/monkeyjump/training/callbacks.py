"""MonkeyJumpCallback: what a Trainer has to do for a routed adapter, which is little, and what it logs of routing."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset
from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler

from monkeyjump.adapters import AdaLoraAdapter, Adapter, FlyLoraAdapter, LoraFaAdapter
from monkeyjump.config import MonkeyJumpConfig
from monkeyjump.errors import MonkeyJumpWarning
from monkeyjump.training.fast import fast
from monkeyjump.training.progress import is_main_rank
from monkeyjump.tuner.centers.calibrate import CalibrationReport, centers_initialized, initialize_centers
from monkeyjump.tuner.centers.revive import revive_experts
from monkeyjump.tuner.context import RoutingContext
from monkeyjump.tuner.model import find_context, require_context
from monkeyjump.tuner.trace import ExpertLoad, staged_load
from monkeyjump.tuner.training.optimizer_steps import allocate_ranks, balance_ranks, project_gradients
from monkeyjump.tuner.training.regularizer import active_adapters, add_regularizer_gradients


@dataclass(eq=False, repr=False)
class MonkeyJumpCallback(TrainerCallback):
    """Initialises centres when training begins, logs expert load, runs AdaLoRA's rank allocation and, where asked for,
    the projection of LoRA-FA's gradients.

    It also logs how far centres have moved and the losses of learned routers, which are part of the model's loss. Where
    a trainer makes the loss itself (TRL's do), it adds AdaLoRA's regulariser, after gradient clipping; routers' losses
    are then carried by the scores that the trainer makes its loss from.

    The sample for the centres is drawn through a loader of its own with its own seed, so that the order in which the
    Trainer sees the data is the same with and without the callback, and on a resumed run (whose centres are loaded).
    """

    num_tokens: int | None = None
    seed: int = 0
    dataloader: Any = None
    progress: bool = True
    fast: bool = False  # train inside `monkeyjump.fast`, which also takes a model with PEFT's own LoRA
    revive: bool = False  # put the centres of experts that no token jumps to where tokens are
    known: dict[Any, Any] | None = None  # what is remembered between runs on the same frozen model and batches

    def __post_init__(self) -> None:
        self._inside = ExitStack()
        self.report: CalibrationReport | None = None
        # of the run: what a walk through all modules would find in every step
        self._model: Any = None
        self._context: RoutingContext | None = None
        self._adapters: list[Adapter] = []
        self._watch: RoutingWatch | None = None

    def on_train_begin(self, args, state, control, model=None, train_dataloader=None, **kwargs):
        handler = sys._getframe(1).f_locals.get("self")
        if isinstance(handler, CallbackHandler):  # the loggers behind it are given what it adds to the logs
            handler.callbacks.remove(self)
            handler.callbacks.insert(0, self)
        self._model = model = extract_model_from_parallel(model)
        # with `fast` there may be no routing: PEFT's own LoRA needs nothing else of this
        self._context = context = find_context(model) if self.fast else require_context(model)
        self._adapters = [adapter for _, adapter in active_adapters(model)]
        if context is not None:
            context.accumulation = args.gradient_accumulation_steps
        for name, config in ({} if context is None else active_configs(context)).items():
            if config.uses_centers and not centers_initialized(model, name):
                given = self.dataloader is not None
                source = self.dataloader if given else sampling_loader(train_dataloader, self.seed)
                progress = self.progress and state.is_world_process_zero
                self.report = initialize_centers(
                    model, source, self.num_tokens, self.seed, adapter_name=name, progress=progress, known=self.known
                )
        self._watch = None if context is None else RoutingWatch(model, context, self.revive)
        if self.fast:
            self._inside.enter_context(fast(model, direct=True))

    def on_train_end(self, args, state, control, **kwargs):
        self._inside.close()

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        """Ask for the load of the experts in the steps that are logged; others may do without the statistics."""
        logged = state.logging_steps and (state.global_step + 1) % state.logging_steps == 0
        if self._context is not None:
            self._context.watches_load = bool(logged or (args.logging_first_step and not state.global_step))

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if self._context is not None and self._context.regularizer_due:
            add_regularizer_gradients(self._model)
            self._context.regularizer_due = False
        if any(isinstance(adapter, LoraFaAdapter) for adapter in self._adapters):
            project_gradients(self._model)

    def on_optimizer_step(self, args, state, control, model=None, **kwargs):
        # after the step, before the gradients are cleared: the momentum of the optimiser would undo an earlier zero
        if any(isinstance(adapter, AdaLoraAdapter) for adapter in self._adapters):
            allocate_ranks(self._model, step=state.global_step + 1)
        if any(isinstance(adapter, FlyLoraAdapter) for adapter in self._adapters):
            balance_ranks(self._model)

    def on_log(self, args, state, control, model=None, logs=None, **kwargs):
        if logs is None or self._watch is None or "loss" not in logs:
            return
        shown = self._watch.look()
        logs.update(shown)
        state.log_history[-1].update(shown)  # the Trainer has copied `logs` there before it calls us


def sampling_loader(loader: Any, seed: int) -> Any:
    """Batches of the same data and collation as `loader`, in an order of our own that leaves `loader` untouched."""
    dataset = getattr(loader, "dataset", None)
    if dataset is None or isinstance(dataset, IterableDataset):
        return loader
    return DataLoader(
        dataset,
        # of batches that differ in size, as those of a sampler of our own, no size is known
        batch_size=loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or 8,
        shuffle=True,
        generator=torch.Generator().manual_seed(seed),
        collate_fn=loader.collate_fn,
    )


def active_configs(context: RoutingContext) -> dict[str, MonkeyJumpConfig]:
    """The adapters that route now, by name."""
    return {name: config for blocks in context.lists.values() for name, config in blocks.active().items()}


# -- what is seen of routing while a model trains -----------------------------------------------

LOOKS = 3  # in a row before a warning: a batch of one task may well pass by an expert
EVERYTHING = 0.98  # of a block's jumps
NAMED = 4  # in one warning


class RoutingWatch:
    """Looks at the routing of a model in the steps that are logged. Centres drift from where they were at the start."""

    def __init__(self, model: Any, context: RoutingContext, revive: bool = False) -> None:
        self._model, self._context, self._revive = model, context, revive
        self._start = self._centers()
        self._in_a_row = Counter[tuple[str, str]]()

    def look(self) -> dict[str, float]:
        """What the log says of the last training forward."""
        shown = dict[str, float]()
        for name, config in active_configs(self._context).items():
            loads = {block: load for block, load in staged_load(self._model, name).items() if sum(load.share)}
            if loads:
                shown["router/load_entropy"] = round(sum(load.entropy for load in loads.values()) / len(loads), 4)
                shown["router/largest_share"] = round(max(max(load.share) for load in loads.values()), 4)
                shown["router/dead_experts"] = sum(len(load.dead) for load in loads.values())
                self._warn(loads, config, name)
        drifts = [
            1 - functional.cosine_similarity(before, now, dim=-1).flatten()
            for before, now in zip(self._start, self._centers(), strict=True)
        ]
        if drifts:
            shown["router/center_drift"] = round(float(torch.cat(drifts).mean()), 4)
        for name, loss in self._context.losses.last.items():  # of the last micro-batch, without their weights
            shown[f"router/{name}_loss"] = round(float(loss), 4)
        return shown

    def _centers(self) -> list[Tensor]:
        """Copies of all centres: one tensor for the routed projections of each block."""
        names = [name for name, config in active_configs(self._context).items() if config.uses_centers]
        layers = [
            (name, router.layers[name]) for router in self._context.routers() for name in names if name in router.layers
        ]
        return [torch.stack([layer.monkeyjump_center[name] for layer in own]) for name, own in layers]

    def _warn(self, loads: dict[str, ExpertLoad], config: MonkeyJumpConfig, name: str) -> None:
        """Say once that experts get nothing, or that a block sends all tokens to the same ones."""
        dead, crowded, idle = [], [], dict[str, list[str]]()
        for block, load in loads.items():
            kept = min(config.top_k or len(load.share), len(load.share) - 1)
            strongest = sorted(zip(load.share, load.experts, strict=True), reverse=True)[: max(1, kept)]
            full = len(load.share) > 1 and sum(share for share, _ in strongest) >= EVERYTHING
            taken = ", ".join(expert for _, expert in strongest)
            if self._lasts((block, ""), full):
                crowded.append(f"{block} ({taken})")
            for expert in load.experts:
                if self._lasts((block, expert), expert in load.dead):
                    idle.setdefault(block, []).append(expert)
                    dead += [] if full else [f"{block} {expert}"]
        done = ""
        if self._revive and config.uses_centers and idle:
            revive_experts(self._model, idle, name)
            self._in_a_row.clear()  # it may be said again, and tried again
            done = "; their centres were moved"
        _say(dead, f"expert{{s}} got no token in the last {{looks}} steps that were logged{done}")
        _say(crowded, "block{s} sent all tokens to the same experts in the last {looks} steps that were logged")

    def _lasts(self, key: tuple[str, str], holds: bool) -> bool:
        """Whether something holds for the third time in a row; later times are not news."""
        self._in_a_row[key] = self._in_a_row[key] + 1 if holds else 0
        return self._in_a_row[key] == LOOKS


def _say(found: list[str], what: str) -> None:
    if found and is_main_rank():
        more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
        what = what.format(looks=LOOKS, s="" if len(found) == 1 else "s")
        warnings.warn(f"{len(found)} {what}: {', '.join(found[:NAMED])}{more}.", MonkeyJumpWarning, stacklevel=2)
