"""`monkeyjump study`: where routing helps, as a map over conflict, number of rules and rank."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from textwrap import fill
from typing import Any

from monkeyjump.cli.grids import add_grid, checked_rates, stopped, where
from monkeyjump.errors import ConfigError

OUTPUT = "runs/study-conflict"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("study", choices=["conflict"], help="conflict: tasks made so that their conflict is a dial")
    parser.add_argument("--conflict", default="0,0.5,1", metavar="X,Y,...", help="shares of disputed sentences")
    parser.add_argument("--rules", default="2,8,32", metavar="N,M,...", help="numbers of tasks")
    parser.add_argument("--ranks", default="1,8", metavar="N,M,...", help="ranks of the adapters")
    parser.add_argument(
        "--cues", default="given", metavar="A,B,...", help="what tells the rule: given, wording, domain"
    )
    parser.add_argument("--methods", metavar="A,B,...", help="what is put on the map (default: everything)")
    add_grid(parser, OUTPUT, dry_run=False)


def run(options: argparse.Namespace) -> int:
    from itertools import product
    from pathlib import Path

    from monkeyjump.experiments.conflict_tasks import Setting
    from monkeyjump.first_imports import uncollected
    from monkeyjump.training.recipe import Recipe, overridden

    axes = (_listed(options, "cues", str), *(_listed(options, n, int) for n in ("ranks", "rules")))
    settings = [
        Setting(c, rules, rank, cue) for cue, rank, rules in product(*axes) for c in _listed(options, "conflict", float)
    ]
    with uncollected():
        from monkeyjump.experiments.conflict import RECIPE, chosen, run_map
        from monkeyjump.experiments.conflict_map import map_table, save_map

    recipe = overridden(Recipe(), [*RECIPE, *options.overrides])
    lrs, methods, output = checked_rates(options, recipe), chosen(options.methods), Path(options.output or OUTPUT)
    try:
        found = run_map(settings, methods, recipe, range(options.seeds), lrs, output, options.widen, **where(options))
    except KeyboardInterrupt:
        return stopped(output)
    map_table(found).show()
    if unlearned := found.unlearned():
        places = ", ".join(map(str, unlearned))
        words = f"Nothing tells the rules apart at {places}: gains say nothing there. Raise train.max_steps, or --lrs."
        print(fill(words, 80))
    for path in save_map(found, output):
        print(f"saved       {path}")
    return 0


def _listed(options: argparse.Namespace, name: str, kind: Callable[[str], Any]) -> list[Any]:
    text = getattr(options, name)
    try:
        return list(dict.fromkeys(kind(word) for word in text.split(",")))
    except ValueError:
        raise ConfigError(f"--{name} {text} must be numbers with commas between them.") from None
