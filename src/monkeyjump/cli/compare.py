"""`monkeyjump compare`: methods against each other on the same tasks, seeds and budget."""

from __future__ import annotations

import argparse

from monkeyjump.cli.grids import add_grid, checked_rates, made, stopped, where


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", nargs="?", default="quickstart", help="what to train on (default: quickstart)")
    parser.add_argument("--methods", required=True, metavar="A,B,...", help="methods; the first is the reference")
    parser.add_argument("--tasks", metavar="A,B,...", help="tasks instead of the recipe's")
    parser.add_argument("--data", metavar="DIR", help="folder of data files instead of the hub")
    parser.add_argument("--no-controls", action="store_true", help="leave out the controls a routed method needs")
    add_grid(parser, "runs/compare-<recipe>")


def run(options: argparse.Namespace) -> int:
    from pathlib import Path

    from monkeyjump.first_imports import uncollected
    from monkeyjump.training.recipe import load_recipe

    recipe = load_recipe(options.recipe, [*options.overrides, *([f"tasks={options.tasks}"] if options.tasks else [])])
    lrs = checked_rates(options, recipe)
    where(options)  # for its mistakes, before torch is imported
    with uncollected():  # only now: they bring torch, which no mistake above has to wait for
        from monkeyjump.experiments.compare import grid_of_methods
        from monkeyjump.experiments.tables import comparison_tables, save_comparison

    output, controls = Path(options.output or f"runs/compare-{recipe.name}"), not options.no_controls
    methods, seeds = options.methods.split(","), range(options.seeds)
    grid = grid_of_methods(recipe, methods, seeds, lrs, controls=controls, widen=options.widen)
    try:
        if not made(options, grid, output):
            return 0
    except KeyboardInterrupt:
        return stopped(output)
    for table in comparison_tables(grid):
        table.show()
    for path in save_comparison(grid, output):
        print(f"saved       {path}")
    return 0
