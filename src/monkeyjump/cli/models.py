"""`monkeyjump models`: what can be used by name, and whether it is on this disk."""

from __future__ import annotations

import argparse

from monkeyjump.tables import Table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--fetch", action="store_true", help="fetch the bundled default model now")


def run(options: argparse.Namespace) -> int:
    from monkeyjump.models import DEFAULT_MODEL, list_models, resolve

    if options.fetch:
        resolve(DEFAULT_MODEL)
    rows = [
        [model.name, model.kind, model.state, "" if model.size is None else f"{model.size / 2**20:,.0f} MiB"]
        for model in list_models()
    ]
    Table("Models", ["name", "kind", "state", "size"], rows, left=3).show()
    print("Any Hugging Face id, local folder or GGUF file works too.")
    return 0
