"""How long the initialisation of centres takes, and on what: reading the data, or clustering it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from monkeyjump.bench import runs
from monkeyjump.bench.settings import Settings
from monkeyjump.bench.turns import Measurement, Row
from monkeyjump.bench.variants import build, plain_model, random_ids
from monkeyjump.tuner.centers import calibrate

PHASES = ("forwards", "reading", "kmeans", "total")
TABLE_FOR_EACH = ()
COLUMNS = [
    ("variant", "variant", str),
    *((phase, f"{phase}_seconds", "{:.2f} s".format) for phase in PHASES),
    ("total/forwards", "total_over_forwards", "{:.2f}".format),
]


def measurements(settings: Settings) -> list[Measurement]:
    return [Measurement(InitRun, name, settings) for name in settings.methods]


class InitRun(runs.ModesRun):
    """`initialize_centers` as it is, with a clock at its two phases, and the bare forwards on the same batches."""

    def __init__(self, variant: str, settings: Settings) -> None:
        super().__init__(variant, settings)
        base = plain_model(settings).eval()
        count = -(-settings.keep // (settings.batch * settings.tokens))
        self.batches = [{"input_ids": random_ids(base, settings, self.generator)} for _ in range(count)]

        @torch.no_grad()
        def forwards() -> None:
            for batch in self.batches:
                base(**batch, logits_to_keep=1, use_cache=False)

        # before any adapter is there; the first round warms up
        self.forwards = 1e-3 * median(runs.times(forwards, settings.repeats + 1, self.device)[1:])
        clustered = {**settings.overrides, "center_init": "kmeans"}
        self.model = build(variant, replace(settings, overrides=clustered), base).model

    def measure(self, mode: str) -> Row:
        runs.reset_peak(self.device)
        found = [self._initialize() for _ in range(self.settings.repeats + 1)][1:]
        seconds = {f"{phase}_seconds": median(run[phase] for run in found) for phase in PHASES[1:]}
        return {
            "median_ms": 1e3 * seconds["total_seconds"],
            "forwards_seconds": self.forwards,
            **seconds,
            "runs": found,
            "total_over_forwards": seconds["total_seconds"] / self.forwards,
            "tokens_read": sum(batch["input_ids"].numel() for batch in self.batches),
            "tokens_kept": self.report.tokens_kept,
            "blocks": len(self.report.shares),
            "peak_bytes": runs.peak_bytes(self.device),
        }

    def _initialize(self) -> dict[str, float]:
        """The seconds of every phase of one initialisation."""
        spent = dict.fromkeys(PHASES[1:], 0.0)

        def timed(phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                result: list[Any] = []
                [found] = runs.times(lambda: result.append(function(*args, **kwargs)), 1, self.device)
                spent[phase] += 1e-3 * found
                return result[0]

            return call

        with (
            patch.object(calibrate, "collect", timed("reading", calibrate.collect)),
            patch.object(calibrate, "spherical_kmeans", timed("kmeans", calibrate.spherical_kmeans)),
        ):
            settings, initialize = self.settings, timed("total", calibrate.initialize_centers)
            self.report = initialize(self.model, self.batches, settings.keep, settings.seed, progress=False)
        return spent
