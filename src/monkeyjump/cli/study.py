"""`monkeyjump study`: where routing helps, as a map over conflict, number of rules and rank."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from monkeyjump.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("study", choices=["conflict"], help="conflict: tasks made so that their conflict is a dial")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings on top, e.g. train.max_steps=200")
    parser.add_argument("--conflict", default="0,0.5,1", metavar="X,Y,...", help="shares of disputed sentences")
    parser.add_argument("--rules", default="2,8,32", metavar="N,M,...", help="numbers of tasks")
    parser.add_argument("--ranks", default="1,8", metavar="N,M,...", help="ranks of the adapters")
    parser.add_argument(
        "--cues", default="given", metavar="A,B,...", help="what tells the rule: given, wording, domain"
    )
    parser.add_argument("--methods", metavar="A,B,...", help="what is put on the map (default: everything)")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds (default: 5)")
    parser.add_argument("--lrs", metavar="X,Y,...", help="learning rates to search, once for each method and rank")
    parser.add_argument("--widen", action="store_true", help="try further rates until neither end is the best")
    parser.add_argument("--output", default="runs/study-conflict", metavar="DIR", help="where runs and results go")
    parser.add_argument("--jobs", default="auto", metavar="N", help="runs at a time (default: auto)")


def run(options: argparse.Namespace) -> int:
    from itertools import product
    from pathlib import Path

    from monkeyjump.cli.compare import checked_jobs, checked_rates
    from monkeyjump.experiments.conflict_tasks import Setting
    from monkeyjump.first_imports import uncollected
    from monkeyjump.training.recipe import Recipe, overridden

    axes = (_listed(options, "cues", str), *(_listed(options, n, int) for n in ("ranks", "rules")))
    settings = [
        Setting(c, rules, rank, cue) for cue, rank, rules in product(*axes) for c in _listed(options, "conflict", float)
    ]
    with uncollected():
        from monkeyjump.experiments.conflict import RECIPE, chosen, map_table, run_map, save_map

    recipe = overridden(Recipe(), [*RECIPE, *options.overrides])
    lrs, jobs, methods = checked_rates(options, recipe), checked_jobs(options), chosen(options.methods)
    output = Path(options.output)
    try:
        found = run_map(settings, methods, recipe, range(options.seeds), lrs, output, jobs, options.widen)
    except KeyboardInterrupt:
        print(f"\nstopped; finished runs are kept in {output}. The same command goes on where this one stopped.")
        return 130
    map_table(found).show()
    for path in save_map(found, output):
        print(f"saved       {path}")
    return 0


def _listed(options: argparse.Namespace, name: str, kind: Callable[[str], Any]) -> list[Any]:
    text = getattr(options, name)
    try:
        return list(dict.fromkeys(kind(word) for word in text.split(",")))
    except ValueError:
        raise ConfigError(f"--{name} {text} must be numbers with commas between them.") from None
