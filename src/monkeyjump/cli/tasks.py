"""`monkeyjump tasks`: what there is to train on and evaluate with, and what a task shows to a model."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="tasks, groups or YAML files (default: a list of all)")
    parser.add_argument("--show", type=int, metavar="N", help="print the first N prompts of each, with their answers")
    parser.add_argument("--split", default="train", choices=["train", "validation", "test"], help="default: train")
    parser.add_argument("--answer", default="letter", choices=["letter", "text"], help="form of the answers")
    parser.add_argument("--data", metavar="DIR", help="folder of data files instead of the hub")


def run(options: argparse.Namespace) -> int:
    from monkeyjump.tables import Table
    from monkeyjump.tasks import describe, expand, groups

    chosen = expand(options.names) if options.names else None
    if options.show is not None:
        return _show(options, chosen)
    rows = [
        [task.name, task.family, task.metric, task.state, task.description] for task in describe(options.data, chosen)
    ]
    Table("Tasks", ["name", "family", "metric", "data", "what it asks"], rows, left=5).show()
    if chosen is None:
        print("groups: " + ", ".join(groups()))
        print("A YAML file of your own works wherever a task name does; --show 3 prints prompts.")
    return 0


def _show(options: argparse.Namespace, chosen: list | None) -> int:
    from monkeyjump.errors import ConfigError
    from monkeyjump.tasks.preflight import look_at

    if chosen is None or options.show < 1:
        raise ConfigError("--show N needs N of at least 1 and the name of a task: `monkeyjump tasks sst2 --show 3`.")
    looks = look_at(chosen, options.data, splits=[options.split], most=options.show, streaming=True)
    for look in looks:
        for number, example in enumerate(look.examples, start=1):
            print(f"-- {look.task}, {look.split} row {number} " + "-" * max(0, 60 - len(look.task)))
            print(example.prompt(options.answer))
            print(f"=> {example.target(options.answer)}\n")
    return 0
