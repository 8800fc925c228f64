"""`monkeyjump forecast`: before training, whether the tasks of a recipe oppose each other."""

from __future__ import annotations

import argparse
from pathlib import Path
from textwrap import fill

from monkeyjump.errors import ConfigError

SCALE = "(1: one task; 0: unrelated; below 0: opposed)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="a recipe by name, or a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings on top, e.g. adapter.r=8")
    parser.add_argument("--data", metavar="DIR", help="folder of data files instead of the hub")
    parser.add_argument("--rows", type=int, default=64, help="training rows of each task (default: 64)")
    parser.add_argument("--draws", type=int, default=1, help="times that other rows are read (default: 1)")
    parser.add_argument("--output", metavar="FILE", help="the record (default: runs/forecast-<recipe>.json)")


def run(options: argparse.Namespace) -> int:
    from monkeyjump.first_imports import uncollected
    from monkeyjump.training.recipe import load_recipe

    if options.rows < 4 or options.draws < 1:
        raise ConfigError(
            f"--rows {options.rows} must be 4 or more, since each task is read in two halves; --draws {options.draws} "
            "must be 1 or more."
        )
    recipe = load_recipe(options.recipe, options.overrides)
    with uncollected():
        from monkeyjump.experiments.forecast import forecast
        from monkeyjump.record import RunRecord, output_path, write_record

    asked = options.output and options.output.removesuffix(".json")
    path = f"{output_path(asked, Path(f'runs/forecast-{recipe.name}'), '.json')}.json"
    record = RunRecord(kind="forecast", name=recipe.name, config=recipe.to_dict(), seed=recipe.seed)
    found = forecast(recipe, options.rows, options.draws)
    record.metrics = {"rows": options.rows, **found.to_dict()}
    write_record(record, path)
    found.table().show()
    which, told = "the tasks", "not known"
    if (known := len(found.known)) > 1:
        agreement, error = found.agreement_of_known
        which = which if known == len(found.tasks) else f"{known} of {len(found.tasks)} tasks"
        told = f"{agreement:+.2f}{'' if error is None else f' ±{error:.2f}'}"
    print(f"{f'agreement of {which}':24} {told}   {SCALE}")
    print(
        f"bits of the first centres {found.bits:.3f}, at most {found.most_bits:.3f}   (0: they do not tell tasks apart)"
    )
    print(f"bits where prompts decide {found.prompt_bits:.3f}   (method=mjlora_prompt)")
    print(fill(found.advice, 80))
    print(f"saved       {path}")
    return 0
