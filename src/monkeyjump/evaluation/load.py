"""From an adapter folder to a model that can be evaluated: the adapter on the base model it was made for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from monkeyjump.errors import ConfigError
from monkeyjump.models import ResolvedModel, load_model, load_tokenizer, resolve

TASK_IDS = "monkeyjump_task_ids"  # attribute of a loaded model: the ids its tasks were trained with
RECIPE_FILE = "recipe.json"  # beside the adapter, if the library trained it


@dataclass(frozen=True)
class NamedAdapter:
    """One of the adapters on a model."""

    peft_name: str
    task_ids: Mapping[str, int] = field(default_factory=dict)  # what its tasks were trained with
    folder: Path = Path()


@dataclass(frozen=True)
class Adapters:
    """A model that carries the adapters of some folders, by the names that people know them by."""

    model: Any
    tokenizer: Any
    base_name: str
    named: dict[str, NamedAdapter]


def load_adapters(paths: Sequence[str | Path], base: str | None = None) -> Adapters:
    """The adapters of some folders on the one base model that they were made for, as precise as they were trained.

    An adapter is called by its folder, or by the run's folder around a folder `adapter`. A GPU is used if there is one.
    """
    import torch

    from monkeyjump.training.saving import saved_recipe
    from monkeyjump.training.shared import dtype_of

    folders = [Path(path).expanduser().resolve() for path in paths]
    recipe = saved_recipe(folders[0])
    dtype = None if recipe is None else dtype_of(recipe)
    device = "cuda" if torch.cuda.is_available() else None
    loaded, named = None, dict[str, NamedAdapter]()
    for number, folder in enumerate(folders):
        loaded = load_adapter(folder, base, dtype, device, loaded, adapter_name=(peft_name := f"loaded_{number}"))
        name = folder.parent.name if folder.name == "adapter" else folder.name
        name = f"{name} ({number + 1})" if name in {"base", *named} else name
        named[name] = NamedAdapter(peft_name, vars(loaded[0]).pop(TASK_IDS, {}), folder)
    assert loaded is not None
    made_for = {config.base_model_name_or_path for config in loaded[0].peft_config.values()}
    if len(made_for) > 1 and not base:
        raise ConfigError(
            f"the adapters were made for different base models: {', '.join(sorted(map(str, made_for)))}. Take those of "
            "one model, or name the model of all with --base NAME.",
            title="adapters do not fit together",
        )
    return Adapters(*loaded, base or (recipe.model if recipe else str(*made_for)), named)


def load_adapter(
    path: str | Path,
    base: str | None = None,
    dtype: Any = None,
    device: Any = None,
    loaded: Any = None,
    adapter_name: str = "default",
) -> tuple[Any, Any]:
    """The model with its adapter, in eval mode, and its tokenizer.

    The base model is `base`, or the one the training recipe names, or the one in `adapter_config.json`. The ids of the
    tasks it was trained on stay with the model, for adapters that route by task. `loaded`: the base model and its
    tokenizer, where they are there already; if the model has adapters, this one is put beside them.
    """
    from peft import PeftModel
    from safetensors import SafetensorError

    folder = Path(path).expanduser()
    config = _adapter_config(folder)
    recipe = read_saved_recipe(folder)
    named: list[str | None] = [base] if base else [recipe.get("model"), config.get("base_model_name_or_path")]
    name = _base_name(folder, named, recipe.get("origin", {}).get("base"))
    model, tokenizer = loaded or load_model(name, dtype=dtype, device=device)
    if (folder / "tokenizer_config.json").is_file() and not hasattr(tokenizer, "processor"):
        # its template is the one the adapter was trained with; a processor for pictures stays that of the base model
        saved = load_tokenizer(ResolvedModel(folder.name, "folder", str(folder), local_files_only=True))
        tokenizer = saved if len(saved) == len(tokenizer) else tokenizer
    try:
        if isinstance(model, PeftModel):
            model.load_adapter(str(folder), adapter_name)
            adapted = model
        else:
            adapted = PeftModel.from_pretrained(model, str(folder), adapter_name)
    except ConfigError:
        raise
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, SafetensorError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise _problem(
            f"{str(folder)!r} does not load onto base model {name!r}: {reason}. Save it again, or name its base model "
            "with --base NAME."
        ) from error
    if "task_ids" in recipe.get("origin", {}):
        setattr(adapted, TASK_IDS, recipe["origin"]["task_ids"])
    return adapted.eval(), tokenizer


def read_saved_recipe(folder: Path) -> dict[str, Any]:
    """The recipe beside an adapter as plain data, or nothing. Its relative paths count from the adapter's folder."""
    path = folder / RECIPE_FILE
    recipe = _json_file(path) if path.is_file() else {}
    if isinstance(recipe.get("model"), str):
        recipe["model"] = _from(folder, recipe["model"])
    if isinstance(recipe.get("tasks"), list):
        recipe["tasks"] = [_from(folder, name) for name in recipe["tasks"]]
    if isinstance(recipe.get("data"), dict) and recipe["data"].get("folder"):
        recipe["data"]["folder"] = _from(folder, recipe["data"]["folder"])
    return recipe


def _from(folder: Path, name: Any) -> Any:
    return str(folder / name) if isinstance(name, str) and name.startswith(".") else name


def _adapter_config(folder: Path) -> dict[str, Any]:
    if not folder.exists():
        raise _problem(f"{str(folder)!r} does not exist. Check the path.")
    if not folder.is_dir():
        raise _problem(f"{str(folder)!r} is a file. Pass the folder that holds adapter_config.json.")
    if not (folder / "adapter_config.json").is_file():
        inside = next(iter(sorted(folder.glob("*/adapter_config.json"))), None)
        hint = f" Did you mean {str(inside.parent)!r}?" if inside else ""
        kind = "holds a whole model, not an adapter" if (folder / "config.json").is_file() else "holds no adapter"
        raise _problem(f"{str(folder)!r} {kind} (no adapter_config.json).{hint}")
    if not (folder / "adapter_model.safetensors").is_file():
        if (folder / "adapter_model.bin").is_file():
            raise _problem(
                f"{str(folder)!r} has its weights in adapter_model.bin, a pickle, which may run code when it is read. "
                "Save it as safetensors where you trust it."
            )
        raise _problem(
            f"{str(folder)!r} has a configuration but no weights (adapter_model.safetensors). Save it again."
        )
    return _json_file(folder / "adapter_config.json")


def _json_file(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _problem(f"{str(path)!r} cannot be read ({error}): it is damaged. Save the adapter again.") from error
    if not isinstance(content, dict):
        raise _problem(f"{str(path)!r} is not a JSON object: it is damaged. Save the adapter again.")
    return content


def _base_name(folder: Path, names: list[str | None], origin: dict[str, Any] | None) -> str:
    """The first of these names that can be found. `origin`: what the base was, in words that hold anywhere."""
    reasons = []
    for name in dict.fromkeys(name for name in names if name):
        try:
            resolve(name)
            return name
        except ConfigError as error:
            reasons += error.problems
    if not reasons:
        raise _problem(f"{str(folder)!r} does not say which base model it was made for. Name it with --base NAME.")
    was = ""
    if origin:
        was = f" It was {origin['name']!r} ({origin['architecture']}, {origin['parameters']:,} parameters)."
    raise ConfigError(
        [*reasons, f"Name the base model yourself with --base NAME (in Python base=NAME).{was}"],
        title=f"the base model of {str(folder)!r} is missing",
    )


def _problem(message: str) -> ConfigError:
    return ConfigError(message, title="adapter not readable")
