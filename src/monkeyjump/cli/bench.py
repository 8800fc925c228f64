"""`monkeyjump bench`: speed and memory of the methods, measured on models of real shapes with random weights."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable
from dataclasses import Field, fields
from typing import Any

from monkeyjump.bench.settings import VERBS, Settings, Verb

SETTINGS = {setting.name: setting for setting in fields(Settings)}
# by the type of a setting: how its option is read, and how the help names it
READERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "int": (int, "N"),
    "float": (float, "X"),
    "str": (str, "NAME"),
    "tuple[str, ...]": (lambda text: tuple(text.split(",")), "A,B,..."),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", metavar="WHAT", required=True)
    for kind, verb in VERBS.items():
        sub = kinds.add_parser(kind, help=verb.summary, description=f"Measure {verb.summary}.")
        for name in verb.options.split():
            _add_option(sub, verb, SETTINGS[name])


def _add_option(parser: argparse.ArgumentParser, verb: Verb, setting: Field) -> None:
    default, words = verb.defaults.get(setting.name, setting.default), setting.metadata["help"]
    flag = f"--{setting.name.replace('_', '-')}"
    if isinstance(default, bool):
        parser.add_argument(flag, action="store_true", help=words)
        return
    if setting.name == "modes":
        on_gpu, on_cpu = default or verb.modes, verb.modes[: verb.on_cpu]
        words, default = f"{', '.join(verb.modes)} (default: {','.join(on_gpu)}; on cpu {','.join(on_cpu)})", None
    elif "default:" in words:  # it depends on the machine
        default = None
    elif default is not None:
        words += f" (default: {','.join(default) if isinstance(default, tuple) else default})"
    read, metavar = READERS[str(setting.type).removesuffix(" | None")]
    parser.add_argument(flag, type=read, default=default, metavar=metavar, help=words)


def run(options: argparse.Namespace) -> int:
    from monkeyjump.bench import results

    settings = results.settings_from(options)
    try:
        record, tables = results.measure(settings, _tell)
    except KeyboardInterrupt:
        print(f"\nstopped; what was measured is in {settings.folder}.")
        return 130
    for table in tables:
        table.show()
    for line in results.failures(record.rows):
        print(textwrap.fill(line, width=80))
    print(f"saved       {record.path}")
    return 0 if record.content.status == "finished" else 1


def _tell(row: dict[str, Any]) -> None:
    """One line as soon as a row is there: a run may take long, or be cut short."""
    from monkeyjump.bench.results import milliseconds

    where = f"{row['axis']}={row['value']}" if "axis" in row else row.get("loss", "")
    where = f"turn {row['turns']}" if "turns" in row else where
    result = f"{milliseconds(row['median_ms'])} ms" if row["status"] == "ok" else f"failed: {row['error'][:25]}"
    print(f"{row['variant']:17}{row['mode']:15}{where:14}{result}", flush=True)
