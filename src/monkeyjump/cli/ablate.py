"""`monkeyjump ablate`: the studies of the paper, and ours beside them, each a small grid with a table and a picture."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("study", help="the name of a study, a YAML file, `list`, or `all`")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings on top, e.g. train.max_steps=200")
    parser.add_argument("--recipe", default="text14-study", help="what is trained (default: text14-study)")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds (default: 5)")
    parser.add_argument("--lrs", metavar="X,Y,...", help="learning rates to search (default: the recipe's)")
    parser.add_argument("--widen", action="store_true", help="try further rates until neither end is the best")
    parser.add_argument("--data", metavar="DIR", help="folder of data files instead of the hub")
    parser.add_argument("--output", metavar="DIR", help="where runs and results go (default: runs/study-<recipe>)")
    parser.add_argument("--jobs", default="auto", metavar="N", help="runs at a time (default: auto)")


def run(options: argparse.Namespace) -> int:
    from pathlib import Path

    from monkeyjump.cli.compare import checked_jobs, checked_rates
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
    recipe = load_recipe(
        options.recipe, [*options.overrides, *([f"data.folder={options.data}"] if options.data else [])]
    )
    lrs, jobs = checked_rates(options, recipe), checked_jobs(options)
    grids = {name: grid_of(s, recipe, range(options.seeds), lrs, options.widen) for name, s in studies.items()}
    with uncollected():
        from monkeyjump.experiments.ablate import draw_figures, save_study, study_rows, study_table, verdicts
        from monkeyjump.experiments.compare import run_grid

    output = Path(options.output or f"runs/study-{recipe.name}")
    for name, grid in grids.items():
        try:
            run_grid(grid, output, jobs)
        except KeyboardInterrupt:
            print(f"\nstopped; finished runs are kept in {output}. The same command goes on where this one stopped.")
            return 130
        study_table(studies[name], grid).show()
        for words, verdict in verdicts(studies[name], study_rows(grid)):
            print(f"the paper's {words} points: {verdict}")
        saved = [*save_study(name, studies[name], grid, output), *draw_figures(studies[name], grid, output)]
        for path in saved:
            print(f"saved       {path}")
    return 0
