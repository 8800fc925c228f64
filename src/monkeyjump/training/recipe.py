"""A recipe: one YAML file behind one typed configuration, with overrides such as `train.lr=1e-3` on top."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Union

from monkeyjump.errors import ConfigError
from monkeyjump.registry import did_you_mean
from monkeyjump.training.recipe_checks import check
from monkeyjump.yaml_files import parse_yaml


@dataclass
class DataSettings:
    """What is trained on."""

    folder: str | None = None  # JSON lines, <task>/{train,test}.jsonl.gz; None: the hub (built-in tasks need neither)
    answer: str = "letter"  # what is learnt and scored: the option's letter, or its text
    cap: int | None = None  # most training rows of a task
    caps: dict[str, int] = field(default_factory=dict)  # the same, for single tasks
    weights: dict[str, float] = field(default_factory=dict)  # relative sampling weight of single tasks
    temperature: float | None = None  # None: every row once an epoch; T: tasks drawn by size ** (1 / T)
    validation: int = 200  # most validation rows of a task, taken from its training data
    max_length: int = 1024
    packing: bool = False  # padding-free rows of fixed length
    buckets: list[int] = field(default_factory=list)  # widths of padded batches; []: multiples of 8, or few to compile
    streaming: bool = False  # read and encode while training, for data that does not fit in memory


@dataclass
class TrainSettings:
    """The optimisation. The defaults are the paper's for text."""

    lr: float = 1e-4
    epochs: float = 2.0
    max_steps: int | None = None
    batch_size: int = 4
    accumulation: int = 4
    schedule: str = "cosine"
    warmup: float = 0.1  # share of all steps
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    bf16: bool | None = None  # None: on a GPU that has it
    gradient_checkpointing: bool = False
    compile: bool | str = False  # blocks (true): each block, a short wait; model: all blocks as one graph, a long one
    cuda_graphs: bool = False  # with compile=model, on a GPU: launch a whole pass at once
    fused_loss: bool | str = "auto"  # no logits in training: liger, torch, true (the better there is); auto: on a GPU
    eval_steps: int | None = None  # None: four times in the run
    save_steps: int | None = None  # None: as often as it is evaluated
    keep_checkpoints: int = 2
    patience: int | None = None  # evaluations without improvement before stopping; None: never
    log_steps: int = 10
    report_to: list[str] = field(default_factory=list)
    workers: int = 0


@dataclass
class EvaluateSettings:
    """How answers are scored, before, during and after training."""

    mode: str | None = None  # letter, text or generate; None: as data.answer
    validation_limit: int | None = 100  # rows of a task while training
    test_limit: int | None = None  # rows of a task in the final table
    batch_tokens: int = 8192
    before: bool = True  # score the base model too


@dataclass
class Recipe:
    """One run: a model, a method, tasks, and what to do with them."""

    name: str = "run"
    model: str = "smollm2-135m"
    method: str = "mjlora"
    preset: str = "mj_paper"
    adapter: dict[str, Any] = field(default_factory=dict)  # fields of MonkeyJumpConfig, on top of the method's
    tasks: list[str] = field(default_factory=lambda: ["builtin"])  # task names, families, or YAML files of tasks
    data: DataSettings = field(default_factory=DataSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    evaluate: EvaluateSettings = field(default_factory=EvaluateSettings)
    seed: int = 0
    output: str | None = None  # None: runs/<name>

    @property
    def folder(self) -> Path:
        return Path(self.output) if self.output else Path("runs") / self.name

    @property
    def mode(self) -> str:
        return self.evaluate.mode or self.data.answer

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def names() -> list[str]:
    """The recipes that come with the package."""
    return sorted(path.name.removesuffix(".yaml") for path in _bundled().iterdir() if path.name.endswith(".yaml"))


def load_recipe(source: str, overrides: Iterable[str] = ()) -> Recipe:
    """A recipe by name or path, with `key=value` overrides; every unknown key is an error with a suggestion."""
    settings = _read(source)
    for override in overrides:
        _apply(settings, override)
    problems: list[str] = []
    recipe = _typed(Recipe, settings, "", problems)
    if not problems:
        problems = check(recipe)
    if problems:
        raise ConfigError(problems, title=f"recipe {source!r}")
    return recipe


def recipe_from(settings: Mapping[str, Any], title: str = "recipe") -> Recipe:
    """A recipe from plain data, checked like a file."""
    problems: list[str] = []
    recipe = _typed(Recipe, settings, "", problems)
    problems = problems or check(recipe)
    if problems:
        raise ConfigError(problems, title=title)
    return recipe


def _bundled() -> Any:
    return resources.files("monkeyjump") / "recipes"


def _read(source: str) -> dict[str, Any]:
    path = _bundled() / f"{source}.yaml" if source in names() else Path(source)
    if not path.is_file():
        raise ConfigError(
            f"no recipe {source!r}.{did_you_mean(source, names())} Give a YAML file, or one of: {', '.join(names())}.",
            title="recipe not found",
        )
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"recipe {source!r} cannot be read ({error.strerror}). Check the file.") from error
    return parse_yaml(content, f"recipe {source!r}")


def _apply(settings: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {override!r} must have the form key=value, e.g. train.lr=1e-3.", title="recipe")
    *parents, leaf = key.split(".")
    target = settings
    for parent in parents:
        child = target.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ConfigError(f"override {override!r}: {parent!r} is a value, not a section.", title="recipe")
        target = child
    target[leaf] = parse_value(text, _hint(key))


def _hint(key: str) -> Any:
    """The type of a setting; Any where it is unknown or free, as under `adapter`."""
    hint: Any = Recipe
    for part in key.split("."):
        hint = typing.get_type_hints(hint).get(part, Any) if dataclasses.is_dataclass(hint) else Any
    return hint


def parse_value(text: str, hint: Any = Any) -> Any:
    """A value from the command line: JSON where it is JSON, null/none, a comma list, else the text itself.

    Where text is wanted it stays text, were it `none` or 2024; there `null` alone is no value.
    """
    wanted = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if hint == list[str] and not text.startswith("["):
        return text.split(",")
    if text.lower() == "null" or (text.lower() == "none" and str not in wanted):
        return None
    if text.lower() in ("true", "false") and (bool in wanted or str not in wanted):
        return text.lower() == "true"
    if str in wanted:
        return text
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return [parse_value(part) for part in text.split(",")] if "," in text else text


def _typed(cls: type, settings: Mapping[str, Any], where: str, problems: list[str]) -> Any:
    hints = typing.get_type_hints(cls)
    known = [f.name for f in dataclasses.fields(cls)]
    values: dict[str, Any] = {}
    for key, value in settings.items():
        name = f"{where}{key}"
        if key not in known:
            problems.append(f"unknown key {name!r}.{did_you_mean(str(key), known)} Known here: {', '.join(known)}.")
            continue
        hint = hints[key]
        if dataclasses.is_dataclass(hint):
            if isinstance(value, Mapping):
                values[key] = _typed(typing.cast(type, hint), value, f"{name}.", problems)
            else:
                problems.append(f"{name}={value!r} must be a section of keys and values.")
        else:
            ok, converted = _convert(value, hint)
            if ok:
                values[key] = converted
            else:
                problems.append(f"{name}={value!r} must be {_describe(hint)}.")
    return cls(**values)


def _convert(value: Any, hint: Any) -> tuple[bool, Any]:
    """(fits, value as `hint`). YAML reads 1e-4 as text, and a lone name where a list is meant: both are understood."""
    origin = typing.get_origin(hint)
    if hint is Any:
        return True, value
    if origin in (Union, types.UnionType):
        if value is None:
            return type(None) in typing.get_args(hint), None
        for option in typing.get_args(hint):
            ok, converted = _convert(value, option) if option is not type(None) else (False, None)
            if ok:
                return True, converted
        return False, None
    if origin is list and isinstance(value, list | str):
        items = [_convert(item, typing.get_args(hint)[0]) for item in ([value] if isinstance(value, str) else value)]
        return all(ok for ok, _ in items), [item for _, item in items]
    if origin is dict and isinstance(value, Mapping):
        entries = {key: _convert(item, typing.get_args(hint)[1]) for key, item in value.items()}
        fits = all(isinstance(key, str) and ok for key, (ok, _) in entries.items())
        return fits, {key: item for key, (_, item) in entries.items()}
    if hint is bool:
        return isinstance(value, bool), value
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool), value
    if hint is float:
        try:
            return not isinstance(value, bool), float(value)
        except (TypeError, ValueError, OverflowError):
            return False, None
    return hint is str and isinstance(value, str), value


def _describe(hint: Any) -> str:
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    if typing.get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_describe(option) for option in typing.get_args(hint))
    if typing.get_origin(hint) is list:
        return f"a list of {words[typing.get_args(hint)[0]].removeprefix('a ')}; put words such as no in quotes"
    return words.get(hint, "a section of names and values; put names such as no in quotes")
