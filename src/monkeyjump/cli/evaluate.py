"""`monkeyjump evaluate`: an adapter's scores per task, with the base model beside them."""

from __future__ import annotations

import argparse
from pathlib import Path

from monkeyjump.errors import ConfigError

ENDINGS = (".json", ".csv", ".html", ".predictions.jsonl")  # of the files of a report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("adapter", help="folder of a saved adapter (or a model's name, with --base-only)")
    parser.add_argument("--tasks", metavar="A,B,...", help="tasks, groups or YAML files (default: those of training)")
    parser.add_argument("--mode", choices=["letter", "text", "generate"], help="how to score (default: as in training)")
    parser.add_argument("--answer", choices=["letter", "text"], help="form of the answers (default: as in training)")
    parser.add_argument("--split", default="test", choices=["test", "validation", "train"], help="default: test")
    parser.add_argument("--limit", type=int, metavar="N", help="most rows of a task")
    parser.add_argument("--data", metavar="DIR", help="folder of data files instead of the hub")
    parser.add_argument("--base", metavar="MODEL", help="base model, where the adapter does not say")
    parser.add_argument("--base-only", action="store_true", help="score a plain model by its name")
    parser.add_argument("--batch-tokens", type=int, metavar="N", help="padded tokens of one forward")
    parser.add_argument(
        "--harness", action="store_true", help="--tasks are those of lm-evaluation-harness, or YAML files in its format"
    )
    parser.add_argument("--output", metavar="STEM", help="write STEM.json, .csv, .html (default: beside the adapter)")


def run(options: argparse.Namespace) -> int:
    import torch

    from monkeyjump.evaluation.run import EvaluationSettings, evaluate, load_adapter
    from monkeyjump.models import load_model
    from monkeyjump.record import output_path
    from monkeyjump.tasks import expand
    from monkeyjump.tasks.preflight import look_at
    from monkeyjump.training.saving import saved_recipe
    from monkeyjump.training.shared import dtype_of

    recipe = None if options.base_only else saved_recipe(Path(options.adapter).expanduser())
    answer = options.answer or (recipe.data.answer if recipe else None)
    settings = EvaluationSettings(
        mode=options.mode or (recipe.mode if recipe else (answer or "letter")),  # type: ignore[arg-type]
        answer_format=answer,
        split=options.split,
        limit=options.limit,
        data=options.data or (recipe.data.folder if recipe else None),
        batch_tokens=options.batch_tokens,
        **({name: getattr(recipe.data, name) for name in ("max_length", "frames", "bad_media")} if recipe else {}),
    )
    if not options.harness:  # whatever is wrong with data or output, before the model is loaded
        tasks = expand(options.tasks or (recipe.tasks if recipe else "builtin"), settings.bad_media)
        look_at(tasks, settings.data, splits=[settings.split])
        beside = Path() if options.base_only else Path(options.adapter).expanduser().parent
        stem = output_path(options.output, beside / f"evaluation-{settings.split}-{settings.mode}", *ENDINGS)
    device = "cuda" if torch.cuda.is_available() else None
    if options.base_only:
        model, tokenizer = load_model(options.adapter, device=device)
    else:
        dtype = None if recipe is None else dtype_of(recipe)  # as it was trained
        model, tokenizer = load_adapter(options.adapter, base=options.base, dtype=dtype, device=device)
    if options.harness:
        return _harness(model, tokenizer, options)
    report = evaluate(model, tokenizer, tasks, settings)
    saved = report.save(stem)
    report.show()
    for path in saved.values():
        print(f"saved       {path}")
    return 0


def _harness(model: object, tokenizer: object, options: argparse.Namespace) -> int:
    from monkeyjump.evaluation.harness import run_harness

    if not options.tasks:
        raise ConfigError("--harness needs --tasks with names of lm-evaluation-harness tasks.")
    results = run_harness(model, tokenizer, options.tasks.split(","), limit=options.limit)
    for task, scores in results["results"].items():
        for name, value in scores.items():
            if isinstance(value, float):
                print(f"{task:24} {name:24} {value:.4f}")
    return 0
