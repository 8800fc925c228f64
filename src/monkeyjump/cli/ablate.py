"""`monkeyjump ablate`: the studies of the paper, and ours beside them, each a small grid with a table and a picture."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from monkeyjump.cli.grids import add_grid, checked_rates, made, stopped, where
from monkeyjump.errors import ConfigError

if TYPE_CHECKING:
    from monkeyjump.experiments.comparison import Comparison
    from monkeyjump.experiments.study import Study


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("study", help="the name of a study, a YAML file, `list`, or `all`")
    parser.add_argument("--recipe", default="text14-study", help="what is trained (default: text14-study)")
    parser.add_argument("--data", metavar="DIR", help="folder of data files instead of the hub")
    add_grid(parser, "runs/study-<recipe>")


def run(options: argparse.Namespace) -> int:
    from monkeyjump.experiments.study import grid_of, joined, load_study, names, variants_of
    from monkeyjump.first_imports import uncollected
    from monkeyjump.tables import Table
    from monkeyjump.training.recipe import load_recipe

    if options.study == "list":
        rows = [[name, str(len(variants_of(found))), found.title] for name in names() if (found := load_study(name))]
        Table("Studies", ["name", "variants", "question"], rows).show()
        return 0
    studies = {Path(name).stem: load_study(name) for name in (names() if options.study == "all" else [options.study])}
    # the small ones first: they are there when a person, or a job's time, ends the rest
    studies = dict(sorted(studies.items(), key=lambda item: len(variants_of(item[1]))))
    recipe = load_recipe(options.recipe, options.overrides)
    lrs = checked_rates(options, recipe)
    where(options)  # for its mistakes, before torch is imported
    with uncollected():
        grids = {name: grid_of(s, recipe, range(options.seeds), lrs, options.widen) for name, s in studies.items()}
    output, failed = Path(options.output or f"runs/study-{recipe.name}"), list[str]()
    everything = {"all": joined(grids.values())} if len(grids) > 1 else {}
    for name, grid in (everything | grids).items():
        try:
            if made(options, grid, output) and name in studies:
                _show(name, studies[name], grid, output)
            if options.dry_run:
                break
        except KeyboardInterrupt:
            return stopped(output)
        except ConfigError as error:
            if not everything:
                raise
            failed.append(f"{name}: {error}")
    if failed:
        raise ConfigError([*failed, "All other studies are there."], title="studies that did not end")
    return 0


def _show(name: str, study: Study, grid: Comparison, output: Path) -> None:
    """The table, what became of the claim, and where the files are."""
    from monkeyjump.experiments import ablate

    ablate.study_table(study, grid).show()
    rows = ablate.study_rows(grid)
    if (effects := ablate.choice_effects(study, rows)) is not None:
        effects.show()
    for words, verdict in ablate.verdicts(study, rows):
        print(f"the paper's {words} points: {verdict}")
    for path in [*ablate.save_study(name, study, grid, output), *ablate.draw_figures(study, grid, output)]:
        print(f"saved       {path}")
