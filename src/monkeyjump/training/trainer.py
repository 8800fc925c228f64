"""Transformers' Trainer, fed by a mixture of tasks and judged by their metrics."""

from __future__ import annotations

import math
import shutil
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.integrations import integration_utils as integrations
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from monkeyjump.errors import ConfigError
from monkeyjump.registry import did_you_mean
from monkeyjump.training.data import TrainingData
from monkeyjump.training.light_steps import LightAdamW, clip_gradients
from monkeyjump.training.progress import say
from monkeyjump.training.recipe import Recipe

COMPLETE = "complete"  # written into a checkpoint when all else of it is
KEPT = 1_000  # batches that are looked at when a loss is no finite number
SHOWN, BEGIN = 4, 50  # rows of one, and letters of each
# Transformers calls gradient checkpointing by another name from 5.23 on
NEWER = "activation_checkpointing"
CHECKPOINTING = NEWER if hasattr(TrainingArguments, NEWER) else "gradient_checkpointing"
Recent = deque[tuple[int, Tensor, Tensor | None]]  # steps since the last log, with losses and ids
Scorer = Callable[[nn.Module], dict[str, float]]  # model -> {"mean": ..., task: ...}


class TaskTrainer(Trainer):
    """Evaluates by task metrics instead of the loss, and never leaves half a checkpoint behind."""

    def __init__(
        self,
        model: nn.Module,
        arguments: TrainingArguments,
        data: TrainingData,
        scorer: Scorer,
        callbacks: list[TrainerCallback],
    ) -> None:
        self._sampler = data.sampler
        self._recent = next((each.recent for each in callbacks if isinstance(each, NotFinite)), Recent(maxlen=0))
        self._scorer, self.validation_seconds = scorer, 0.0
        # The Trainer wants an evaluation set whenever it evaluates; `evaluate` below has its own.
        super().__init__(
            model=model,
            args=arguments,
            data_collator=data.collator,
            train_dataset=data.items,
            eval_dataset=[],
            callbacks=callbacks,
        )
        self.remove_callback(PrinterCallback)
        self.remove_callback(ProgressCallback)

    def get_train_dataloader(self) -> DataLoader:
        if self._sampler is None:
            return super().get_train_dataloader()
        loader = DataLoader(
            self.train_dataset,  # type: ignore[arg-type]
            batch_sampler=self._sampler,
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory and self.args.device.type == "cuda",
        )
        return self.accelerator.prepare(loader)

    def evaluate(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> dict[str, float]:
        model = self.accelerator.unwrap_model(self.model)
        started = time.perf_counter()
        # Every rank scores, since weights may be spread over the ranks; all go by the numbers of the first.
        found = [self._scorer(model)]
        self.validation_seconds += time.perf_counter() - started
        broadcast_object_list(found)
        scores = {f"{metric_key_prefix}_{name}": value for name, value in found[0].items()}
        self.log(scores)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, scores)
        return scores

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(model, inputs, *args, **kwargs)
        self._recent.append((self.state.global_step + 1, loss, inputs.get("input_ids")))
        return loss

    @staticmethod
    def get_optimizer_cls_and_kwargs(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        kind, settings = Trainer.get_optimizer_cls_and_kwargs(*args, **kwargs)
        return LightAdamW if kind is torch.optim.AdamW and settings.get("fused") else kind, settings

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return clip_gradients(model.parameters(), self.args.max_grad_norm)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        # a run that was killed after its last checkpoint would make one step more when it is resumed
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        # the Trainer does not find the sampler behind what skips the batches of a resumed epoch on several ranks
        if self._sampler is not None:
            self._sampler.set_epoch(kwargs["epoch"])
        super()._run_epoch(*args, **kwargs)

    def _load_best_model(self) -> None:
        try:
            super()._load_best_model()
        except ConfigError as error:  # a training that diverged may have left no checkpoint of finite weights
            say(f"the best checkpoint cannot be used, the last weights are kept. {error}")

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        try:
            super()._save_checkpoint(model, trial)
        except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
            partial = self._checkpoint_folder()
            shutil.rmtree(partial, ignore_errors=True)
            left = last_checkpoint(partial.parent)
            where = f"the previous one is whole: {left}" if left else "there is no earlier one"
            raise ConfigError(
                f"the checkpoint of step {self.state.global_step} could not be written ({error}); {where}. Free some "
                "space, then resume with --resume.",
                title="saving failed",
            ) from error
        if self.args.should_save:
            (self._checkpoint_folder() / COMPLETE).touch()

    def _checkpoint_folder(self) -> Path:
        return Path(str(self.args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"


class NotFinite(TrainerCallback):
    """Where a loss or a gradient is no finite number: training stops at the next log, or the step is left out."""

    def __init__(self, skip: bool, tokenizer: Any) -> None:
        self._skip, self._tokenizer = skip, getattr(tokenizer, "tokenizer", tokenizer)
        self.recent = Recent(maxlen=KEPT)
        self.skipped = 0

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        found = [p.grad.isfinite().all() for p in model.parameters() if p.grad is not None] if self._skip else []
        if found and not torch.stack(found).all():
            model.zero_grad()  # without gradients the optimiser leaves weights and its own state alone
            self.skipped += 1
            say(f"step {state.global_step + 1} is left out: its gradient is no finite number{self._rows()}.")
            self.recent.clear()  # or the next such step would be told by the rows of this one

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs is None or "loss" not in logs:
            return
        if not self._skip and not all(math.isfinite(logs.get(name, 0.0)) for name in ("loss", "grad_norm")):
            say(f"training stops: the loss or its gradient is no finite number{self._rows()}.")
            control.should_training_stop = True
        self.recent.clear()

    def _rows(self) -> str:
        """The rows of the first batch whose loss is no finite number, by how they begin."""
        for step, loss, ids in self.recent:
            if ids is not None and not bool(loss.isfinite()):
                texts = [self._tokenizer.decode(row, skip_special_tokens=True).strip() for row in ids[:SHOWN]]
                rows = ", ".join(repr(text if len(text) <= BEGIN else f"{text[:BEGIN]}…") for text in texts)
                more = f" and {len(ids) - SHOWN} more" if len(ids) > SHOWN else ""
                return f" since step {step}, whose rows begin with {rows}{more}"
        return ""


class SaveEvery(TrainerCallback):
    """Checkpoints between evaluations, which the Trainer's own arguments refuse where the best one is kept."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % self.steps == 0:
            control.should_save = True


def last_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that was written to its end; a process may be killed in the middle of writing one."""
    whole = [path.parent for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*/{COMPLETE}")]
    return max(whole, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


def training_arguments(recipe: Recipe, steps: int, on_gpu: bool, unused: bool = False) -> TrainingArguments:
    """The Trainer's arguments for a recipe of `steps` optimiser steps.

    `unused` says that a batch may leave out some parameters, as texts leave out a vision tower's. Several ranks then
    look for them in every step.
    """
    train = recipe.train
    every = train.eval_steps or max(1, steps // 4)
    save_every = train.save_steps or every
    if every % save_every and save_every % every:
        raise ConfigError(
            f"train.save_steps={save_every} must divide train.eval_steps={every} or be a multiple of it: the best "
            "checkpoint is chosen among the evaluated ones."
        )
    checkpointing: dict[str, Any] = {CHECKPOINTING: True} if train.gradient_checkpointing else {}
    return TrainingArguments(
        output_dir=str(recipe.folder / "checkpoints"),
        learning_rate=train.lr,
        lr_scheduler_type=train.schedule,
        warmup_steps=train.warmup,
        weight_decay=train.weight_decay,
        max_grad_norm=train.max_grad_norm,
        num_train_epochs=train.epochs,
        max_steps=train.max_steps or -1,
        per_device_train_batch_size=1 if recipe.data.packing else train.batch_size,
        gradient_accumulation_steps=train.accumulation,
        eval_strategy="steps",
        eval_steps=every,
        save_strategy="steps",
        save_steps=max(every, save_every),
        save_total_limit=train.keep_checkpoints,
        load_best_model_at_end=True,
        metric_for_best_model="eval_mean",
        greater_is_better=True,
        logging_steps=train.log_steps,
        # It would log a loss of 0 for NaN, and a run that diverged must not look converged. Where such a step is left
        # out it is right: without it all later losses would be NaN, too.
        logging_nan_inf_filter=train.not_finite == "skip",
        report_to=train.report_to or "none",
        seed=recipe.seed,
        data_seed=recipe.seed,
        remove_unused_columns=False,
        label_names=["labels"],
        dataloader_num_workers=train.workers,
        dataloader_pin_memory=on_gpu,
        use_cpu=not on_gpu,
        ddp_find_unused_parameters=unused,
        # streams are the same on every rank, and batches of different widths cannot be sent around as one
        accelerator_config={"dispatch_batches": False},
        **checkpointing,
    )


def check_loggers(wanted: Sequence[str]) -> None:
    """Whether Transformers knows these loggers and has what they need, before a run finds out."""
    if not wanted:
        return
    available = integrations.get_available_reporting_integrations
    known, there = ([*names, "all", "none"] for names in (integrations.INTEGRATION_TO_CALLBACK, available()))
    problems = [
        f"train.report_to={name!r} is no logger.{did_you_mean(name, known)} Known: {', '.join(known)}."
        if name not in known
        else f"train.report_to={name!r} needs its package: pip install {name}."
        for name in wanted
        if name not in there
    ]
    if problems:
        raise ConfigError(problems)
