"""`monkeyjump validate`: check a recipe and its data without running it."""

from __future__ import annotations

import argparse
import json
import textwrap

from monkeyjump.errors import ConfigError
from monkeyjump.tables import Table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", nargs="?", help="a recipe by name, or a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings on top, e.g. train.lr=1e-3")
    parser.add_argument("--data", metavar="DIR", help="folder of data files instead of the hub (data.folder)")
    parser.add_argument(
        "--schema", choices=["recipe", "task"], help="print the JSON schema of recipes or of task files, for editors"
    )


def run(options: argparse.Namespace) -> int:
    if options.schema:
        from monkeyjump.training import schema

        print(json.dumps(getattr(schema, f"{options.schema}_schema")(), indent=2))
        return 0
    if options.recipe is None:
        raise ConfigError("name a recipe, such as `monkeyjump validate quickstart`, or ask for a --schema.")
    from monkeyjump.models.bundled import BUNDLED
    from monkeyjump.models.resolve import resolve
    from monkeyjump.tasks import expand
    from monkeyjump.tasks.preflight import SplitLook, look_at, notes
    from monkeyjump.training.recipe import load_recipe

    recipe = load_recipe(options.recipe, options.overrides)
    tasks = expand(recipe.tasks, recipe.data.bad_media)
    problems, looks = list[str](), list[SplitLook]()
    try:
        looks = look_at(tasks, recipe.data.folder, seed=recipe.seed, streaming=True)
    except ConfigError as error:
        problems += error.problems
    try:
        if recipe.model not in BUNDLED:  # those are fetched when they are needed
            resolve(recipe.model)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems, "not ready")
    from monkeyjump import methods  # only now: it brings torch, which no mistake in the recipe has to wait for
    from monkeyjump.training.trainer import check_loggers

    config = methods.build(recipe.method, recipe.preset, **recipe.adapter)
    check_loggers(recipe.train.report_to)
    rows = []
    for task in tasks:
        by_split = {look.split: look for look in looks if look.task == task.name}
        answer, share = by_split["test"].most_frequent
        sizes = [by_split[split].size for split in ("train", "validation", "test")]
        rows.append([task.name, *sizes, f"{100 * share:.1f}", answer])
    header = ["task", "train", "validation", "test", "major", "most frequent"]
    Table("Rows; major: share (%) of one answer in test", header, rows, left=1).show()
    for note in notes(looks):
        print(textwrap.fill(note, 80))
    known = f"recipe {options.recipe!r} is valid: {recipe.method} ({config.adapter}, rank {config.r}) on {recipe.model}"
    print(textwrap.fill(f"{known}, {len(tasks)} tasks; results go to {recipe.folder}", 80, break_long_words=False))
    return 0
