"""A trained adapter in its folder, with what another machine needs to use it: base, tasks, data, recipe and card."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monkeyjump.card import LOADING, listed, settings_of, settings_table
from monkeyjump.config import MonkeyJumpConfig
from monkeyjump.evaluation.load import RECIPE_FILE, read_saved_recipe
from monkeyjump.evaluation.report import EvaluationReport, percent, span
from monkeyjump.models import published_name, resolve
from monkeyjump.record import write_atomic
from monkeyjump.tables import Table
from monkeyjump.training.recipe import Recipe, recipe_from

if TYPE_CHECKING:
    from monkeyjump.training.run import RunResult


def save_adapter(result: RunResult, recipe: Recipe, config: MonkeyJumpConfig, data: list[dict[str, Any]]) -> None:
    """The adapter, its tokenizer, its card, the recipe it came from and the tasks of its user, in `folder/adapter`."""
    folder = recipe.folder / "adapter"
    result.model.save_pretrained(folder)  # type: ignore[operator]
    result.tokenizer.save_pretrained(folder)
    # PEFT has written where the base model lies on this machine. Only now: for a hub id it would ask the network.
    path = folder / "adapter_config.json"
    written = json.loads(path.read_text(encoding="utf-8"))
    written["base_model_name_or_path"] = published_name(recipe.model)
    write_atomic(path, json.dumps(written, indent=2, sort_keys=True) + "\n")
    ids = {task.name: index for index, task in enumerate(result.tasks)}
    result.origin = {"base": _base(result, recipe), "data": data, "task_ids": ids}
    write_card(result, recipe, config)
    saved = {**_from_here(recipe, folder), "origin": result.origin}
    write_atomic(folder / RECIPE_FILE, json.dumps(saved, indent=2) + "\n")


def write_card(result: RunResult, recipe: Recipe, config: MonkeyJumpConfig) -> None:
    """The model card, with the metadata that model hubs read: what the adapter was made of, what it scores, and how
    another machine loads it. It names no folder of this machine."""
    local = Path(recipe.model).expanduser().exists()
    given = Path(recipe.model).name if local else recipe.model
    base, origin = given if local else published_name(recipe.model), result.origin["base"]
    revision = f", revision {origin['revision']}" if origin["revision"] else ""
    loading = f"from monkeyjump.models import load_model\nbase_model, tokenizer = load_model({json.dumps(given)})\n"
    metadata = ["library_name: peft", *([] if local else [f"base_model: {json.dumps(base)}"])]
    settings = {
        "base model": f"{base} ({origin['architecture']}, {origin['parameters']:,} parameters{revision})",
        "method": f"{recipe.method} (preset {recipe.preset})",
        **settings_of(config),
        "parameters": str(result.parameters),
        "tasks": listed(recipe.tasks),
        "training": f"learning rate {recipe.train.lr:g}, "
        f"{recipe.train.batch_size} x {recipe.train.accumulation} texts a step, seed {recipe.seed}",
    }
    sources = [
        [*(str(entry[key]) for key in ("task", "split", "rows", "source")), entry.get("sha256", "")[:16]]
        for entry in result.origin["data"]
    ]
    parts = [
        "\n".join(["---", *metadata, f"tags: [monkeyjump, peft, {recipe.method}]", "---"]),
        f"# {recipe.name}",
        f"An adapter for {base}.",
        settings_table(settings),
        *_results(result.report),
        "## Training data",
        Table("", ["task", "split", "rows", "from", "sha256"], sources, left=5).markdown(),
        LOADING.format(base=loading).strip(),
        "Scores on tasks: `monkeyjump evaluate path/to/this/folder --tasks NAMES`.\n",
    ]
    write_atomic(recipe.folder / "adapter" / "README.md", "\n\n".join(parts))


def show_in_card(picture: Path, adapter: Path) -> None:
    """Lay a picture of the routing beside the adapter, and show it in the card."""
    shutil.copyfile(picture, adapter / picture.name)
    card = adapter / "README.md"
    shown = f"## Routing\n\n![Which experts the tokens of each task jump to]({picture.name})\n"
    write_atomic(card, f"{card.read_text(encoding='utf-8')}\n{shown}")


def _results(report: EvaluationReport | None) -> list[str]:
    rows = [
        [row.task, row.metric, str(row.n), percent(row.base), percent(row.adapter), span(row.adapter_interval)]
        for row in (report.ordered() if report else ())
    ]
    table = Table("", ["task", "metric", "n", "base model", "adapter", "95 %"], rows, left=2)
    return ["## Results", f"Test scores x 100: {report.title}.", table.markdown()] if report else []


def saved_recipe(folder: Path) -> Recipe | None:
    """The recipe an adapter folder came from, if it says, with paths that hold from any folder."""
    content = read_saved_recipe(folder)
    if not content:
        return None
    content.pop("origin", None)
    return recipe_from(content, str(folder / RECIPE_FILE))


def _base(result: RunResult, recipe: Recipe) -> dict[str, Any]:
    base: Any = result.model.get_base_model()  # type: ignore[operator]
    config, name = base.config, published_name(recipe.model)
    return {
        "name": Path(name).name if Path(name).expanduser().exists() else name,
        "kind": resolve(recipe.model).kind,
        "revision": getattr(config, "_commit_hash", None),
        "architecture": (getattr(config, "architectures", None) or [type(base).__name__])[0],
        "parameters": result.parameters.total - result.parameters.trainable,
    }


def _from_here(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """The recipe with every path counted from the adapter's folder, where copies of the user's task files lie too."""
    settings = recipe.to_dict()
    settings["output"] = None
    if Path(recipe.model).expanduser().exists():
        settings["model"] = _relative(Path(recipe.model), folder)
    if recipe.data.folder is not None:
        settings["data"]["folder"] = _relative(Path(recipe.data.folder), folder)
    settings["tasks"] = [_task_from_here(name, number, folder) for number, name in enumerate(recipe.tasks)]
    return settings


def _task_from_here(name: str, number: int, folder: Path) -> str:
    """A task's name, or the place of a copy of its file; its number keeps two files of one name apart."""
    if not name.endswith((".yaml", ".yml")):
        return name
    import yaml

    from monkeyjump.tasks.task_file import read_task_file

    path, home = Path(name).expanduser(), folder / "tasks"
    home.mkdir(exist_ok=True)
    content = read_task_file(path)
    if "hub" not in content["data"]:
        places = {split: path.parent / Path(file).expanduser() for split, file in content["data"].items()}
        content["data"] = {split: _relative(place, home) for split, place in places.items()}
    copy = f"{number}-{path.name}" if number else path.name
    write_atomic(home / copy, yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
    return f"./tasks/{copy}"


def _relative(path: Path, folder: Path) -> str:
    """A path from a folder; it begins with a dot, so that nobody takes it for a name."""
    found = os.path.relpath(path.expanduser().resolve(), folder.resolve())
    return found if found.startswith(".") else f"./{found}"
