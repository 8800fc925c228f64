"""Cost against work: a step as tokens, rank, experts or blocks grow, one at a time, and the exponent of each growth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from statistics import linear_regression
from typing import Any

from monkeyjump.bench.settings import Settings
from monkeyjump.bench.step import StepRun
from monkeyjump.bench.turns import Measurement, Row
from monkeyjump.bench.variants import FLOOR, PEFT_LORA, PEFT_LORA_LOW, SHAPES, method_config

BASE = "base"  # the axis of the one floor that rank and experts, which it does not have, are held against
SAME = ("mode", "axis", "value")
TITLE = "Bench {verb}, {shape}: exponent of cost in work (1 = linear)"
RANKS = (2, 4, 8, 16, 32)
EXPERTS = (2, 4, 8, 16)
# Where experts are projections, there are as many as there are projections; each is as dear as it is wide.
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PROJECTION_COUNTS = (2, 3, 5, 7)
COSTS = {"time": "median_ms", "memory": "extra_bytes"}
COLUMNS = [  # of the exponents
    ("variant", "variant", str),
    ("axis", "axis", str),
    ("points", "points", "{}".format),
    ("time", "time", "{:.2f}".format),
    ("above floor", "time_above_floor", "{:.2f}".format),
    ("memory", "memory", "{:.2f}".format),
    ("above floor", "memory_above_floor", "{:.2f}".format),
]


def measurements(settings: Settings) -> list[Measurement]:
    """The floor, then every variant at the points of every axis."""
    found = [Measurement(StepRun, FLOOR, settings, {"axis": BASE, "value": 0, "work": "value"})]
    for axis, name in product(settings.axes, settings.methods):
        for value, chosen in spread(points(name, settings, axis), settings.points):
            # experts that are projections cost what their widths do, which their parameters count
            work = "trainable" if chosen.targets != settings.targets else "value"
            found.append(Measurement(StepRun, name, chosen, {"axis": axis, "value": value, "work": work}))
    return found


def spread(found: list[Any], most: int | None) -> list[Any]:
    """At most so many of the points: both ends and what lies evenly between them."""
    if most is None or len(found) <= most:
        return found
    return [found[round(i * (len(found) - 1) / (most - 1))] for i in range(most)]


def points(name: str, settings: Settings, axis: str) -> list[tuple[int, Settings]]:
    """The settings along an axis; none for a variant that does not have it."""
    if axis == "tokens":  # more rows, not longer ones: attention is quadratic in the length whatever is adapted
        rows = sorted({max(1, settings.batch // part) for part in (8, 4, 2, 1)})
        return [(n * settings.tokens, replace(settings, batch=n)) for n in rows]
    if axis == "blocks":
        depth = settings.layers or SHAPES[settings.shape]["num_hidden_layers"]
        return [(n, replace(settings, layers=n)) for n in sorted({max(1, depth // part) for part in (8, 4, 2, 1)})]
    if name == FLOOR:
        return []
    if axis == "rank":
        return [(rank, replace(settings, rank=rank)) for rank in RANKS]
    config = None if name in (PEFT_LORA, PEFT_LORA_LOW) else method_config(name, settings)
    if config is not None and config.placement in ("projection", "ffn"):
        return [(n, replace(settings, overrides={**settings.overrides, "experts": n})) for n in EXPERTS]
    if config is not None and config.placement == "block" and config.layers_to_route != []:
        nothing_shared = {**settings.overrides, "shared_modules": []}
        return [(n, replace(settings, targets=PROJECTIONS[:n], overrides=nothing_shared)) for n in PROJECTION_COUNTS]
    return []


def exponents(rows: Sequence[Row]) -> list[Row]:
    """For each variant, axis and mode the power of the work that its cost grows with: 1 is linear.

    Work is the value on the axis, or the adapters' parameters where experts are projections of different widths.
    `above_floor` is what the adapters add: the cost less that of the frozen model on the same tokens and blocks. It has
    no exponent where the difference is not positive everywhere, that is within the noise.
    """
    measured = [row for row in rows if row["status"] == "ok"]
    floors = {(row["mode"], row["axis"], row["value"]): row for row in measured if row["variant"] == FLOOR}
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in measured:
        if row["axis"] != BASE:
            groups.setdefault((row["variant"], row["axis"], row["mode"]), []).append(row)
    found = []
    for (variant, axis, mode), group in groups.items():
        fits: Row = {"variant": variant, "axis": axis, "mode": mode, "status": "ok", "points": len(group)}
        work = [row[row["work"]] for row in group]
        same = [floors.get((mode, axis, row["value"])) or floors.get((mode, BASE, 0)) or {} for row in group]
        for name, key in COSTS.items():
            costs = [row.get(key) for row in group]
            above = [
                None if cost is None or floor.get(key) is None else cost - floor[key]
                for cost, floor in zip(costs, same, strict=True)
            ]
            fits[name], fits[f"{name}_above_floor"] = exponent(work, costs), exponent(work, above)
        found.append(fits)
    return found


def exponent(work: Sequence[float], costs: Sequence[float | None]) -> float | None:
    """Slope of log cost over log work by least squares; None for fewer than two points or a cost that is no cost."""
    positive = [cost for cost in costs if cost is not None and cost > 0]
    if len(positive) < len(work) or len(set(work)) < 2:
        return None
    return linear_regression([math.log(x) for x in work], [math.log(y) for y in positive]).slope
