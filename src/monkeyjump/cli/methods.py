"""`monkeyjump methods`: every method by name, and what it costs on a model."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", default="qwen2-0.5b", help="a shape (qwen2-0.5b, llama-3-8b, ...) or a model by name"
    )
    parser.add_argument("--targets", metavar="A,B,...", help="projections to adapt (default: the paper's)")
    parser.add_argument("--rank", type=int, default=2, help="default: 2")


def run(options: argparse.Namespace) -> int:
    from monkeyjump.tuner.register import register

    register()
    from peft import get_peft_model

    from monkeyjump import methods
    from monkeyjump.bench.shapes import empty_model
    from monkeyjump.cli.console import console, table
    from monkeyjump.tuner.count import count_parameters

    settings = {"r": options.rank}
    if options.targets:
        settings["target_modules"] = options.targets.split(",")
    rows = []
    for name in methods.names():
        count = count_parameters(get_peft_model(empty_model(options.model), methods.build(name, **settings)))
        rows.append([name, f"{count.trainable:,}", f"{count.router:,}", f"{count.buffers:,}"])
    title = f"Methods on {options.model}, rank {options.rank}"
    console().print(table(title, ["method", "trainable", "router", "buffers"], rows, right=[1, 2, 3]))
    return 0
