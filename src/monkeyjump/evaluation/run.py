"""Score a model on tasks, with the base model beside its adapter."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch import nn

from monkeyjump.errors import ConfigError
from monkeyjump.evaluation.forward import short_collections
from monkeyjump.evaluation.jobs import MODES, Mode
from monkeyjump.evaluation.load import TASK_IDS, load_adapter
from monkeyjump.evaluation.report import EvaluationReport, mean_rows
from monkeyjump.evaluation.rows import task_row
from monkeyjump.evaluation.score import Memory, Scorer, Sides
from monkeyjump.evaluation.shown import chosen_answers
from monkeyjump.registry import did_you_mean
from monkeyjump.tasks import Example, Task, expand, load_examples
from monkeyjump.tasks.encode import Encoder
from monkeyjump.tasks.pictures import FRAMES
from monkeyjump.tasks.task import AnswerFormat

__all__ = ["EvaluationReport", "EvaluationSettings", "evaluate", "has_adapter", "load_adapter", "without_adapter"]


@dataclass(frozen=True)
class EvaluationSettings:
    """How a model is scored."""

    split: str = "test"
    mode: Mode = "letter"
    answer_format: AnswerFormat | None = None  # what the prompt asks for, as in training; None: as the mode
    limit: int | None = None  # most examples of a task; drawn by the task's name, so that all runs see the same ones
    batch_tokens: int | None = None  # padded tokens of one forward; None: by device
    data: str | Path | None = None  # folder of data files; None: each task's own source
    seed: int = 0  # of generated data and of resampling
    compare_base: bool = True  # score the base model as well
    progress: bool = True
    max_length: int = 1024
    frames: int = FRAMES  # of a clip
    bad_media: Literal["raise", "drop"] = "raise"
    task_ids: Mapping[str, int] | None = None  # None: as the adapter was trained if it says, else the tasks' positions

    def __post_init__(self) -> None:
        problems = []
        if self.mode not in MODES:
            problems.append(f"mode={self.mode!r} must be one of {', '.join(MODES)}.{did_you_mean(self.mode, [*MODES])}")
        for name in ("limit", "batch_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                problems.append(f"{name}={value} must be at least 1, or None for no limit of its own.")
        if problems:
            raise ConfigError(problems)

    @property
    def format(self) -> AnswerFormat:
        return self.answer_format or ("text" if self.mode == "text" else "letter")


@short_collections()
def evaluate(
    model: nn.Module,
    tokenizer: Any,
    tasks: str | Sequence[str | Task],
    settings: EvaluationSettings | None = None,
    memory: Memory | None = None,
    **changes: Any,
) -> EvaluationReport:
    """Score a model, and its base model beside it if it has an adapter.

    Settings are the fields of `EvaluationSettings`, given as an object, as keywords, or both (keywords win). A model
    without adapter is the base model: its scores are in the report's base column. A `memory` that calls for adapters of
    one base model share keeps what they all need: encoded examples and the answers of the base model.
    """
    from tqdm import tqdm

    settings = _settings(settings, changes)
    chosen = _tasks(tasks, settings)
    sides = _sides(model, settings.compare_base)
    encoder = _encoder(model, tokenizer, chosen, settings)
    examples = {task.name: _sample(task, settings) for task in chosen}
    memory = memory or Memory()
    total = sum(map(len, examples.values())) * len(sides)
    with tqdm(total=total, desc="evaluating", unit="example", disable=not settings.progress, leave=False) as bar:
        scorer = Scorer(model, encoder, settings.batch_tokens, bar)
        pool = ThreadPoolExecutor(1)  # encodes one task after another beside the model
        jobs = {name: pool.submit(memory.jobs, encoder, rows, _mode(rows, settings)) for name, rows in examples.items()}
        try:
            found = memory.score(scorer, list(jobs.values()), sides)
        finally:
            pool.shutdown(cancel_futures=True)
        bar.update((encoder.counts.dropped + encoder.counts.unreadable).total() * len(sides))
    results = {
        name: {side: [predictions[job] for job in listed.result()] for side, predictions in found.items()}
        for name, listed in jobs.items()
    }
    rows, replicates = [], {}
    for task in chosen:
        row, replicates[task.name] = task_row(
            task, examples[task.name], results[task.name], _mode(examples[task.name], settings), settings.seed
        )
        counts = {name: getattr(encoder.counts, name)[task.name] for name in ("dropped", "truncated", "unreadable")}
        rows.append(replace(row, **counts))
    families, overall = mean_rows(rows, replicates)
    shown = {task.name: chosen_answers(examples[task.name], results[task.name]) for task in chosen if task.media}
    return EvaluationReport(rows, families, overall, _described(model, settings), results, shown)


def encode_pictures(model: nn.Module, tokenizer: Any, tasks: Sequence[Task], memory: Memory, **changes: Any) -> None:
    """Encode what `evaluate` will score of tasks with pictures, before a run trains: broken files stop it at once."""
    settings, problems = _settings(None, changes), list[str]()
    chosen = _tasks(tasks, settings)
    encoder = _encoder(model, tokenizer, chosen, settings)
    for task in (task for task in chosen if task.media):
        rows = _sample(task, settings)
        try:
            memory.jobs(encoder, rows, _mode(rows, settings))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems, title="bad data")


def _encoder(model: nn.Module, tokenizer: Any, tasks: Sequence[Task], settings: EvaluationSettings) -> Encoder:
    return Encoder(
        tokenizer,
        _task_ids(model, tasks, settings),
        max_length=settings.max_length,
        answer_format=settings.format,
        bad_media=settings.bad_media,
        frames=settings.frames,
    )


def _settings(settings: EvaluationSettings | None, changes: dict[str, Any]) -> EvaluationSettings:
    known = [field.name for field in fields(EvaluationSettings)]
    unknown = (name for name in changes if name not in known)
    hints = [f"evaluate has no setting {name!r}.{did_you_mean(name, known)}" for name in unknown]
    if hints:
        raise ConfigError([*hints[:-1], f"{hints[-1]} Known: {', '.join(known)}."])
    return replace(settings or EvaluationSettings(), **changes)


def _tasks(tasks: str | Sequence[str | Task], settings: EvaluationSettings) -> list[Task]:
    given = [tasks] if isinstance(tasks, str) else tasks
    found = [
        task
        for entry in given
        for task in ([entry] if isinstance(entry, Task) else expand(entry, settings.bad_media))
        if settings.split not in task.absent
    ]
    if not found:
        named = f"none named that has split={settings.split!r}" if given else "none named"
        raise ConfigError(f"tasks: {named}. Name at least one task or group, e.g. 'glue'.")
    return list({task.name: task for task in found}.values())


def _mode(examples: Sequence[Example], settings: EvaluationSettings) -> Mode:
    if not all(example.options for example in examples):
        return "generate"
    return settings.mode if settings.mode != "letter" or all(example.lettered for example in examples) else "text"


def _sample(task: Task, settings: EvaluationSettings) -> list[Example]:
    examples = load_examples(task, settings.split, settings.data, seed=settings.seed)
    if settings.limit is None or settings.limit >= len(examples):
        return examples
    # Files are often sorted by label: a sample, not the beginning. Not by the seed: runs of several seeds are compared.
    chosen = random.Random(f"{task.name}/{settings.split}").sample(range(len(examples)), settings.limit)
    return [examples[index] for index in sorted(chosen)]


# -- the model, with and without its adapter ----------------------------------------------------


def has_adapter(model: nn.Module) -> bool:
    """Whether a model carries adapters, through PEFT or through Transformers' own integration."""
    from peft import PeftModel

    return isinstance(model, PeftModel) or bool(getattr(model, "_hf_peft_config_loaded", False))


def without_adapter(model: Any) -> AbstractContextManager[Any]:
    """Inside, the model is its base model."""
    return model.disable_adapter() if hasattr(model, "disable_adapter") else _natively_disabled(model)


@contextmanager
def _natively_disabled(model: Any) -> Iterator[None]:
    model.disable_adapters()
    try:
        yield
    finally:
        model.enable_adapters()


def _sides(model: nn.Module, compare_base: bool) -> Sides:
    if not has_adapter(model):
        return {"base": nullcontext}
    return {**({"base": partial(without_adapter, model)} if compare_base else {}), "adapter": nullcontext}


def _task_ids(model: nn.Module, tasks: Sequence[Task], settings: EvaluationSettings) -> dict[str, int]:
    trained = settings.task_ids if settings.task_ids is not None else getattr(model, TASK_IDS, None)
    if trained is None:
        return {task.name: index for index, task in enumerate(tasks)}
    configs = getattr(model, "peft_config", None) or {}
    by_task = any(getattr(config, "granularity", None) == "task" for config in dict(configs).values())
    unknown = [task.name for task in tasks if task.name not in trained]
    if by_task and unknown:
        raise ConfigError(
            f"the adapter routes by task and was not trained on {', '.join(unknown)}; "
            f"it knows {', '.join(trained) or 'no task'}. "
            "Leave these tasks out, or say with task_ids={name: id} which trained task they should be treated as."
        )
    return dict(trained)


def _described(model: nn.Module, settings: EvaluationSettings) -> dict[str, Any]:
    config = getattr(model, "config", None)
    shown = {field.name: getattr(settings, field.name) for field in fields(settings)}
    for name in ("progress", "batch_tokens", "task_ids", "data"):  # how it was run, not what was measured
        del shown[name]
    name = str(getattr(config, "_name_or_path", "") or type(model).__name__)
    return {"model": Path(name).name if Path(name).is_absolute() else name, **shown, "answer_format": settings.format}
