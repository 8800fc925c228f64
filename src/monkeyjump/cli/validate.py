"""`monkeyjump validate`: check a recipe without running it."""

from __future__ import annotations

import argparse

from monkeyjump.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", nargs="?", help="a recipe by name, or a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings on top, e.g. train.lr=1e-3")
    parser.add_argument(
        "--schema", choices=["recipe", "task"], help="print the JSON schema of recipes or of task files, for editors"
    )


def run(options: argparse.Namespace) -> int:
    if options.schema or options.recipe is None:
        return _print_schema(options.schema)
    from monkeyjump.tasks import expand
    from monkeyjump.training.recipe import load_recipe

    recipe = load_recipe(options.recipe, options.overrides)
    tasks = expand(recipe.tasks)
    from monkeyjump import methods  # only now: it brings torch, which no mistake in the recipe has to wait for

    config = methods.build(recipe.method, recipe.preset, **recipe.adapter)
    print(f"recipe {options.recipe!r} is valid: {recipe.method} ({config.adapter}, rank {config.r}) on {recipe.model},")
    print(f"{len(tasks)} tasks: {', '.join(task.name for task in tasks)}; results go to {recipe.folder}")
    return 0


def _print_schema(kind: str | None) -> int:
    if kind is None:
        raise ConfigError("name a recipe, such as `monkeyjump validate quickstart`, or ask for a --schema.")
    import json

    from monkeyjump.training import schema

    print(json.dumps(schema.recipe_schema() if kind == "recipe" else schema.task_schema(), indent=2))
    return 0
