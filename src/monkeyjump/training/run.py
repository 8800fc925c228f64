"""One run from a recipe: load, initialise, train, evaluate, save, and say where everything is."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from peft import get_peft_model
from torch import nn
from transformers import set_seed

from monkeyjump import methods
from monkeyjump.config import MonkeyJumpConfig
from monkeyjump.errors import ConfigError
from monkeyjump.evaluation.load import RECIPE_FILE
from monkeyjump.evaluation.run import EvaluationReport, evaluate
from monkeyjump.models import load_model, published_name
from monkeyjump.record import writable_folder, write_atomic
from monkeyjump.tasks import Task, expand
from monkeyjump.training.callbacks import MonkeyJumpCallback
from monkeyjump.training.card import model_card
from monkeyjump.training.data import training_data
from monkeyjump.training.fast_path import FastPath, fast_path
from monkeyjump.training.progress import Interruptible, JsonLines, ProgressBar, forget_after, is_main_rank, say
from monkeyjump.training.recipe import Recipe, recipe_from
from monkeyjump.training.trainer import SaveEvery, TaskTrainer, early_stopping, last_checkpoint, training_arguments
from monkeyjump.tuner.count import ParameterCount, count_parameters


@dataclass
class RunResult:
    """What a run leaves behind. `report` is None when it was interrupted, or when no test was asked for."""

    folder: Path
    model: nn.Module
    tokenizer: Any
    tasks: list[Task]
    parameters: ParameterCount
    report: EvaluationReport | None = None
    best_validation: float | None = None
    measurements: dict[str, Any] = field(default_factory=dict)
    is_main: bool = True  # of several ranks, the one that writes files and speaks
    interrupted: bool = False


def run(recipe: Recipe, *, resume: bool = False, overwrite: bool = False, test: bool = True) -> RunResult:
    """Train as the recipe says. `resume` goes on from the last checkpoint, exactly as if nothing had happened."""
    ranks = PartialState(cpu=not torch.cuda.is_available())
    # every problem of the recipe before anything of an earlier run is touched
    tasks, config = expand(recipe.tasks), methods.build(recipe.method, recipe.preset, **recipe.adapter)
    with _locked(recipe.folder) if ranks.is_main_process else nullcontext():
        return _run(recipe, tasks, config, ranks, resume=resume, overwrite=overwrite, test=test)


def _run(
    recipe: Recipe,
    tasks: list[Task],
    config: MonkeyJumpConfig,
    ranks: PartialState,
    *,
    resume: bool,
    overwrite: bool,
    test: bool,
) -> RunResult:
    checkpoint = _prepare_folder(recipe, resume, overwrite) if ranks.is_main_process else None
    ranks.wait_for_everyone()
    if resume and checkpoint is None:
        checkpoint = last_checkpoint(recipe.folder / "checkpoints")
    set_seed(recipe.seed)
    model, tokenizer = _model(recipe, config)
    data = training_data(recipe, tasks, tokenizer)
    interruptible = Interruptible()
    with fast_path(model, recipe, data.shapes, on_gpu=torch.cuda.is_available()) as fast:
        trainer = TaskTrainer(
            model,
            training_arguments(recipe, data.steps(recipe, ranks.num_processes), on_gpu=torch.cuda.is_available()),
            data,
            lambda current: _validate(current, tokenizer, tasks, recipe),
            [
                MonkeyJumpCallback(seed=recipe.seed, dataloader=data.calibration),
                ProgressBar(),
                JsonLines(recipe.folder / "log.jsonl"),
                interruptible,
                *([SaveEvery(recipe.train.save_steps)] if recipe.train.save_steps else []),
                *early_stopping(recipe),
            ],
            fast.gradients,
        )
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        try:
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        finally:
            interruptible.restore()
        seconds = time.perf_counter() - started
    result = RunResult(recipe.folder, model, tokenizer, tasks, count_parameters(model), is_main=ranks.is_main_process)
    result.measurements = _measurements(trainer, seconds, fast)
    if interruptible.interrupted:
        result.interrupted = True
        return result
    if (step := result.measurements["diverged_at"]) is not None:
        say(
            f"training diverged: the loss or its gradient was no finite number by step {step}. What is kept is the "
            f"best checkpoint by validation; try a smaller train.lr than {recipe.train.lr:g}."
        )
    best = trainer.state.best_metric  # None or minus infinity: never validated, or never to a number
    result.best_validation = best if best is not None and math.isfinite(best) else None
    if ranks.is_main_process:
        save_adapter(result, recipe, config)
    if test:
        result.report = score_on_test(model, tokenizer, tasks, recipe)
        if ranks.is_main_process:
            _write_card(result, recipe, config)
    return result


def score_on_test(model: nn.Module, tokenizer: Any, tasks: list[Task], recipe: Recipe) -> EvaluationReport:
    """Scores on the test split, as the recipe wants them."""
    return evaluate(
        model,
        tokenizer,
        tasks,
        split="test",
        limit=recipe.evaluate.test_limit,
        compare_base=recipe.evaluate.before,
        progress=is_main_rank(),
        **_scoring(recipe),
    )


def save_adapter(result: RunResult, recipe: Recipe, config: MonkeyJumpConfig) -> None:
    """The adapter, its tokenizer, its card and the recipe it came from, in `folder/adapter`."""
    folder = recipe.folder / "adapter"
    result.model.save_pretrained(folder)  # type: ignore[operator]
    result.tokenizer.save_pretrained(folder)
    # PEFT has written where the base model lies on this machine. Only now: for a hub id it would ask the network.
    path = folder / "adapter_config.json"
    written = json.loads(path.read_text(encoding="utf-8"))
    written["base_model_name_or_path"] = published_name(recipe.model)
    write_atomic(path, json.dumps(written, indent=2, sort_keys=True) + "\n")
    _write_card(result, recipe, config)
    (folder / RECIPE_FILE).write_text(json.dumps(recipe.to_dict(), indent=2) + "\n", encoding="utf-8")


def _write_card(result: RunResult, recipe: Recipe, config: MonkeyJumpConfig) -> None:
    write_atomic(recipe.folder / "adapter" / "README.md", model_card(recipe, config, result.parameters, result.report))


def saved_recipe(folder: Path) -> Recipe | None:
    """The recipe an adapter folder came from, if it says."""
    path = folder / RECIPE_FILE
    return recipe_from(json.loads(path.read_text(encoding="utf-8")), str(path)) if path.is_file() else None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a folder for one run. The system frees the lock of a process that ended, however it ended."""
    from filelock import FileLock, Timeout

    lock = FileLock(writable_folder(folder, "output") / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ConfigError(
            f"output={str(folder)!r}: another process trains in this folder. Wait for its end, or choose another "
            "folder with output=DIR.",
            title="folder in use",
        ) from None
    try:
        yield
    finally:
        lock.release()


def _prepare_folder(recipe: Recipe, resume: bool, overwrite: bool) -> Path | None:
    """The checkpoint to go on from, or a folder ready for a new run."""
    checkpoints = recipe.folder / "checkpoints"
    last = last_checkpoint(checkpoints)
    finished = (recipe.folder / "adapter" / RECIPE_FILE).is_file()
    if resume:
        if last is None:
            raise ConfigError(f"nothing to resume in {recipe.folder}: there is no checkpoint. Run without --resume.")
        forget_after(recipe.folder / "log.jsonl", int(last.name.rpartition("-")[2]))
        return last
    if last is not None and not finished and not overwrite:
        raise ConfigError(
            f"{recipe.folder} holds an unfinished run (last checkpoint {last.name}): continue it with --resume, "
            "replace it with --overwrite, or choose another folder with output=DIR."
        )
    for leftover in (checkpoints, recipe.folder / "adapter"):
        shutil.rmtree(leftover, ignore_errors=True)
    (recipe.folder / "log.jsonl").unlink(missing_ok=True)
    return None


def _model(recipe: Recipe, config: MonkeyJumpConfig) -> tuple[nn.Module, Any]:
    gpu = torch.cuda.is_available()
    bf16 = recipe.train.bf16 if recipe.train.bf16 is not None else gpu and torch.cuda.is_bf16_supported()
    model, tokenizer = load_model(
        recipe.model, dtype=torch.bfloat16 if bf16 else torch.float32, device=PartialState().device if gpu else None
    )
    model.config.use_cache = False
    return get_peft_model(model, config), tokenizer


def _scoring(recipe: Recipe) -> dict[str, Any]:
    return {
        "mode": recipe.mode,
        "answer_format": recipe.data.answer,
        "data": recipe.data.folder,
        "batch_tokens": recipe.evaluate.batch_tokens,
        "max_length": recipe.data.max_length,
        "seed": recipe.seed,
    }


def _validate(model: nn.Module, tokenizer: Any, tasks: list[Task], recipe: Recipe) -> dict[str, float]:
    limits = [n for n in (recipe.evaluate.validation_limit, recipe.data.validation) if n is not None]
    report = evaluate(
        model,
        tokenizer,
        tasks,
        split="validation",
        limit=min(limits),
        compare_base=False,
        progress=False,
        **_scoring(recipe),
    )
    return {"mean": report.mean, **{row.task: row.adapter for row in report.rows if row.adapter is not None}}


def _measurements(trainer: TaskTrainer, seconds: float, fast: FastPath) -> dict[str, Any]:
    steps, logs = trainer.state.global_step, trainer.state.log_history
    losses = [log["loss"] for log in logs if math.isfinite(log.get("loss", math.nan))]
    return {
        "steps": steps,
        "train_seconds": round(seconds, 2),
        "steps_per_second": round(steps / seconds, 4) if seconds else None,
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
        "final_loss": losses[-1] if losses else None,
        "diverged_at": next((log["step"] for log in logs if not _finite(log)), None),
        **fast.measurements(),
    }


def _finite(log: dict[str, Any]) -> bool:
    return all(math.isfinite(log.get(name, 0.0)) for name in ("loss", "grad_norm"))
