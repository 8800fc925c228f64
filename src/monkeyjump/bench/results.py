"""A benchmark from the options of its verb to its record, the ratios to the baselines, and its tables."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import closing
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import torch

from monkeyjump.bench.settings import VERBS, Settings
from monkeyjump.bench.turns import Row, Turns
from monkeyjump.bench.variants import FLOOR, PEFT_LORA, variant_names
from monkeyjump.errors import ConfigError
from monkeyjump.record import RunRecord, device_in_words, write_record
from monkeyjump.tables import Table

REFERENCES = {FLOOR: "floor", PEFT_LORA: "peft"}
MEASURES = {"time": "median_ms", "memory": "peak_bytes", "extra_memory": "extra_bytes"}
Columns = Sequence[tuple[str, str, Callable[[Any], str]]]  # a heading, the key of its values, how they are written


def settings_from(options: Namespace) -> Settings:
    """The settings that the options give, with what depends on the machine."""
    verb = VERBS[options.kind]
    given = {**verb.defaults, **{name: getattr(options, name) for name in verb.options.split()}}
    on_gpu = (options.device or "cuda").startswith("cuda") and torch.cuda.is_available()
    if (options.device or "").startswith("cuda") and not on_gpu:
        raise ConfigError(f"device={options.device!r}: torch finds no GPU on this machine; use --device cpu.")
    given["device"] = options.device or ("cuda" if on_gpu else "cpu")
    given["dtype"] = options.dtype or ("bfloat16" if on_gpu else "float32")
    if options.kind == "train":
        from monkeyjump.bench.train import variants

        given["methods"] = tuple(variants(options.methods, options.alone))
    elif "methods" in options:
        given["methods"] = tuple(variant_names(options.methods, options.alone or options.kind == "init"))
    default = verb.defaults.get("modes", verb.modes) if on_gpu else verb.modes[: verb.on_cpu]
    modes = getattr(options, "modes", None) or default
    # in the order of the verb, so that what a later mode keeps is in no earlier mode's peak
    given["modes"] = tuple(sorted(modes, key=lambda mode: verb.modes.index(mode) if mode in verb.modes else 0))
    return Settings(options.kind, **given)


def measure(settings: Settings, tell: Callable[[Row], None]) -> tuple[BenchRecord, list[Table]]:
    """Run a benchmark; `tell` hears of every row as soon as it is there."""
    module, folder = import_module(f"monkeyjump.bench.{settings.verb}"), settings.folder
    measurements = module.measurements(settings)
    config = {name: getattr(settings, name) for name in VERBS[settings.verb].options.split() if name != "output"}
    record = BenchRecord(folder, settings.name, config, getattr(module, "SAME", ("mode",)))
    hold = (settings.hold or settings.jobs) if settings.jobs else 1  # in one process, one variant at a time
    turns = Turns(settings.jobs, hold, settings.compile_timeout, folder / "logs", settings.rounds)
    with closing(turns.rows(measurements)) as rows:
        for row in rows:
            record.add(row)
            tell(row)
    shown = record.rows
    if settings.verb == "scaling":
        shown = record.content.metrics["exponents"] = module.exponents(record.rows)
    record.content.status = "finished" if any(row["status"] == "ok" for row in record.rows) else "failed"
    record.save()
    title = getattr(module, "TITLE", "Bench {verb}, {shape}, {batch} x {tokens} tokens").format(**vars(settings))
    return record, result_tables(shown, title, module.COLUMNS, getattr(module, "TABLE_FOR_EACH", ("mode",)))


class BenchRecord:
    """Rows are written as they come: a run that is killed keeps what it measured, and says `cancelled`."""

    def __init__(self, folder: Path, name: str, config: dict[str, Any], same: Sequence[str] = ("mode",)) -> None:
        self.path = folder / "record.json"
        self.same = tuple(same)  # the keys in which a row and its reference agree
        self.rows: list[Row] = []
        device, seed = device_in_words(config["device"]), config.get("seed")
        self.content = RunRecord("bench", name, config, seed, {"rows": self.rows}, "cancelled", device=device)
        self.save()

    def add(self, row: Row) -> None:
        """Put a row in, in place of the row that the turn before gave."""
        keys = ("variant", *self.same)
        alike = (i for i, known in enumerate(self.rows) if all(known.get(key) == row.get(key) for key in keys))
        place = next(alike, len(self.rows))
        self.rows[place : place + 1] = [row]
        # `time_vs_floor`, `memory_vs_peft`, ... of every row whose reference, alike in `same`, was measured
        measured = [row for row in self.rows if row["status"] == "ok"]
        found = {tuple(row.get(key) for key in keys): row for row in measured}
        for one, (variant, short), (name, key) in product(measured, REFERENCES.items(), MEASURES.items()):
            reference = found.get((variant, *(one.get(same) for same in self.same)), {})
            if reference.get(key) and one.get(key) is not None:
                one[f"{name}_vs_{short}"] = one[key] / reference[key]
        self.save()

    def save(self) -> None:
        self.content.finished = None  # so that it is the time of this writing
        write_record(self.content, self.path)


def result_tables(rows: Sequence[Row], title: str, columns: Columns, group: Sequence[str]) -> list[Table]:
    """One table for every value of `group`; a row that failed says so in its first cell without a value."""
    tables: dict[str, list[list[str]]] = {}
    for row in rows:
        values = [(row.get(key), written) for _, key, written in columns]
        cells = ["" if value is None else written(value) for value, written in values]
        if row["status"] != "ok":
            cells[cells.index("")] = "failed"
        tables.setdefault(", ".join([title, *(str(row[key]) for key in group)]), []).append(cells)
    left = sum(written is str for _, _, written in columns)
    return [Table(name, [heading for heading, _, _ in columns], cells, left) for name, cells in tables.items()]


def failures(rows: Sequence[Row]) -> list[str]:
    """One line for each variant that failed; modes with the same error share it."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["status"] != "ok":
            found.setdefault((row["variant"], row["error"]), []).append(row["mode"])
    return [f"{variant} ({', '.join(modes)}): {error[:300]}" for (variant, error), modes in found.items()]


def milliseconds(value: float) -> str:
    """Three significant digits or more, never in powers of ten."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"


def bytes_in_words(value: float) -> str:
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 / 10 else f"{value / 2**20:.2f} MiB"


ratio = "{:.3f}".format
