"""`monkeyjump validate`: check a recipe without running it."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="a recipe by name, or a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings on top, e.g. train.lr=1e-3")


def run(options: argparse.Namespace) -> int:
    from monkeyjump.tasks import expand
    from monkeyjump.training.recipe import load_recipe

    recipe = load_recipe(options.recipe, options.overrides)
    tasks = expand(recipe.tasks)
    from monkeyjump import methods  # only now: it brings torch, which no mistake in the recipe has to wait for

    config = methods.build(recipe.method, recipe.preset, **recipe.adapter)
    print(f"recipe {options.recipe!r} is valid: {recipe.method} ({config.adapter}, rank {config.r}) on {recipe.model},")
    print(f"{len(tasks)} tasks: {', '.join(task.name for task in tasks)}; results go to {recipe.folder}")
    return 0
