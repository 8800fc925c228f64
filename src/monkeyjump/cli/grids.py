"""What the verbs that make many runs have in common: seeds, rates, where they are made, and how they are stopped."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monkeyjump.errors import ConfigError

if TYPE_CHECKING:
    from monkeyjump.experiments.comparison import Comparison
    from monkeyjump.training.recipe import Recipe


def add_grid(parser: argparse.ArgumentParser, output: str, dry_run: bool = True) -> None:
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings on top, e.g. train.max_steps=200")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds (default: 5)")
    parser.add_argument("--lrs", metavar="X,Y,...", help="learning rates to search on validation (default: one)")
    parser.add_argument("--widen", action="store_true", help="try further rates until neither end is the best")
    parser.add_argument("--output", metavar="DIR", help=f"where runs and results go (default: {output})")
    add_where(parser)
    if dry_run:
        parser.add_argument("--dry-run", action="store_true", help="list the runs that would be made first, and stop")


def add_where(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--jobs", default="auto", metavar="N", help="runs at a time, or on a GPU of Ray (default: auto)"
    )
    parser.add_argument(
        "--on", default="local", metavar="WHERE", help="local (default), ray, ray:ADDRESS, or submitit for Slurm"
    )


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


def where(options: argparse.Namespace) -> dict[str, Any]:
    """The options of `run_grid`."""
    if options.jobs != "auto" and not (options.jobs.isdecimal() and int(options.jobs)):
        raise ConfigError(f"--jobs {options.jobs} must be a number of runs from 1, or auto.")
    if options.on.partition(":")[0] not in ("local", "ray", "submitit"):
        raise ConfigError(f"--on {options.on} is not known: use local, ray, ray:ADDRESS or submitit.")
    return {"jobs": options.jobs if options.jobs == "auto" else int(options.jobs), "on": options.on}


def made(options: argparse.Namespace, grid: Comparison, output: Path) -> bool:
    """Make the runs, or only list them; whether they are there now."""
    from monkeyjump.experiments.compare import run_grid
    from monkeyjump.experiments.jobs import Schedule

    if options.dry_run:
        ready = Schedule(grid, output).ready(set())
        for wanted in ready:
            print(f"{wanted}{'' if wanted.test else ' (validation only)'}")
        print(f"{len(ready)} runs can be made now, {grid.total - grid.done - len(ready)} more need what they find.")
        return False
    run_grid(grid, output, **where(options))
    return True


def stopped(output: Path) -> int:
    print(f"\nstopped; finished runs are kept in {output}. The same command goes on where this one stopped.")
    return 130
