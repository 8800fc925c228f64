"""What `monkeyjump bench` does with its options: settings, jobs, measurement, tables and picture of each verb."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from monkeyjump.bench import inference, init, memory, ops, plots, report, scaling
from monkeyjump.bench.jobs import Crew, Job, Row
from monkeyjump.bench.session import Session
from monkeyjump.bench.step import MODES, StepSettings
from monkeyjump.bench.variants import FLOOR, Workload, variant_names
from monkeyjump.errors import ConfigError

Tell = Callable[[Row], None]


@dataclass
class Outcome:
    """What is there to show."""

    session: Session
    tables: list[report.Table]
    picture: Path | None = None
    notes: list[str] = field(default_factory=list)


def measure(options: Namespace, tell: Tell) -> Outcome:
    verb = {
        "step": step,
        "inference": generation,
        "init": centres,
        "ops": single_ops,
        "memory": peaks,
        "scaling": growth,
    }
    outcome = verb[options.kind](options, tell)
    outcome.session.finish()
    return outcome


def step(options: Namespace, tell: Tell) -> Outcome:
    settings, names = _step_settings(options, MODES), _names(options)
    plain = asdict(settings)
    session = _session(options, {**plain, "methods": names})
    jobs = [Job("monkeyjump.bench.step", name, plain, settings.modes) for name in names]
    session.measure(jobs, _crew(options, session), tell)
    title = f"Training step, {_size(options)}, scope {options.scope}"
    picture = plots.efficiency(session.rows, session.output / "step.png", title)
    return Outcome(session, report.step_tables(session.rows, title), picture)


def peaks(options: Namespace, tell: Tell) -> Outcome:
    settings, names = _step_settings(options, ("eager",)), _names(options)
    jobs, missing = memory.memory_jobs(settings, names)
    session = _session(options, {**asdict(settings), "methods": names})
    session.same = memory.SAME
    session.record.extra["liger"] = missing or "measured"
    session.measure(jobs, _crew(options, session), tell)
    title = f"Memory of a step, {_size(options)}"
    picture = plots.memory(session.rows, session.output / "memory.png", title)
    notes = [f"not measured: {problem}" for problem in missing]
    return Outcome(session, memory.memory_tables(session.rows, title), picture, notes)


def growth(options: Namespace, tell: Tell) -> Outcome:
    settings, names, axes = _step_settings(options, ("graph",)), _names(options), options.axes.split(",")
    jobs = scaling.scaling_jobs(settings, names, axes, options.points)
    session = _session(options, {**asdict(settings), "methods": names, "axes": axes, "points": options.points})
    session.same = scaling.SAME
    session.measure(jobs, _crew(options, session), tell)
    found = session.record.metrics["exponents"] = scaling.exponents(session.rows)
    title = f"Scaling, {_size(options)}"
    picture = plots.scaling(session.rows, session.output / "scaling.png", title)
    return Outcome(session, scaling.scaling_tables(found, title), picture)


def generation(options: Namespace, tell: Tell) -> Outcome:
    workload = _workload(options)
    default = inference.MODES if workload.device.startswith("cuda") else inference.MODES[:2]
    modes = tuple(options.modes.split(",")) if options.modes else default
    settings = inference.InferenceSettings(
        workload, modes, options.new, options.repeats, options.compile, options.backend
    )
    names = [inference.BASE if name == FLOOR else name for name in _names(options)]
    plain = asdict(settings)
    session = _session(options, {**plain, "methods": names})
    jobs = [Job("monkeyjump.bench.inference", name, plain, modes) for name in names]
    session.measure(jobs, _crew(options, session), tell)
    title = f"Generation, {_size(options)}, {options.new} new"
    picture = plots.efficiency(session.rows, session.output / "inference.png", title)
    return Outcome(session, inference.inference_tables(session.rows, title), picture)


def centres(options: Namespace, tell: Tell) -> Outcome:
    settings = init.InitSettings(_workload(options), ("init",), options.keep, options.repeats)
    names = variant_names(options.methods.split(","), alone=True)
    plain = asdict(settings)
    session = _session(options, {**plain, "methods": names})
    jobs = [Job("monkeyjump.bench.init", name, plain, settings.modes) for name in names]
    session.measure(jobs, _crew(options, session), tell)
    return Outcome(session, init.init_tables(session.rows, f"Centres from {options.keep:,} tokens, {_size(options)}"))


def single_ops(options: Namespace, tell: Tell) -> Outcome:
    device = _device(options)
    settings = ops.OpsSettings(
        ops=tuple(options.ops.split(",")) if options.ops else tuple(ops.OPS),
        tokens=_numbers("tokens", options.tokens),
        widths=_numbers("widths", options.widths),
        experts=_numbers("experts", options.experts),
        rank=options.rank,
        dtype=_dtype(options, device),
        device=device,
        compiled=options.compiled,
        backend=options.backend,
        repeats=options.repeats,
        seed=options.seed,
    )
    session = _session(options, asdict(settings))
    for row in ops.ops_rows(settings):
        session.add(row)
        tell(row)
    return Outcome(session, ops.ops_tables(session.rows, "Ops, one call"))


def _names(options: Namespace) -> list[str]:
    return variant_names(options.methods.split(","), options.alone)


def _step_settings(options: Namespace, modes: tuple[str, ...]) -> StepSettings:
    workload = _workload(options)
    default = modes if workload.device.startswith("cuda") else ("eager",)
    return StepSettings(
        workload=workload,
        modes=tuple(options.modes.split(",")) if options.modes else default,
        scope=getattr(options, "scope", "model"),
        compile=options.compile,
        backend=options.backend,
        steps=options.steps,
        warmup=options.warmup,
        fused_loss=getattr(options, "fused_loss", None) or "off",
        optimizer=options.optimizer,
        check=getattr(options, "check", False),
        profile=getattr(options, "profile", False),
    )


def _workload(options: Namespace) -> Workload:
    device = _device(options)
    return Workload(
        shape=options.shape,
        layers=options.layers,
        batch=options.batch,
        tokens=options.tokens,
        dtype=_dtype(options, device),
        device=device,
        targets=tuple(options.targets.split(",")),
        rank=options.rank,
        dropout=options.dropout,
        seed=options.seed,
    )


def _device(options: Namespace) -> str:
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device={device!r}: torch finds no GPU on this machine; use --device cpu.")
    return device


def _dtype(options: Namespace, device: str) -> str:
    return options.dtype or ("bfloat16" if device.startswith("cuda") else "float32")


def _numbers(name: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise ConfigError(f"{name}={text!r} must be whole numbers with commas between them, e.g. 896,4096.") from None


def _size(options: Namespace) -> str:
    return f"{options.shape}, {options.batch} x {options.tokens} tokens"


def _session(options: Namespace, config: dict[str, Any]) -> Session:
    config["jobs"] = getattr(options, "jobs", 0)
    return Session(output_folder(options), _name(options), config, _device(options))


def _name(options: Namespace) -> str:
    return "-".join(["bench", options.kind, *([options.shape] if "shape" in options else [])])


def output_folder(options: Namespace) -> Path:
    return Path(options.output or f"runs/{_name(options)}")


def _crew(options: Namespace, session: Session) -> Crew | None:
    if options.jobs == 0:
        if getattr(options, "rounds", 1) > 1:
            raise ConfigError(
                f"rounds={options.rounds} needs processes that wait for their turn: use --jobs 1 or more."
            )
        return None
    if options.jobs < 0 or (options.hold or 1) < 1:
        raise ConfigError(f"jobs={options.jobs} must be at least 0 and hold={options.hold} at least 1.")
    rounds = getattr(options, "rounds", 1)
    if rounds < 1:
        raise ConfigError(f"rounds={rounds} must be at least 1.")
    return Crew(options.jobs, options.hold or options.jobs, options.compile_timeout, session.output / "logs", rounds)
