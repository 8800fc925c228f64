"""One run from a recipe: load, initialise, train, evaluate, save, and say where everything is."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from peft import get_peft_model
from torch import nn
from transformers import EarlyStoppingCallback, TrainerCallback, set_seed

from monkeyjump import methods
from monkeyjump.config import MonkeyJumpConfig
from monkeyjump.errors import ConfigError, NoMemoryError
from monkeyjump.evaluation.run import EvaluationReport, encode_pictures, evaluate
from monkeyjump.evaluation.score import Memory
from monkeyjump.tasks import Task, expand
from monkeyjump.tasks.preflight import SplitLook, look_at, origins
from monkeyjump.tasks.task import SPLITS
from monkeyjump.training.callbacks import MonkeyJumpCallback
from monkeyjump.training.data import TrainingData, training_data
from monkeyjump.training.estimate import say_how_long
from monkeyjump.training.fast import FastReport, FastSettings, fast
from monkeyjump.training.features import kept_features
from monkeyjump.training.folder import checkpoint_to_resume, clear, locked
from monkeyjump.training.progress import Interruptible, JsonLines, ProgressBar, is_main_rank, say
from monkeyjump.training.recipe import Recipe
from monkeyjump.training.saving import save_adapter, write_card
from monkeyjump.training.shared import Shared
from monkeyjump.training.trainer import (
    NotFinite,
    SaveEvery,
    TaskTrainer,
    check_loggers,
    last_checkpoint,
    training_arguments,
)
from monkeyjump.tuner.centers.calibrate import compile_early
from monkeyjump.tuner.centers.sample import default_sample
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
    origin: dict[str, Any] = field(default_factory=dict)  # base, data and task ids in words that hold anywhere
    is_main: bool = True  # of several ranks, the one that writes files and speaks
    interrupted: bool = False


def run(
    recipe: Recipe, *, resume: bool = False, overwrite: bool = False, test: bool = True, shared: Shared | None = None
) -> RunResult:
    """Train as the recipe says. `resume` goes on from the last checkpoint, exactly as if nothing had happened.

    `overwrite` replaces an earlier run in the same folder; without it, nothing that is there is touched. `shared` holds
    what an earlier run of this process has loaded.
    """
    _refuse_shards()
    ranks = PartialState(cpu=not torch.cuda.is_available())
    # every problem of the recipe and of the data before anything of an earlier run is touched
    tasks = expand(recipe.tasks, recipe.data.bad_media)
    config = methods.build(recipe.method, recipe.preset, **recipe.adapter)
    check_loggers(recipe.train.report_to)
    looks, checkpoint = list[SplitLook](), last_checkpoint(recipe.folder / "checkpoints") if resume else None
    with locked(recipe.folder) if ranks.is_main_process else nullcontext():
        if ranks.is_main_process:
            checkpoint = checkpoint_to_resume(recipe.folder, resume, overwrite)
            splits, streaming = SPLITS if test else SPLITS[:2], recipe.data.streaming
            looks = look_at(tasks, recipe.data.folder, splits=splits, seed=recipe.seed, streaming=streaming)
        return _run(recipe, tasks, config, ranks, checkpoint, looks, test, shared or Shared())


def _refuse_shards() -> None:
    """Evaluation and saving here hold whole weights on every rank, which launchers can be told not to."""
    for name in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        if parse_flag_from_env(f"ACCELERATE_USE_{name}"):
            raise ConfigError(
                f"accelerate launch was told to use {name}: `monkeyjump train` keeps the whole model on every rank. "
                "Launch it with --multi_gpu, or train a model that does not fit with a Trainer of your own and "
                "MonkeyJumpCallback."
            )


def _run(
    recipe: Recipe,
    tasks: list[Task],
    config: MonkeyJumpConfig,
    ranks: PartialState,
    checkpoint: Path | None,
    looks: list[SplitLook],
    test: bool,
    shared: Shared,
) -> RunResult:
    model, tokenizer = _adapted(recipe, config, shared)
    settings = FastSettings.of_recipe(recipe, torch.cuda.is_available(), ranks.num_processes)
    batches = training_data(recipe, tasks, tokenizer, settings)
    for split in ("validation", *(["test"] if test else [])):
        encode_pictures(model, tokenizer, tasks, shared.memory, **_scoring(recipe, split))
    steps = batches.steps(recipe, ranks.num_processes)
    data = origins(tasks, looks, recipe.data.folder)
    if ranks.is_main_process:
        if checkpoint is None and shared.runs == 1:  # of a resumed run and of a grid it is seen how much is left
            tokens = _tokens_of_centers(model, config, batches)
            say_how_long(model, recipe, batches, steps, looks, tokens, ranks.num_processes)
        clear(recipe.folder, checkpoint)  # only now: model and data are there
    ranks.wait_for_everyone()
    result = RunResult(recipe.folder, model, tokenizer, tasks, count_parameters(model), is_main=ranks.is_main_process)
    best = _train(result, recipe, batches, replace(settings, shapes=batches.shapes), steps, checkpoint, shared)
    if result.interrupted:
        return result
    result.best_validation = best if best is not None and math.isfinite(best) else None
    if (step := result.measurements["diverged_at"]) is not None:
        kept = "No validation came before it" if best is None else "What is kept is the best checkpoint by validation"
        say(
            f"training diverged: the loss or its gradient was no finite number by step {step}. {kept}; try a smaller "
            f"train.lr than {recipe.train.lr:g}."
        )
    if ranks.is_main_process:
        save_adapter(result, recipe, config, data)
    if test:
        result.report = score_on_test(model, tokenizer, tasks, recipe, shared.memory)
        if ranks.is_main_process:
            result.report.save(recipe.folder / "evaluation")  # at once: what comes later may fail
            write_card(result, recipe, config)
    return result


def _tokens_of_centers(model: nn.Module, config: MonkeyJumpConfig, batches: TrainingData) -> int:
    """How many tokens are read for the centres: whole texts, where these are routed."""
    if not config.uses_centers or config.layers_to_route == []:
        return 0
    states = config.init_tokens or default_sample(model, config)
    lengths = getattr(batches.items, "lengths", None)  # not known of a stream
    if config.granularity != "sequence" or not lengths:
        return states
    return min(states, len(lengths)) * sum(lengths) // len(lengths)


def _adapted(recipe: Recipe, config: MonkeyJumpConfig, shared: Shared) -> tuple[Any, Any]:
    """The base model with a new adapter on it, and its tokenizer."""
    base, tokenizer = shared.take(recipe)
    set_seed(recipe.seed)  # loading may draw random numbers, and a shared model is not loaded again
    model = get_peft_model(base, config)
    # every rank makes the same buffers, and moves centres by the same sums: nobody has to send them in every forward
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        model, [name for name, _ in model.named_buffers()]
    )
    if shared.runs == 1:  # later runs of a grid find the kernels
        compile_early(model)
    return model, tokenizer


def _train(
    result: RunResult,
    recipe: Recipe,
    batches: TrainingData,
    settings: FastSettings,
    steps: int,
    checkpoint: Path | None,
    shared: Shared,
) -> float | None:
    """Train the model of a result and write down there what was measured.

    Returns the best validation: None, or minus infinity, where there was none, or none that is a number.
    """
    model, tokenizer, tasks, on_gpu = result.model, result.tokenizer, result.tasks, torch.cuda.is_available()
    interruptible, finite = Interruptible(), NotFinite(recipe.train.not_finite == "skip", tokenizer)
    with kept_features(model, recipe, batches), fast(model, settings) as report:
        trainer = TaskTrainer(
            model,
            training_arguments(recipe, steps, on_gpu, unused=any(task.modality != "text" for task in tasks)),
            batches,
            lambda current: _validate(current, tokenizer, tasks, recipe, shared.memory),
            _callbacks(recipe, batches, shared, interruptible, finite),
        )
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        try:
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise _no_memory(recipe, trainer.state.global_step + 1, error) from error
        finally:
            interruptible.restore()
        seconds = time.perf_counter() - started
    result.measurements = _measurements(trainer, seconds, report) | {"skipped_steps": finite.skipped}
    result.interrupted = interruptible.interrupted
    return trainer.state.best_metric


def _callbacks(recipe: Recipe, batches: TrainingData, shared: Shared, *own: TrainerCallback) -> list[TrainerCallback]:
    train = recipe.train
    return [
        MonkeyJumpCallback(
            seed=recipe.seed, dataloader=batches.calibration, revive=train.revive, known=shared.centers(recipe)
        ),
        ProgressBar(),
        JsonLines(recipe.folder / "log.jsonl"),
        *own,
        *shared.callbacks,
        *([SaveEvery(train.save_steps)] if train.save_steps else []),
        *([EarlyStoppingCallback(train.patience)] if train.patience else []),
    ]


def _no_memory(recipe: Recipe, step: int, error: BaseException) -> NoMemoryError:
    train, reason = recipe.train, next(iter(str(error).splitlines()), type(error).__name__)
    return NoMemoryError(
        f"step {step} does not fit: {reason} Lower train.batch_size={train.batch_size} and raise "
        f"train.accumulation={train.accumulation} by the same factor, which trains the same; lower "
        f"data.max_length={recipe.data.max_length}; or set train.gradient_checkpointing=true.",
        title="out of memory",
    )


def score_on_test(
    model: nn.Module, tokenizer: Any, tasks: list[Task], recipe: Recipe, memory: Memory | None = None
) -> EvaluationReport:
    """Scores on the test split, as the recipe wants them."""
    before, how = recipe.evaluate.before, _scoring(recipe, "test")
    return evaluate(model, tokenizer, tasks, memory=memory, compare_base=before, progress=is_main_rank(), **how)


def _validate(model: nn.Module, tokenizer: Any, tasks: list[Task], recipe: Recipe, memory: Memory) -> dict[str, float]:
    how = _scoring(recipe, "validation")
    report = evaluate(model, tokenizer, tasks, memory=memory, compare_base=False, progress=False, **how)
    scores = {"mean": report.mean, **{row.task: row.adapter for row in report.rows if row.adapter is not None}}
    return scores if (nll := report.overall.adapter_nll) is None else scores | {"nll": nll}


def _scoring(recipe: Recipe, split: str) -> dict[str, Any]:
    """How a recipe has the rows of a split scored."""
    validation = [recipe.evaluate.validation_limit, recipe.data.validation]
    limits = validation if split == "validation" else [recipe.evaluate.test_limit]
    return {
        "split": split,
        "limit": min((limit for limit in limits if limit is not None), default=None),
        "mode": recipe.mode,
        "answer_format": recipe.data.answer,
        "data": recipe.data.folder,
        "batch_tokens": recipe.evaluate.batch_tokens,
        "max_length": recipe.data.max_length,
        "frames": recipe.data.frames,
        "bad_media": recipe.data.bad_media,
        "seed": recipe.seed,
    }


def _measurements(trainer: TaskTrainer, seconds: float, fast: FastReport) -> dict[str, Any]:
    steps, logs, best = trainer.state.global_step, trainer.state.log_history, trainer.state.best_metric
    losses = [log["loss"] for log in logs if math.isfinite(log.get("loss", math.nan))]
    broken = [log for log in logs if not all(math.isfinite(log.get(name, 0.0)) for name in ("loss", "grad_norm"))]
    return {
        "steps": steps,
        "ranks": trainer.args.world_size,
        "train_seconds": round(seconds, 2),
        "validation_seconds": round(trainer.validation_seconds, 2),
        "steps_per_second": round(steps / seconds, 4) if seconds else None,
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
        "final_loss": losses[-1] if losses else None,
        "diverged_at": broken[0]["step"] if broken else None,
        "validation_nll": next((log.get("eval_nll") for log in logs if log.get("eval_mean") == best), None),
        **fast.measurements(),
    }
