"""`monkeyjump compare`: methods against each other on the same tasks, seeds and budget."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING

from monkeyjump.errors import ConfigError

if TYPE_CHECKING:
    from monkeyjump.training.recipe import Recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", nargs="?", default="quickstart", help="what to train on (default: quickstart)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings on top, e.g. train.max_steps=200")
    parser.add_argument("--methods", required=True, metavar="A,B,...", help="methods; the first is the reference")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds (default: 5)")
    parser.add_argument(
        "--lrs", metavar="X,Y,...", help="learning rates to search on validation (default: the recipe's)"
    )
    parser.add_argument(
        "--widen", action="store_true", help="try further rates until neither end of the search is the best"
    )
    parser.add_argument("--tasks", metavar="A,B,...", help="tasks instead of the recipe's")
    parser.add_argument("--data", metavar="DIR", help="folder of data files instead of the hub")
    parser.add_argument("--output", metavar="DIR", help="where runs and results go (default: runs/compare-<recipe>)")
    parser.add_argument(
        "--jobs", default="auto", metavar="N", help="runs at a time, in processes of their own (default: auto)"
    )
    parser.add_argument("--no-controls", action="store_true", help="leave out the controls a routed method needs")


def run(options: argparse.Namespace) -> int:
    from pathlib import Path

    from monkeyjump.first_imports import uncollected
    from monkeyjump.training.recipe import load_recipe

    overrides = list(options.overrides)
    overrides += [f"data.folder={options.data}"] if options.data else []
    overrides += [f"tasks={options.tasks}"] if options.tasks else []
    recipe = load_recipe(options.recipe, overrides)
    lrs, jobs = checked_rates(options, recipe), checked_jobs(options)
    with uncollected():  # only now: they bring torch, which no mistake above has to wait for
        from monkeyjump.experiments.compare import compare
        from monkeyjump.experiments.tables import comparison_tables, save_comparison

    output = Path(options.output or f"runs/compare-{recipe.name}")
    try:
        comparison = compare(
            recipe,
            options.methods.split(","),
            list(range(options.seeds)),
            lrs,
            output,
            controls=not options.no_controls,
            jobs=jobs,
            widen=options.widen,
        )
    except KeyboardInterrupt:
        print(f"\nstopped; finished runs are kept in {output}. The same command goes on where this one stopped.")
        return 130
    for table in comparison_tables(comparison):
        table.show()
    for path in save_comparison(comparison, output):
        print(f"saved       {path}")
    return 0


def checked_rates(options: argparse.Namespace, recipe: Recipe) -> list[float]:
    """The learning rates to search."""
    try:
        lrs = [float(word) for word in options.lrs.split(",")] if options.lrs else [recipe.train.lr]
    except ValueError:
        raise ConfigError(f"--lrs {options.lrs} must be numbers with commas between them, e.g. 1e-4,3e-4.") from None
    if not all(0 < lr < math.inf for lr in lrs) or options.seeds < 1:
        raise ConfigError(
            f"--lrs {options.lrs or recipe.train.lr} must be above 0 and finite, --seeds {options.seeds} at least 1."
        )
    if options.widen and len(set(lrs)) == 1:
        raise ConfigError("--widen goes on from the ends of a search: give --lrs at least two rates.")
    return lrs


def checked_jobs(options: argparse.Namespace) -> int | str:
    if options.jobs != "auto" and not (options.jobs.isdecimal() and int(options.jobs)):
        raise ConfigError(f"--jobs {options.jobs} must be a number of runs from 1, or auto.")
    return options.jobs if options.jobs == "auto" else int(options.jobs)
