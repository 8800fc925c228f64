"""`monkeyjump methods`: every method and what it costs on a model, counted without loading any weights."""

from __future__ import annotations

import argparse
import textwrap
from typing import Any

from monkeyjump.errors import ConfigError
from monkeyjump.tables import Table

DEFAULT = "smollm2-135m"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default=DEFAULT,
        help="a shape (qwen2-0.5b, llama-3-8b, smollm2-135m, tiny) or a model as in a recipe (default: %(default)s)",
    )
    parser.add_argument(
        "--preset",
        choices=("mj_paper", "published"),
        default="mj_paper",
        help="settings all methods share in the paper's comparison (default), or those each was published with",
    )
    parser.add_argument("--targets", help="adapt these modules instead, e.g. q_proj,k_proj,v_proj,o_proj")
    parser.add_argument("--about", metavar="METHOD", help="say what a method is, what is matched and what is not")


def run(options: argparse.Namespace) -> int:
    import torch
    from peft import get_peft_model

    import monkeyjump as mj
    from monkeyjump.bench.variants import empty_model

    if options.about:
        if options.about not in mj.methods.names():
            mj.methods.build(options.about)  # says which names there are
        print(mj.methods.describe(options.about))
        return 0
    base = empty_model(options.model)
    targets: dict[str, Any] = {"target_modules": options.targets.split(",")} if options.targets else {}
    rows: list[list[str]] = []
    problems: dict[str, list[str]] = {}  # message -> the methods it is about
    for name in mj.methods.names():
        try:
            with torch.device("meta"):
                model = get_peft_model(base, mj.methods.build(name, options.preset, **targets))
                count = mj.count_parameters(model)
                model.unload()
            rows.append([name, f"{count.trainable:,}", f"{count.router:,}", f"{count.buffers:,}"])
        except ConfigError as error:
            rows.append([name, "-", "-", "-"])
            problems.setdefault(str(error), []).append(name)
    title = f"{options.model}, preset {options.preset}"
    Table(title, ["method", "trainable", "of them router", "buffers"], rows).show()
    for problem, about in problems.items():
        print(textwrap.fill(f"{', '.join(about)}: {problem}", width=80))
    print("Buffers (centres, statistics, frozen factors) are kept and saved, not trained.")
    return 0
