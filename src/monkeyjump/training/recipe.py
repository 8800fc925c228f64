"""A recipe: one YAML file behind one typed configuration, with overrides such as `train.lr=1e-3` on top.

The types are the truth: they check a recipe, and the reference page and the schema for editors are made from them.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from monkeyjump.checked import Number, Section, section_of, validated
from monkeyjump.config_rules import broken
from monkeyjump.errors import ConfigError
from monkeyjump.registry import did_you_mean
from monkeyjump.yaml_files import parse_yaml


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _folder_name(value: str) -> str:
    if value in ("", ".", "..") or set(value) & set("/\\\0"):
        raise PydanticCustomError("rule", "must be the name of one folder; choose another place with output=DIR")
    return value


_NAMES = {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "string"}]}
Names = Annotated[list[str], BeforeValidator(_listed), WithJsonSchema(_NAMES)]  # a lone name is a list of one
Positive = Annotated[Number, Field(gt=0, allow_inf_nan=False)]
Schedule = Literal[
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt"
]


class DataSettings(Section):
    """What is trained on."""

    folder: str | None = Field(
        None,
        description="folder with <task>/train.jsonl and test.jsonl (or csv, parquet, ...); null: the hub. Built-in "
        "tasks and tasks with files of their own need neither",
    )
    answer: Literal["letter", "text"] = Field("letter", description="what is learnt and scored of an option")
    cap: int | None = Field(None, ge=1, description="most training rows of a task")
    caps: dict[str, Annotated[int, Field(ge=1)]] = Field({}, description="the same, for single tasks")
    weights: dict[str, Positive] = Field({}, description="relative sampling weight of single tasks")
    temperature: Positive | None = Field(
        None, description="null: every row once an epoch; T: tasks drawn by size ** (1 / T)"
    )
    validation: int = Field(
        200,
        ge=1,
        description="most validation rows of a task, taken from its training data; they choose the checkpoint",
    )
    max_length: int = Field(1024, ge=8, description="most tokens of a text; only its context is cut")
    frames: int = Field(8, ge=1, description="frames of a clip that are shown, at equal distances")
    bad_media: Literal["raise", "drop"] = Field(
        "raise", description="where a picture or clip cannot be read: stop before training, or leave its row out"
    )
    keep_features: bool = Field(
        False, description="keep what a frozen tower makes of pictures on disk instead of computing it in every epoch"
    )
    packing: bool = Field(False, description="rows of one fixed length without padding")
    buckets: list[Annotated[int, Field(ge=1)]] = Field(
        [], description="widths of padded batches, e.g. 128,256,512; []: multiples of 8, or few widths to compile"
    )
    streaming: bool = Field(False, description="read and encode while training, for data that does not fit in memory")


class TrainSettings(Section):
    """The optimisation. The defaults are the paper's for text."""

    lr: Positive = Field(1e-4, description="learning rate")
    epochs: Positive = Field(2.0, description="times through the data")
    max_steps: int | None = Field(None, ge=1, description="steps instead of epochs")
    batch_size: int = Field(4, ge=1, description="texts of one forward")
    accumulation: int = Field(4, ge=1, description="forwards of one step")
    schedule: Schedule = Field("cosine", description="how the learning rate goes down")
    warmup: Number = Field(0.1, ge=0, lt=1, description="share of all steps in which the learning rate goes up")
    weight_decay: Number = Field(0.1, ge=0, allow_inf_nan=False, description="AdamW's")
    max_grad_norm: Number = Field(1.0, ge=0, allow_inf_nan=False, description="where gradients are clipped; 0: nowhere")
    bf16: bool | None = Field(None, description="null: on a GPU that has it")
    gradient_checkpointing: bool = Field(False, description="less memory, a second forward in the backward")
    compile: Literal[False, True, "blocks", "model"] | None = Field(
        None, description="blocks (true): each block; model: all blocks as one graph, a long wait; null: as fast says"
    )
    capture: bool | None = Field(
        None,
        description="a forward, and a backward, of the blocks are one launch; null: as fast says, on a single GPU",
    )
    fused_loss: Literal[False, True, "auto", "liger", "torch", "off"] = Field(
        "auto", description="the loss without logits: liger, torch, true (the better there is); auto: as fast says"
    )
    eval_steps: int | None = Field(None, ge=1, description="steps between validations; null: four times in the run")
    save_steps: int | None = Field(
        None, ge=1, description="steps between checkpoints; null: as often as it is validated"
    )
    keep_checkpoints: int = Field(2, ge=2, description="checkpoints on disk, of which one may be lost in a crash")
    not_finite: Literal["stop", "skip"] = Field(
        "stop",
        description="where a loss or a gradient is no finite number: stop with the best checkpoint, or leave the step "
        "out, which is looked at in every step and costs a wait for the device",
    )
    revive: bool = Field(False, description="move centres that no token jumps to beside the busiest of their block")
    patience: int | None = Field(None, ge=1, description="validations without improvement before stopping; null: never")
    log_steps: int = Field(10, ge=1, description="steps between two lines of the log")
    report_to: Names = Field([], description="loggers of Transformers, such as tensorboard or wandb")
    workers: int = Field(0, ge=0, description="processes that prepare batches")


class EvaluateSettings(Section):
    """How answers are scored, before, during and after training."""

    mode: Literal["letter", "text", "generate"] | None = Field(None, description="null: as data.answer")
    validation_limit: int | None = Field(100, ge=1, description="most rows of a task while training")
    test_limit: int | None = Field(None, ge=1, description="most rows of a task in the final table")
    batch_tokens: int | None = Field(None, ge=1, description="padded tokens of one forward; null: by device")
    before: bool = Field(True, description="score the base model too")


class Recipe(Section):
    """One run: a model, a method, tasks, and what to do with them."""

    name: Annotated[str, AfterValidator(_folder_name)] = Field("run", description="what the run is called")
    model: str = Field("smollm2-135m", description="a model by name, a Hugging Face id, a folder or a GGUF file")
    method: str = Field("mjlora", description="one of `monkeyjump methods`")
    preset: str = Field("mj_paper", description="mj_paper (all methods alike) or published (each as in its paper)")
    adapter: dict[str, Any] = Field({}, description="fields of MonkeyJumpConfig, on top of the method's")
    tasks: Annotated[Names, Field(min_length=1)] = Field(
        ["builtin"], description="task names, groups, or YAML files of tasks"
    )
    data: DataSettings = Field(default_factory=DataSettings, description="what is trained on")
    train: TrainSettings = Field(default_factory=TrainSettings, description="the optimisation")
    evaluate: EvaluateSettings = Field(default_factory=EvaluateSettings, description="how answers are scored")
    fast: Literal["auto", False] = Field(
        "auto",
        description="auto: the loss is fused; on a GPU blocks are compiled and captured, batches have few widths; "
        "false: none of these, unless asked for by itself",
    )
    seed: int = Field(0, ge=0, lt=2**32, description="of data order, adapters and centres")
    output: str | None = Field(None, description="folder of the results; null: runs/<name>")

    @property
    def folder(self) -> Path:
        return Path(self.output) if self.output else Path("runs") / self.name

    @property
    def mode(self) -> str:
        return self.evaluate.mode or self.data.answer

    def to_dict(self) -> dict[str, Any]:
        return self.model_dump()


def names() -> list[str]:
    """The recipes that come with the package."""
    return sorted(path.name.removesuffix(".yaml") for path in _bundled().iterdir() if path.name.endswith(".yaml"))


def load_recipe(source: str, overrides: Iterable[str] = ()) -> Recipe:
    """A recipe by name or path, with `key=value` overrides; every unknown key is an error with a suggestion."""
    return _overridden(_read(source), overrides, source)


def overridden(recipe: Recipe, overrides: Iterable[str]) -> Recipe:
    """The recipe with `key=value` overrides on top."""
    return _overridden(recipe.to_dict(), overrides, recipe.name)


def _overridden(settings: dict[str, Any], overrides: Iterable[str], name: str) -> Recipe:
    for override in overrides:
        _apply(settings, override)
    return recipe_from(settings, f"recipe {name!r}")


def recipe_from(settings: Mapping[str, Any], title: str = "recipe") -> Recipe:
    """A recipe from plain data, checked like a file."""
    return validated(Recipe, settings, title, _conflicts)


def _conflicts(recipe: Recipe) -> list[str]:
    """What single keys cannot show: settings that do not go together, one sentence each."""
    data, train = recipe.data, recipe.train
    rules = {
        "data.streaming=true needs train.max_steps: the length of streamed data is not known.": (
            data.streaming and train.max_steps is None
        ),
        "train.compile='model' cannot hold train.gradient_checkpointing=true, which runs blocks twice: set "
        "train.compile='blocks'.": train.compile == "model" and train.gradient_checkpointing,
        "data.buckets is for padded batches: data.packing=true has one length; leave one of them out.": (
            data.buckets and data.packing
        ),
        f"data.buckets={data.buckets} must reach data.max_length={data.max_length}: a streamed text may be as long.": (
            data.buckets and data.streaming and max(data.buckets) < data.max_length
        ),
    }
    return broken(rules)


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
    section: type[Section] | None = Recipe
    hint: Any = Any
    for part in key.split("."):
        field = section.model_fields.get(part) if section is not None else None
        hint = Any if field is None else field.annotation
        section = section_of(hint)
    return hint


def parse_value(text: str, hint: Any = Any) -> Any:
    """A value from the command line: JSON where it is JSON, null/none, a comma list, else the text itself.

    Where text is wanted it stays text, were it `none` or 2024; there `null` alone is no value.
    """
    wanted = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    word, free, inner = text.lower(), str in wanted, text.removeprefix("[").removesuffix("]")
    if hint == list[str]:
        return [part.strip().strip("'\"") for part in inner.split(",") if part.strip()]
    if word == "null" or (word == "none" and not free):
        return None
    if word in ("true", "false") and (bool in wanted or not free):
        return word == "true"
    if free:
        return text
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        listed = "," in text or len(text) - len(inner) == 2
        return [parse_value(part.strip().strip("'")) for part in inner.split(",")] if listed else text
