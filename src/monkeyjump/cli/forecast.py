"""`monkeyjump forecast`: before training, whether the tasks of a recipe oppose each other."""

from __future__ import annotations

import argparse

from monkeyjump.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="a recipe by name, or a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings on top, e.g. adapter.r=8")
    parser.add_argument("--data", metavar="DIR", help="folder of data files instead of the hub")
    parser.add_argument("--rows", type=int, default=64, help="training rows of each task (default: 64)")


def run(options: argparse.Namespace) -> int:
    from monkeyjump.first_imports import uncollected
    from monkeyjump.training.recipe import load_recipe

    if options.rows < 4:
        raise ConfigError(f"--rows {options.rows} must be 4 or more: each task is read in two halves.")
    recipe = load_recipe(options.recipe, options.overrides)
    with uncollected():
        from monkeyjump.experiments.forecast import forecast

    found = forecast(recipe, options.rows)
    found.table().show()
    print(f"agreement of the tasks   {found.agreement:+.2f}   (1: one task; 0: unrelated; below 0: opposed)")
    print(
        f"bits of the first centres {found.bits:.3f}, at most {found.most_bits:.3f}   (0: they do not tell tasks apart)"
    )
    return 0
