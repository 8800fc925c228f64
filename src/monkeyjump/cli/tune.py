"""`monkeyjump tune`: a search over settings of a recipe, by validation, with runs that look bad stopped early."""

from __future__ import annotations

import argparse

from monkeyjump.cli.grids import add_where, stopped, where
from monkeyjump.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="a recipe by name, or a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings on top, e.g. train.max_steps=200")
    parser.add_argument(
        "--space", action="append", required=True, metavar="KEY=RANGE",
        help="what is searched: train.lr=1e-4..1e-2, or adapter.r=1,2,4; once for each key",
    )  # fmt: skip
    parser.add_argument("--trials", type=int, default=20, help="number of runs (default: 20)")
    parser.add_argument("--data", metavar="DIR", help="folder of data files instead of the hub")
    parser.add_argument("--output", metavar="DIR", help="where runs and results go (default: runs/tune-<recipe>)")
    add_where(parser)


def run(options: argparse.Namespace) -> int:
    from pathlib import Path

    from monkeyjump.experiments.tune import BEST, Range, best_table, save_tune, tune
    from monkeyjump.record import writable_folder
    from monkeyjump.training.recipe import load_recipe, overridden

    recipe = load_recipe(options.recipe, options.overrides)
    ranges = [Range.read(words) for words in options.space]
    if options.trials < 1:
        raise ConfigError(f"--trials {options.trials} must be at least 1.")
    for each in ranges:  # a key or a value that no recipe has is found before the first run
        for value in each.values:
            overridden(recipe, [f"{each.key}={value}"])
    output = writable_folder(Path(options.output or f"runs/tune-{recipe.name}"), "--output")
    try:
        study = tune(recipe, ranges, options.trials, output, **where(options))
    except KeyboardInterrupt:
        return stopped(output)
    best_table(study, ranges).show()
    for path in save_tune(study, recipe, ranges, output):
        print(f"saved       {path}")
    print(f"\nTry next:\n  monkeyjump train {output / BEST}")
    return 0
