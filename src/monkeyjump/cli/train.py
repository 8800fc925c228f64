"""`monkeyjump train`: from a recipe to an adapter, a table and a picture."""

from __future__ import annotations

import argparse
import shlex

from monkeyjump.errors import ConfigError
from monkeyjump.first_imports import uncollected

# for --help, without pydantic
RECIPES = "quickstart, vlm-tiny, glue, commonsense, text14, text14-study, image, video, mmt47"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help=f"a recipe by name ({RECIPES}), or a YAML file")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="settings on top, e.g. train.lr=1e-3 adapter.r=4"
    )
    parser.add_argument("--data", metavar="DIR", help="folder of data files instead of the hub (data.folder)")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier run in the same folder")
    parser.add_argument("--report-to", metavar="NAME", action="append", help="also log to, e.g., tensorboard or wandb")


def run(options: argparse.Namespace) -> int:
    from monkeyjump.training.recipe import load_recipe

    recipe = load_recipe(options.recipe, options.overrides)
    with uncollected():  # only now: they bring torch, which no mistake in the recipe has to wait for
        from monkeyjump.analysis.rows import measure_usage
        from monkeyjump.record import RunRecord, write_record
        from monkeyjump.training.run import run as train
        from monkeyjump.training.saving import show_in_card

    recipe.train.report_to += options.report_to or []
    record = RunRecord(kind="train", name=recipe.name, config=recipe.to_dict(), seed=recipe.seed)
    result = train(recipe, resume=options.resume, overwrite=options.overwrite)
    if not result.is_main:
        return 130 if result.interrupted else 0
    loggers = [word for name in options.report_to or [] for word in ("--report-to", name)]
    command = ["monkeyjump", "train", options.recipe, *options.overrides, *loggers]
    if result.interrupted or result.report is None:
        print(f"\nstopped at step {result.measurements['steps']}; the checkpoint is in {recipe.folder / 'checkpoints'}")
        print(f"go on with: {shlex.join([*command, '--resume'])}")
        return 130
    folder = recipe.folder
    record.metrics = {
        "validation": result.best_validation,
        "evaluation": result.report.to_dict(),
        **result.measurements,
    }
    record.extra["origin"] = result.origin
    usage = measure_usage(result.model, result.tokenizer, result.tasks, recipe, rows=16)
    picture = ""
    if usage is not None:
        record.metrics["usage"] = usage.to_dict()
        try:
            from monkeyjump.analysis.plots import plot_usage

            plot_usage(usage, folder / "expert-usage.png", title=f"Where tokens jump ({recipe.name})")
            show_in_card(folder / "expert-usage.png", folder / "adapter")
            picture = str(folder / "expert-usage.png")
        except ConfigError as error:  # all the rest is there
            picture = f"none: {error}"
    write_record(record, folder / "record.json")
    result.report.show()
    print(f"\n{recipe.method}: {result.parameters}")
    print(f"adapter     {folder / 'adapter'}")
    print(f"report      {folder / 'evaluation.html'} (also .json, .csv)")
    if picture:
        print(f"picture     {picture}")
    print(f"record      {folder / 'record.json'}, log {folder / 'log.jsonl'}")
    same = [options.recipe, *(word for word in options.overrides if not word.startswith(("output=", "method=")))]
    print("\nTry next:")
    for words in (
        *([["inspect", str(folder / "adapter")]] if picture else []),
        ["evaluate", str(folder / "adapter"), "--mode", "generate"],
        ["train", *same, "method=lora", f"output={folder}-lora"],
        ["compare", *same, "--methods", "lora,mjlora", "--seeds", "2"],
    ):
        print(f"  {shlex.join(['monkeyjump', *words])}")
    return 0
