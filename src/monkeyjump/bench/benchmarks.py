"""The benchmarks of `monkeyjump bench`: from the options of a verb to its record and its tables."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from contextlib import closing
from importlib import import_module
from pathlib import Path

import torch

from monkeyjump.bench.results import BenchRecord, result_tables
from monkeyjump.bench.settings import VERBS, Settings
from monkeyjump.bench.turns import Turns
from monkeyjump.bench.variants import variant_names
from monkeyjump.bench.worker_process import Row
from monkeyjump.errors import ConfigError
from monkeyjump.tables import Table


def settings_from(options: Namespace) -> Settings:
    """The settings that the options give, with what depends on the machine."""
    verb = VERBS[options.kind]
    given = {**verb.defaults, **{name: getattr(options, name) for name in verb.options.split()}}
    on_gpu = (options.device or "cuda").startswith("cuda") and torch.cuda.is_available()
    if (options.device or "").startswith("cuda") and not on_gpu:
        raise ConfigError(f"device={options.device!r}: torch finds no GPU on this machine; use --device cpu.")
    given["device"] = options.device or ("cuda" if on_gpu else "cpu")
    given["dtype"] = options.dtype or ("bfloat16" if on_gpu else "float32")
    if "methods" in options:
        given["methods"] = tuple(variant_names(options.methods, options.alone or options.kind == "init"))
    default = verb.defaults.get("modes", verb.modes) if on_gpu else verb.modes[: verb.on_cpu]
    modes = getattr(options, "modes", None) or default
    # in the order of the verb, so that what a later mode keeps is in no earlier mode's peak
    given["modes"] = tuple(sorted(modes, key=lambda mode: verb.modes.index(mode) if mode in verb.modes else 0))
    return Settings(options.kind, **given)


def measure(settings: Settings, tell: Callable[[Row], None]) -> tuple[BenchRecord, list[Table]]:
    """Run a benchmark; `tell` hears of every row as soon as it is there."""
    module, folder = import_module(f"monkeyjump.bench.{settings.verb}"), output_folder(settings)
    measurements = module.measurements(settings)
    config = {name: getattr(settings, name) for name in VERBS[settings.verb].options.split() if name != "output"}
    record = BenchRecord(folder, _name(settings), config, getattr(module, "SAME", ("mode",)))
    hold = (settings.hold or settings.jobs) if settings.jobs else 1  # in one process, one variant at a time
    turns = Turns(settings.jobs, hold, settings.compile_timeout, folder / "logs", settings.rounds)
    with closing(turns.rows(measurements)) as rows:
        for row in rows:
            record.add(row)
            tell(row)
    shown = record.rows
    if settings.verb == "scaling":
        shown = record.content.metrics["exponents"] = module.exponents(record.rows)
    record.finish()
    title = getattr(module, "TITLE", "Bench {verb}, {shape}, {batch} x {tokens} tokens").format(**vars(settings))
    return record, result_tables(shown, title, module.COLUMNS, getattr(module, "TABLE_FOR_EACH", ("mode",)))


def _name(settings: Settings) -> str:
    return f"bench-{settings.verb}" + (f"-{settings.shape}" if settings.verb != "ops" else "")


def output_folder(settings: Settings) -> Path:
    return Path(settings.output or f"runs/{_name(settings)}")
