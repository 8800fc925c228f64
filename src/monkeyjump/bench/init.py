"""How long the initialisation of centres takes, and on what: reading the data, or clustering it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch

from monkeyjump.bench import timing
from monkeyjump.bench.jobs import Row
from monkeyjump.bench.report import Table
from monkeyjump.bench.variants import Workload, build, plain_model
from monkeyjump.errors import ConfigError
from monkeyjump.tuner.centers import calibrate
from monkeyjump.tuner.centers.sample import OVERSAMPLE

PHASES = ("forwards", "reading", "kmeans", "total")


@dataclass(frozen=True)
class InitSettings:
    workload: Workload = field(default_factory=Workload)
    modes: tuple[str, ...] = ("init",)
    keep: int = 50_000  # tokens that are clustered; four times as many are read
    repeats: int = 3

    def __post_init__(self) -> None:
        if self.keep < 1 or self.repeats < 1:
            raise ConfigError(f"keep={self.keep} and repeats={self.repeats} must be at least 1.", title="invalid bench")


def prepare(variant: str, plain: dict[str, Any]) -> Callable[[], Iterator[Row]]:
    settings = InitSettings(**{**plain, "workload": Workload.parse(plain["workload"]), "modes": tuple(plain["modes"])})
    return InitRun(variant, settings).rows


class InitRun:
    """`initialize_centers` as it is, with a clock at its two phases; and the bare forwards on the same batches."""

    def __init__(self, variant: str, settings: InitSettings) -> None:
        workload = settings.workload
        self.variant, self.settings, self.device = variant, settings, workload.device
        base = plain_model(workload)
        generator = torch.Generator(device=self.device).manual_seed(workload.seed)
        shape = (workload.batch, workload.tokens)
        count = -(-OVERSAMPLE * settings.keep // (workload.batch * workload.tokens))
        self.batches = [
            {"input_ids": torch.randint(base.config.vocab_size, shape, generator=generator, device=self.device)}
            for _ in range(count)
        ]
        self.base = base
        self.bare = [self._forwards() for _ in range(settings.repeats + 1)][1:]  # before any adapter is there
        clustered = {**workload.overrides, "center_init": "kmeans"}
        self.model = build(variant, replace(workload, overrides=clustered), base).model

    @torch.no_grad()
    def _forwards(self) -> float:
        self.base.eval()
        with _clock(self.device) as seconds:
            for batch in self.batches:
                self.base(**batch, logits_to_keep=1, use_cache=False)
        return seconds[0]

    def rows(self) -> Iterator[Row]:
        started = time.time()
        runs = [self._initialize() for _ in range(self.settings.repeats + 1)][1:]
        seconds = {phase: median(run[phase] for run in runs) for phase in PHASES if phase != "forwards"}
        seconds["forwards"] = median(self.bare)
        workload = self.settings.workload
        yield {
            "variant": self.variant,
            "mode": "init",
            "status": "ok",
            "started": started,
            "median_ms": 1e3 * seconds["total"],
            "seconds": seconds,
            "runs": runs,
            "total_over_forwards": seconds["total"] / seconds["forwards"],
            "kmeans_over_forwards": seconds["kmeans"] / seconds["forwards"],
            "tokens_read": len(self.batches) * workload.batch * workload.tokens,
            "tokens_kept": self.report.tokens_kept,
            "blocks": len(self.report.shares),
            "peak_bytes": timing.peak_bytes(self.device),
            "ended": time.time(),
        }

    def _initialize(self) -> dict[str, float]:
        spent: dict[str, float] = {}
        timing.reset_peak(self.device)
        with (
            _timed(calibrate, "collect", "reading", spent, self.device),
            _timed(calibrate, "spherical_kmeans", "kmeans", spent, self.device),
            _clock(self.device) as total,
        ):
            seed, keep = self.settings.workload.seed, self.settings.keep
            self.report = calibrate.initialize_centers(self.model, self.batches, keep, seed, progress=False)
        return {**spent, "total": total[0]}


@contextmanager
def _clock(device: str) -> Iterator[list[float]]:
    """Seconds of the block, the work it left on the device included."""
    found: list[float] = []
    timing.synchronize(device)
    start = time.perf_counter()
    yield found
    timing.synchronize(device)
    found.append(time.perf_counter() - start)


@contextmanager
def _timed(module: Any, name: str, phase: str, spent: dict[str, float], device: str) -> Iterator[None]:
    """Add the seconds of every call of `module.name` to `spent[phase]`; nothing else about it changes."""
    function = getattr(module, name)
    spent[phase] = 0.0

    def call(*args: Any, **kwargs: Any) -> Any:
        with _clock(device) as seconds:
            result = function(*args, **kwargs)
        spent[phase] += seconds[0]
        return result

    setattr(module, name, call)
    try:
        yield
    finally:
        setattr(module, name, function)


def init_tables(rows: Sequence[Row], title: str) -> list[Table]:
    """Seconds; `reading` holds the forwards and the sampling from them."""
    columns = ["variant", *PHASES, "total/forwards"]
    cells = [
        [row["variant"], *(f"{row['seconds'][phase]:.2f} s" for phase in PHASES), f"{row['total_over_forwards']:.2f}"]
        for row in rows
        if row["status"] == "ok"
    ]
    return [Table(title, columns, cells)]
