"""`monkeyjump tasks`: what there is to train on and evaluate with."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", metavar="DIR", help="folder of JSON lines to look for data in")


def run(options: argparse.Namespace) -> int:
    from monkeyjump.tables import Table
    from monkeyjump.tasks import describe, groups

    rows = [[task.name, task.family, task.metric, task.state, task.description] for task in describe(options.data)]
    Table("Tasks", ["name", "family", "metric", "data", "what it asks"], rows, left=5).show()
    print("groups: " + ", ".join(groups()))
    print("A YAML file of your own works wherever a task name does.")
    return 0
