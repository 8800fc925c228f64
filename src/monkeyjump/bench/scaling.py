"""Cost against work: a step as tokens, rank, experts or blocks grow, one at a time, and the exponent of each growth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from monkeyjump.bench.jobs import Job, Row
from monkeyjump.bench.report import Table
from monkeyjump.bench.shapes import SHAPES
from monkeyjump.bench.step import StepSettings
from monkeyjump.bench.variants import FLOOR, PEFT_LORA, PEFT_LORA_LOW, Workload, method_config
from monkeyjump.errors import ConfigError

AXES = ("tokens", "rank", "experts", "blocks")
BASE = "base"  # the axis of the one floor that rank and experts, which it does not have, are held against
SAME = ("mode", "axis", "value")
RANKS = (2, 4, 8, 16, 32)
EXPERTS = (2, 4, 8, 16)
# Where experts are projections, there are as many as there are projections; each is as dear as it is wide.
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PROJECTION_COUNTS = (2, 3, 5, 7)
MEASURES = ("time", "time_above_floor", "memory", "memory_above_floor")


def scaling_jobs(settings: StepSettings, names: list[str], axes: Sequence[str], most: int | None = None) -> list[Job]:
    """The floor, then every variant at the points of every axis, or at `most` of them."""
    problems = [f"axes={axis!r} must be one of {', '.join(AXES)}." for axis in axes if axis not in AXES]
    if most is not None and most < 2:
        problems.append(f"points={most} must be at least 2: one point has no slope.")
    if problems:
        raise ConfigError(problems)

    def job(name: str, workload: Workload, axis: str, value: int) -> Job:
        chosen = asdict(replace(settings, workload=workload))
        # experts that are projections cost what their widths do, which their parameters count
        work = "trainable" if workload.targets != settings.workload.targets else "value"
        labels = {"axis": axis, "value": value, "work": work}
        return Job("monkeyjump.bench.step", name, chosen, settings.modes, labels)

    jobs = [job(FLOOR, settings.workload, BASE, 0)]
    for axis in axes:
        for name in names:
            chosen = spread(points(name, settings.workload, axis), most)
            jobs += [job(name, workload, axis, value) for value, workload in chosen]
    return jobs


def spread(found: list[tuple[int, Workload]], most: int | None) -> list[tuple[int, Workload]]:
    """At most so many of the points, both ends and what lies evenly between them."""
    if most is None or len(found) <= most:
        return found
    return [found[round(i * (len(found) - 1) / (most - 1))] for i in range(most)]


def points(name: str, workload: Workload, axis: str) -> list[tuple[int, Workload]]:
    """The workloads along an axis; none for a variant that does not have it."""
    if axis == "tokens":  # more rows, not longer ones: attention is quadratic in the length whatever is adapted
        rows = sorted({max(1, workload.batch // part) for part in (8, 4, 2, 1)})
        return [(n * workload.tokens, replace(workload, batch=n)) for n in rows]
    if axis == "blocks":
        depth = workload.layers or SHAPES[workload.shape]["num_hidden_layers"]
        return [(n, replace(workload, layers=n)) for n in sorted({max(1, depth // part) for part in (8, 4, 2, 1)})]
    if name == FLOOR:
        return []
    if axis == "rank":
        return [(rank, replace(workload, rank=rank)) for rank in RANKS]
    return [] if name in (PEFT_LORA, PEFT_LORA_LOW) else _with_experts(name, workload)


def _with_experts(name: str, workload: Workload) -> list[tuple[int, Workload]]:
    config = method_config(name, workload)
    if config.placement in ("projection", "ffn"):
        return [(n, replace(workload, overrides={**workload.overrides, "experts": n})) for n in EXPERTS]
    if config.placement == "block" and config.layers_to_route != []:
        nothing_shared = {**workload.overrides, "shared_modules": []}
        return [(n, replace(workload, targets=PROJECTIONS[:n], overrides=nothing_shared)) for n in PROJECTION_COUNTS]
    return []


def exponents(rows: Sequence[Row]) -> list[dict[str, Any]]:
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
    return [
        {"variant": variant, "axis": axis, "mode": mode, "points": len(group), **_fits(group, floors)}
        for (variant, axis, mode), group in groups.items()
    ]


def _fits(group: list[Row], floors: dict[tuple, Row]) -> dict[str, float | None]:
    found = {}
    for name, key in (("time", "median_ms"), ("memory", "extra_bytes")):
        costs, above = [], []
        for row in group:
            floor = floors.get((row["mode"], row["axis"], row["value"])) or floors.get((row["mode"], BASE, 0))
            work = row[row["work"]]
            costs.append((work, row.get(key)))
            known = floor is not None and row.get(key) is not None and floor.get(key) is not None
            above.append((work, row[key] - floor[key] if known and floor is not None else None))
        found[name], found[f"{name}_above_floor"] = exponent(costs), exponent(above)
    return found


def exponent(points: Sequence[tuple[float, float | None]]) -> float | None:
    """Slope of log cost over log work by least squares; None for fewer than two points or a cost that is no cost."""
    costs = [(work, cost) for work, cost in points if cost is not None and cost > 0]
    if len(costs) < len(points) or len(points) < 2:
        return None
    x, y = [math.log(work) for work, _ in costs], [math.log(cost) for _, cost in costs]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    square = sum((a - mean_x) ** 2 for a in x)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / square if square else None


def scaling_tables(found: Sequence[dict[str, Any]], title: str) -> list[Table]:
    """One table per mode; the exponents of cost in work."""
    columns = ["variant", "axis", "points", "time", "above floor", "memory", "above floor"]
    return [
        Table(
            f"{title}, {mode}: exponent of cost in work (1 = linear)",
            columns,
            [
                [row["variant"], row["axis"], str(row["points"])]
                + ["" if row[measure] is None else f"{row[measure]:.2f}" for measure in MEASURES]
                for row in found
                if row["mode"] == mode
            ],
        )
        for mode in dict.fromkeys(row["mode"] for row in found)
    ]
