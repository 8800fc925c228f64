"""`monkeyjump tasks`: what there is to train on and evaluate with, and what a task shows to a model."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from monkeyjump.errors import ConfigError
from monkeyjump.tables import Table

if TYPE_CHECKING:
    from monkeyjump.tasks import TaskState


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="tasks, groups or YAML files (default: a list of all)")
    parser.add_argument("--show", type=int, metavar="N", help="print the first N prompts of each, with their answers")
    parser.add_argument("--split", default="train", choices=["train", "validation", "test"], help="default: train")
    parser.add_argument("--answer", default="letter", choices=["letter", "text"], help="form of the answers")
    parser.add_argument("--data", metavar="DIR", help="folder of data files instead of the hub")


def run(options: argparse.Namespace) -> int:
    from monkeyjump.tasks import describe, expand, groups

    chosen = expand(options.names) if options.names else None
    if options.show is not None:
        return _show(options, chosen)
    states = describe(options.data, chosen)
    for family in dict.fromkeys(task.family for task in states):
        rows = [[task.name, task.metric, _data(task), task.description] for task in states if task.family == family]
        Table(family, ["name", "metric", "data", "what it asks"], rows, left=4).show()
    for how in dict.fromkeys(task.how_to_get for task in states if task.how_to_get):
        print(how)
    if chosen is None:
        print("groups: " + ", ".join(groups()))
        print("A YAML file of your own works wherever a task name does; --show 3 prints prompts.")
    return 0


def _data(task: TaskState) -> str:
    """Where the data is: the dataset's name for one of the hub, with what is to be done."""
    name = task.source.removeprefix("hub ").split(" (")[0]
    known = {"on the hub": name, "to unpack": f"{name}, to unpack", "missing": f"{name}, missing"}
    return known.get(task.state, task.state)


def _show(options: argparse.Namespace, chosen: list | None) -> int:
    from monkeyjump.tasks.preflight import look_at

    if chosen is None or options.show < 1:
        raise ConfigError("--show N needs N of at least 1 and the name of a task: `monkeyjump tasks sst2 --show 3`.")
    looks = look_at(chosen, options.data, splits=[options.split], most=options.show, streaming=True)
    for look in looks:
        for number, example in enumerate(look.examples, start=1):
            print(f"-- {look.task}, {look.split} row {number} " + "-" * max(0, 60 - len(look.task)))
            for media in example.media:
                print(f"[{media.kind} {media.name}]")
            print(example.prompt(options.answer))
            print(f"=> {example.target(options.answer)}\n")
    return 0
