"""`monkeyjump export`: an adapter for programs that do not know this package."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monkeyjump.errors import ConfigError

if TYPE_CHECKING:
    from monkeyjump.tables import Table
    from monkeyjump.tasks import Task
    from monkeyjump.training.recipe import Recipe

FORMS = ("lora", "merged", "average-lora", "transformers")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("adapter", help="folder of a saved adapter")
    parser.add_argument("out", help="folder to write, which must be new")
    parser.add_argument(
        "--as", dest="form", choices=FORMS, required=True,
        help="lora: plain LoRA, exactly, a folder for each task; merged: a whole model; average-lora: one LoRA with "
        "the mean gates, lossy; transformers: base and adapter, for trust_remote_code",
    )  # fmt: skip
    parser.add_argument("--tasks", metavar="A,B,...", help="lora: tasks to export; average-lora: tasks to average over")
    parser.add_argument("--text", metavar="TEXT", help="average-lora: a text, or a file with a row in each line")
    parser.add_argument("--rows", type=int, default=64, metavar="N", help="rows of a task that are averaged (64)")
    parser.add_argument("--limit", type=int, metavar="N", help="most test rows of a task that are scored")
    parser.add_argument("--data", metavar="DIR", help="folder of data files instead of the hub")
    parser.add_argument("--base", metavar="MODEL", help="base model, where the adapter does not say")
    parser.add_argument("--push", metavar="REPO_ID", help="upload the folder to the Hugging Face hub")


def run(options: argparse.Namespace) -> int:
    from monkeyjump.export import push, save_for_transformers, save_merged
    from monkeyjump.record import writable_folder
    from monkeyjump.training.saving import saved_recipe

    source, out = Path(options.adapter).expanduser(), Path(options.out).expanduser()
    recipe = saved_recipe(source)
    tasks = _averaged_tasks(options, recipe)  # whatever is wrong with data, before the model is loaded
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"OUT={str(out)!r} is there already. Name a new folder.", title="nothing is overwritten")
    writable_folder(out.parent, "OUT")
    model, tokenizer = _loaded(options, source, recipe)
    if options.form == "lora":
        _exact(model, out, options.tasks, source.name)
    elif options.form == "average-lora":
        _average(model, tokenizer, tasks, recipe, options)
    elif options.form == "merged":
        save_merged(model, tokenizer, out)
        print(f"saved       {out}: a whole model, for any program that loads one")
    else:
        save_for_transformers(model, tokenizer, source, out)
        print(f"saved       {out}: for Transformers, with trust_remote_code=True")
    if options.push:
        print(f"uploaded    {push(out, options.push)}")
    return 0


def _loaded(options: argparse.Namespace, source: Path, recipe: Recipe | None) -> tuple[Any, Any]:
    """The adapter on its base, in the dtype that is stored, or for a measurement in that of training; or why not."""
    import torch

    from monkeyjump.evaluation.load import load_adapter
    from monkeyjump.export.gates import routed, task_names, why_not_exact
    from monkeyjump.export.lora import require_lora
    from monkeyjump.training.shared import dtype_of

    measured = options.form == "average-lora"
    dtype: Any = (dtype_of(recipe) if recipe else None) if measured else "auto"
    device = "cuda" if measured and torch.cuda.is_available() else None
    model, tokenizer = load_adapter(source, options.base, dtype, device)
    reason = why_not_exact(model)
    lossy = "--as average-lora folds the mean gates into one LoRA and measures what that loses"
    if options.form == "merged" and routed(model):
        way = lossy if reason else "--as lora is exact"
        raise ConfigError(f"{reason or 'it has gates'}, so that no one weight equals it. {way}.", title="cannot merge")
    if options.form == "lora" and reason:
        raise ConfigError(f"{reason}, so that no LoRA equals it. {lossy}.", title="cannot export exactly")
    if measured and reason is None and not task_names(model):
        raise ConfigError("nothing here depends on tokens or tasks: --as lora is exact.", title="nothing to average")
    if measured:
        require_lora(model)
    return model, tokenizer


def _averaged_tasks(options: argparse.Namespace, recipe: Recipe | None) -> list[Task]:
    from monkeyjump.tasks import expand
    from monkeyjump.tasks.preflight import look_at

    if options.rows < 1:
        raise ConfigError(f"--rows={options.rows} must be at least 1.")
    if options.form != "average-lora":
        unused = [name for name in ("text", "limit") if getattr(options, name)]
        if unused:
            raise ConfigError([f"--{name} is for --as average-lora: drop it." for name in unused])
        return []
    named = options.tasks or (recipe.tasks if recipe else "")
    if not named and not options.text:
        raise ConfigError(
            f"{options.adapter!r} does not say what it was trained on: name --tasks or --text to average over."
        )
    tasks = expand(named, recipe.data.bad_media if recipe else "raise") if named else []
    look_at(tasks, _data(options, recipe), splits=["train", "test"])
    return tasks


def _data(options: argparse.Namespace, recipe: Recipe | None) -> Any:
    return options.data or (recipe.data.folder if recipe else None)


def _exact(model: Any, out: Path, wanted: str | None, source: str) -> None:
    from monkeyjump.export import constant_gates, save_lora, task_names
    from monkeyjump.registry import did_you_mean

    known = task_names(model)
    names = wanted.split(",") if wanted else list(known)
    unknown = [name for name in names if name not in known]
    if unknown and known:
        hints = [f"--tasks: no task {name!r} of this adapter.{did_you_mean(name, list(known))}" for name in unknown]
        raise ConfigError([*hints, f"It has {', '.join(known)}."], title="cannot export")
    files = {_file_name(task) for task in names}
    if len(files) < len(names) or not all(name.strip(".") for name in files):  # names come with the adapter
        raise ConfigError(
            f"the tasks {', '.join(map(repr, names))} do not give a folder each. Name some of them with --tasks.",
            title="cannot export",
        )
    if unknown:
        raise ConfigError("--tasks: tasks decide nothing in this adapter, which is one LoRA: drop it.")
    for task in names:
        about = f"# {source}, task {task}\n\nWhat a task-routed monkeyjump adapter does for task {task}, exactly."
        save_lora(model, constant_gates(model, known[task]), out / _file_name(task), about)
        print(f"saved       {out / _file_name(task)}: a LoRA of PEFT, task {task}")
    if not known:
        save_lora(model, constant_gates(model), out, f"# {source}\n\nA monkeyjump adapter without routing, exactly.")
        print(f"saved       {out}: a LoRA of PEFT")


def _file_name(task: str) -> str:
    return "".join(character if character.isalnum() or character in "-_." else "-" for character in task)


def _average(model: Any, tokenizer: Any, tasks: list[Task], recipe: Recipe | None, options: argparse.Namespace) -> None:
    from monkeyjump.export import save_lora
    from monkeyjump.export.average import averaged, measure_loss

    out = Path(options.out).expanduser()
    gates = averaged(model, tokenizer, tasks, recipe, options.text, options.rows, _data(options, recipe))
    rows = "rows of " + ("a text" if options.text else ", ".join(task.name for task in tasks))
    about = (
        f"# {Path(options.adapter).name}, averaged\n\n**Lossy.** A routed monkeyjump adapter whose gates are replaced "
        f"by their means over {rows}. It does not route: every token gets the same update."
    )
    save_lora(model, gates, out, about)
    if tasks:
        table: Table = measure_loss(model, tokenizer, tasks, recipe, out, _data(options, recipe), options.limit)
        print()
        table.show()
        words = f"\nTest scores x 100:\n\n{table.markdown()}\n"
    else:
        words = "\nWhat the average loses was not measured: no task was named.\n"
        print("not measured: name --tasks to see what the average loses")
    with (out / "README.md").open("a", encoding="utf-8") as file:
        file.write(words)
    print(f"saved       {out}: a LoRA of PEFT, lossy")
