"""`monkeyjump inspect`: what an adapter routes where, as figures, numbers and one page."""

from __future__ import annotations

import argparse
import json
from contextlib import suppress
from pathlib import Path

from monkeyjump.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("adapter", help="folder of a saved adapter or of a checkpoint")
    parser.add_argument("second", nargs="?", metavar="adapter2", help="another one, to stand beside it")
    parser.add_argument("--tasks", metavar="A,B,...", help="tasks, groups or YAML files (default: those of training)")
    parser.add_argument("--text", metavar="TEXT", help="a text, or a file with a row in each line, instead of tasks")
    parser.add_argument("--image", metavar="FILE", help="a picture, with --text as the question about it")
    parser.add_argument("--data", metavar="DIR", help="folder of data files instead of the hub")
    parser.add_argument("--rows", type=int, default=32, metavar="N", help="most test rows of a task (default: 32)")
    parser.add_argument("--base", metavar="MODEL", help="base model, where the adapter does not say")
    parser.add_argument("--output", metavar="DIR", help="folder of the report (default: beside the adapter)")


def run(options: argparse.Namespace) -> int:
    from monkeyjump.training.saving import saved_recipe

    paths = [Path(name).expanduser() for name in (options.adapter, options.second) if name]
    recipes = [saved_recipe(path) or saved_recipe(path.parent.parent / "adapter") for path in paths]
    problems = [problem for path in paths for problem in _unfit(path)]
    if options.tasks and (options.text or options.image):
        problems.append("--tasks and --text or --image exclude each other: name the tasks, or give one input.")
    if options.rows < 1:
        problems.append(f"--rows={options.rows} must be at least 1.")
    if options.image and not Path(options.image).expanduser().is_file():
        problems.append(f"--image {options.image!r} is no file. Check the path.")
    if not problems and not (options.tasks or options.text or options.image) and recipes[0] is None:
        problems.append(f"{str(paths[0])!r} does not say what it was trained on: name --tasks, --text or --image.")
    if problems:
        raise ConfigError(problems, title="cannot inspect")

    from monkeyjump.analysis.inspect import InspectSettings, inspect
    from monkeyjump.record import output_path, writable_folder
    from monkeyjump.tasks import expand
    from monkeyjump.tasks.preflight import look_at

    for known in recipes:
        if known is not None and options.data:
            known.data.folder = options.data
    recipe = recipes[0]
    data = recipe.data.folder if recipe else options.data
    settings = InspectSettings((), options.text, options.image, data, options.rows, options.base)
    if not (options.text or options.image):
        named = options.tasks or (recipe.tasks if recipe else "")
        settings.tasks = expand(named, recipe.data.bad_media if recipe else "raise")
        look_at(settings.tasks, data, splits=["test"])
    beside = paths[0].parent.parent if paths[0].parent.name == "checkpoints" else paths[0].parent
    folder = writable_folder(output_path(options.output, beside / "inspection"), "--output")
    try:
        page, tables = inspect(list(zip(paths, recipes, strict=True)), settings, folder)
    except BaseException:
        with suppress(OSError):  # a folder that holds something stays
            folder.rmdir()
        raise
    print()
    for table in tables:
        table.show()
    print(f"report      {page}")
    print(f"figures     {folder} (PNG and SVG; CSV and JSON behind each)")
    return 0


def _unfit(adapter: Path) -> list[str]:
    """What keeps an adapter from being inspected, as far as its files say."""
    try:
        config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return [f"{str(adapter)!r} holds no adapter that can be read ({error}). Check the path."]
    if config.get("peft_type") != "MONKEYJUMP" or config.get("layers_to_route") == []:
        return [f"{str(adapter)!r} does not route. Name an adapter of a method with a router (monkeyjump methods)."]
    return []
