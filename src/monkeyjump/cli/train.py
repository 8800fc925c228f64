"""`monkeyjump train`: from a recipe to an adapter, a table and a picture."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="a recipe by name (quickstart, glue, commonsense, text14), or a YAML file")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="settings on top, e.g. train.lr=1e-3 adapter.r=4"
    )
    parser.add_argument("--data", metavar="DIR", help="folder of JSON lines instead of the hub (data.folder)")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--overwrite", action="store_true", help="replace an unfinished run in the same folder")
    parser.add_argument("--report-to", metavar="NAME", action="append", help="also log to, e.g., tensorboard or wandb")


def run(options: argparse.Namespace) -> int:
    from monkeyjump.analysis.plots import plot_usage
    from monkeyjump.experiments.measure import measure_usage
    from monkeyjump.record import RunRecord, write_record
    from monkeyjump.training.recipe import load_recipe
    from monkeyjump.training.run import run as train

    overrides = [*options.overrides, *([f"data.folder={options.data}"] if options.data else [])]
    recipe = load_recipe(options.recipe, overrides)
    recipe.train.report_to += options.report_to or []
    record = RunRecord(kind="train", name=recipe.name, config=recipe.to_dict(), seed=recipe.seed)
    result = train(recipe, resume=options.resume, overwrite=options.overwrite)
    if not result.is_main:
        return 130 if result.interrupted else 0
    if result.interrupted or result.report is None:
        steps = result.measurements["steps"]
        words = " ".join([options.recipe, *options.overrides, *(["--data", options.data] if options.data else [])])
        print(f"\nstopped at step {steps}; the checkpoint is in {recipe.folder / 'checkpoints'}")
        print(f"go on with: monkeyjump train {words} --resume")
        return 130
    folder = recipe.folder
    metrics = {"validation": result.best_validation, "evaluation": result.report.to_dict(), **result.measurements}
    usage = measure_usage(result.model, result.tokenizer, result.tasks, recipe, rows=16)
    if usage is not None:
        plot_usage(usage, folder / "expert-usage.png", title=f"Where tokens jump ({recipe.name})")
        metrics["usage"] = usage.to_dict()
    result.report.save(folder / "evaluation")
    record.metrics = metrics
    write_record(record, folder / "record.json")
    result.report.table().show()
    print(f"{recipe.method}: {result.parameters}")
    print(f"adapter     {folder / 'adapter'}")
    print(f"report      {folder / 'evaluation.html'} (also .json, .csv)")
    if usage is not None:
        print(f"picture     {folder / 'expert-usage.png'}")
    print(f"record      {folder / 'record.json'}, log {folder / 'log.jsonl'}")
    print("\nTry next:")
    print(f"  monkeyjump evaluate {folder / 'adapter'} --mode generate")
    print(f"  monkeyjump train {options.recipe} method=lora output={folder}-lora")
    print(f"  monkeyjump compare {options.recipe} --methods lora,mjlora --seeds 2")
    return 0
