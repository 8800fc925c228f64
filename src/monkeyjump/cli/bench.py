"""`monkeyjump bench`: speed and memory of the methods, measured on models of real shapes with random weights."""

from __future__ import annotations

import argparse
from typing import Any

KINDS = {
    "step": "a training step: the frozen model, PEFT's LoRA and methods",
}
METHODS = "mjlora,mjlorafa,mjadalora,mjpropulsion"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", metavar="WHAT", required=True)
    for kind, summary in KINDS.items():
        sub = kinds.add_parser(kind, help=summary, description=f"Measure {summary}.")
        _add_place(sub)
        _add_workload(sub)
        _add_step(sub)
        _add_crew(sub)


def _add_place(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="cuda or cpu (default: cuda if there is one)")
    parser.add_argument("--output", metavar="DIR", help="where record and picture go (default: runs/bench-WHAT-SHAPE)")


def _add_workload(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shape", default="qwen2-0.5b", help="qwen2-0.5b, llama-3-8b, smollm2-135m or tiny (default: %(default)s)"
    )
    parser.add_argument("--layers", type=int, metavar="N", help="blocks, instead of the shape's")
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="rows (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=512, metavar="N", help="tokens of a row (default: %(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of the model (bfloat16 on cuda)")
    parser.add_argument("--methods", default=METHODS, metavar="A,B,...", help="or all (default: %(default)s)")
    parser.add_argument("--alone", action="store_true", help="without floor and peft-lora: no ratios")
    parser.add_argument(
        "--targets", default="q_proj,k_proj,v_proj,o_proj", metavar="A,B,...", help="adapted (default: %(default)s)"
    )
    parser.add_argument("--rank", type=int, metavar="R", help="of every method (default: the preset's, 2)")
    parser.add_argument("--dropout", type=float, default=0.05, metavar="P", help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and inputs (default: %(default)s)")


def _add_step(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--modes", metavar="A,B,...", help="eager, compile, graph (default: all; on cpu, which has no graphs, eager)"
    )
    parser.add_argument(
        "--scope", default="blocks", help="blocks: no head, no loss; model: with both (default: %(default)s)"
    )
    parser.add_argument("--compile", default="model", help="model: the decoder at once; blocks: each by itself")
    parser.add_argument("--backend", default="inductor", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=30, metavar="N", help="timed (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=5, metavar="N", help="not timed (default: %(default)s)")
    parser.add_argument("--fused-loss", action="store_true", help="liger-kernel's, which makes no logits")
    parser.add_argument("--optimizer", action="store_true", help="a step of AdamW belongs to the step")
    parser.add_argument("--check", action="store_true", help="compare the gradients of the modes (needs --dropout 0)")


def _add_crew(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        metavar="N",
        help="processes that compile at a time; they are timed one by one. 0: all in this process (default: 1)",
    )
    parser.add_argument("--hold", type=int, metavar="N", help="processes that may wait, compiled (default: --jobs)")
    parser.add_argument(
        "--compile-timeout", type=float, default=600, metavar="S", help="seconds to be ready (default: %(default)g)"
    )


def run(options: argparse.Namespace) -> int:
    from monkeyjump.tuner.register import register

    register()
    return {"step": _step}[options.kind](options)


def _step(options: argparse.Namespace) -> int:
    from dataclasses import asdict

    from monkeyjump.bench import plots, report
    from monkeyjump.bench.jobs import Job
    from monkeyjump.bench.variants import variant_names

    settings = _step_settings(options)
    names = variant_names(options.methods.split(","), options.alone)
    plain = asdict(settings)
    session = _session(options, {**plain, "methods": names})
    jobs = [Job("monkeyjump.bench.step", name, plain, settings.modes) for name in names]
    session.measure(jobs, _crew(options, session.output), _tell)
    title = f"Training step, {options.shape}, {options.batch} x {options.tokens} tokens, scope {options.scope}"
    picture = plots.efficiency(session.rows, session.output / "step.png", title)
    return _finish(session, report.step_tables(session.rows, title), picture)


def _step_settings(options: argparse.Namespace) -> Any:
    from monkeyjump.bench.step import MODES, StepSettings

    workload = _workload(options)
    default = MODES if workload.device.startswith("cuda") else MODES[:1]
    return StepSettings(
        workload=workload,
        modes=tuple(options.modes.split(",")) if options.modes else default,
        scope=options.scope,
        compile=options.compile,
        backend=options.backend,
        steps=options.steps,
        warmup=options.warmup,
        fused_loss=options.fused_loss,
        optimizer=options.optimizer,
        check=options.check,
    )


def _workload(options: argparse.Namespace) -> Any:
    from monkeyjump.bench.variants import Workload

    device = _device(options)
    return Workload(
        shape=options.shape,
        layers=options.layers,
        batch=options.batch,
        tokens=options.tokens,
        dtype=options.dtype or ("bfloat16" if device.startswith("cuda") else "float32"),
        device=device,
        targets=tuple(options.targets.split(",")),
        rank=options.rank,
        dropout=options.dropout,
        seed=options.seed,
    )


def _device(options: argparse.Namespace) -> str:
    import torch

    from monkeyjump.errors import ConfigError

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device={device!r}: torch finds no GPU on this machine; use --device cpu.")
    return device


def _session(options: argparse.Namespace, config: dict[str, Any]) -> Any:
    from pathlib import Path

    from monkeyjump.bench.session import Session

    name = f"bench-{options.kind}-{options.shape}"
    return Session(Path(options.output or f"runs/{name}"), name, {**config, "jobs": options.jobs}, _device(options))


def _crew(options: argparse.Namespace, output: Any) -> Any:
    from monkeyjump.bench.jobs import Crew

    if options.jobs == 0:
        return None
    return Crew(options.jobs, options.hold or options.jobs, options.compile_timeout, output / "logs")


def _tell(row: dict[str, Any]) -> None:
    """One line as soon as a row is there: a run may take long, or be cut short."""
    from monkeyjump.bench.report import number

    result = f"{number(row['median_ms'])} ms" if row["status"] == "ok" else f"failed: {row['error'][:60]}"
    print(f"{row['variant']:16} {row['mode']:10} {result}", flush=True)


def _finish(session: Any, tables: list[Any], picture: Any) -> int:
    import textwrap

    from monkeyjump.bench import report

    session.finish()
    for table in tables:
        _show(table)
    for line in report.failures(session.rows):
        print(textwrap.fill(line, width=80))
    print(f"saved       {session.path}")
    print(f"saved       {picture}" if picture else "no picture: nothing to show, or matplotlib is not installed")
    return 0 if session.record.status == "finished" else 1


def _show(table: Any) -> None:
    from monkeyjump.cli import console
    from monkeyjump.errors import ConfigError

    try:
        screen = console.console()
    except ConfigError:  # no rich: numbers measured at length must not be lost over their form
        print(table.plain())
        return
    screen.print(console.table(table.title, table.columns, table.rows, right=range(1, len(table.columns))))
