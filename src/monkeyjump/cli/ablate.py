"""`monkeyjump ablate`: the studies of the paper, and ours beside them, each a small grid with a table and a picture."""

from __future__ import annotations

import argparse

from monkeyjump.cli.grids import add_grid, checked_rates, made, stopped, where


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("study", help="the name of a study, a YAML file, `list`, or `all`")
    parser.add_argument("--recipe", default="text14-study", help="what is trained (default: text14-study)")
    parser.add_argument("--data", metavar="DIR", help="folder of data files instead of the hub")
    add_grid(parser, "runs/study-<recipe>")


def run(options: argparse.Namespace) -> int:
    from pathlib import Path

    from monkeyjump.experiments.study import grid_of, load_study, names, variants_of
    from monkeyjump.first_imports import uncollected
    from monkeyjump.tables import Table
    from monkeyjump.training.recipe import load_recipe

    if options.study == "list":
        rows = [[name, str(len(variants_of(found))), found.title] for name in names() if (found := load_study(name))]
        Table("Studies", ["name", "variants", "question"], rows).show()
        return 0
    chosen = names() if options.study == "all" else [options.study]
    studies = {Path(name).stem: load_study(name) for name in chosen}
    recipe = load_recipe(options.recipe, options.overrides)
    lrs = checked_rates(options, recipe)
    where(options)  # for its mistakes, before torch is imported
    grids = {name: grid_of(s, recipe, range(options.seeds), lrs, options.widen) for name, s in studies.items()}
    with uncollected():
        from monkeyjump.experiments.ablate import draw_figures, save_study, study_rows, study_table, verdicts

    output = Path(options.output or f"runs/study-{recipe.name}")
    for name, grid in grids.items():
        try:
            if not made(options, grid, output):
                continue
        except KeyboardInterrupt:
            return stopped(output)
        study_table(studies[name], grid).show()
        for words, verdict in verdicts(studies[name], study_rows(grid)):
            print(f"the paper's {words} points: {verdict}")
        saved = [*save_study(name, studies[name], grid, output), *draw_figures(studies[name], grid, output)]
        for path in saved:
            print(f"saved       {path}")
    return 0
