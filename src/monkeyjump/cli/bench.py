"""`monkeyjump bench`: speed and memory of the methods, measured on models of real shapes with random weights."""

from __future__ import annotations

import argparse
from typing import Any

KINDS = {
    "step": "a training step: the frozen model, PEFT's LoRA and methods",
    "inference": "the prompt and the decoding of a generation",
    "init": "the initialisation of centres: the forwards and the k-means",
    "ops": "each op alone, against reading its input once",
    "memory": "the peak memory of a training step, with and without logits",
    "scaling": "the growth of cost with tokens, rank, experts and blocks",
}
METHODS = "mjlora,mjlorafa,mjadalora,mjpropulsion"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", metavar="WHAT", required=True)
    for kind, summary in KINDS.items():
        sub = kinds.add_parser(kind, help=summary, description=f"Measure {summary}.")
        sub.add_argument("--device", help="cuda or cpu (default: cuda if there is one)")
        sub.add_argument("--output", metavar="DIR", help="where record and picture go (default: runs/bench-WHAT-...)")
        sub.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: bfloat16 on cuda")
        sub.add_argument("--seed", type=int, default=0, help="of weights and inputs (default: %(default)s)")
        sub.add_argument("--backend", default="inductor", help=argparse.SUPPRESS)
        if kind == "ops":
            _add_ops(sub)
            continue
        _add_workload(sub, "mjlora" if kind in ("init", "scaling") else METHODS)
        if kind in ("step", "memory", "scaling"):
            _add_step(sub, kind)
        if kind == "inference":
            _add_inference(sub)
        if kind == "init":
            sub.add_argument("--keep", type=int, default=50_000, metavar="N", help="clustered (default: %(default)s)")
            sub.add_argument("--repeats", type=int, default=3, metavar="N", help="(default: %(default)s)")
        _add_crew(sub)


def _add_workload(parser: argparse.ArgumentParser, methods: str) -> None:
    parser.add_argument(
        "--shape", default="qwen2-0.5b", help="qwen2-0.5b, llama-3-8b, smollm2-135m or tiny (default: %(default)s)"
    )
    parser.add_argument("--layers", type=int, metavar="N", help="blocks, instead of the shape's")
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="rows (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=512, metavar="N", help="tokens of a row (default: %(default)s)")
    parser.add_argument("--methods", default=methods, metavar="A,B,...", help="or all (default: %(default)s)")
    parser.add_argument("--alone", action="store_true", help="without the frozen model and peft-lora: no ratios")
    parser.add_argument(
        "--targets", default="q_proj,k_proj,v_proj,o_proj", metavar="A,B,...", help="adapted (default: %(default)s)"
    )
    parser.add_argument("--rank", type=int, metavar="R", help="of every method (default: the preset's, 2)")
    parser.add_argument("--dropout", type=float, default=0.05, metavar="P", help="(default: %(default)s)")


def _add_step(parser: argparse.ArgumentParser, kind: str) -> None:
    default = {"step": "all", "memory": "eager", "scaling": "graph"}[kind]
    parser.add_argument(
        "--modes", metavar="A,B,...", help=f"eager, compile, graph (default: {default}; on cpu, without graphs, eager)"
    )
    parser.add_argument("--compile", default="model", help="model: the decoder at once; blocks: each by itself")
    steps = 10 if kind == "memory" else 30
    parser.add_argument("--steps", type=int, default=steps, metavar="N", help="timed (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=5, metavar="N", help="not timed (default: %(default)s)")
    parser.add_argument("--optimizer", action="store_true", help="a step of AdamW belongs to the step")
    if kind == "scaling":
        axes = "tokens,rank,experts,blocks"
        parser.add_argument("--axes", default=axes, metavar="A,B,...", help="what grows (default: %(default)s)")
        parser.add_argument("--points", type=int, metavar="N", help="at most N on each axis, its ends with them")
    if kind != "memory":
        parser.add_argument(
            "--scope", default="blocks", help="blocks: no head, no loss; model: with both (default: %(default)s)"
        )
        parser.add_argument("--fused-loss", metavar="BY", help="torch or liger: a loss without logits (scope model)")
    if kind == "step":
        parser.add_argument("--profile", action="store_true", help="record the kernels of a step in the last mode")
        parser.add_argument(
            "--rounds", type=int, default=1, metavar="N", help="turns of each variant, of --steps (default: 1)"
        )
        parser.add_argument("--check", action="store_true", help="compare the modes' gradients (needs --dropout 0)")


def _add_inference(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--modes",
        metavar="A,B,...",
        help="prefill, decode, decode-compile, decode-graph (default: all; on cpu the first two)",
    )
    parser.add_argument("--compile", default="blocks", help="blocks: each by itself (default); model: all at once")
    parser.add_argument("--new", type=int, default=64, metavar="N", help="tokens decoded (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="generations (default: %(default)s)")


def _add_ops(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ops", metavar="A,B,...", help="default: all")
    parser.add_argument("--tokens", default="4096,16384", metavar="N,...", help="(default: %(default)s)")
    parser.add_argument("--widths", default="896,4096", metavar="N,...", help="(default: %(default)s)")
    parser.add_argument("--experts", default="3,8", metavar="N,...", help="of the routing (default: %(default)s)")
    parser.add_argument("--rank", type=int, default=2, metavar="R", help="(default: %(default)s)")
    parser.add_argument("--compiled", action="store_true", help="the torch versions through torch.compile, too")
    parser.add_argument("--repeats", type=int, default=30, metavar="N", help="(default: %(default)s)")


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
    import textwrap

    from monkeyjump.tuner.register import register

    register()
    from monkeyjump.bench import report, verbs

    try:
        outcome = verbs.measure(options, _tell)
    except KeyboardInterrupt:
        print(f"\nstopped; what was measured is in {verbs.output_folder(options)}.")
        return 130
    for table in outcome.tables:
        table.show()
    for line in [*outcome.notes, *report.failures(outcome.session.rows)]:
        print(textwrap.fill(line, width=80))
    print(f"saved       {outcome.session.path}")
    if outcome.picture:
        print(f"saved       {outcome.picture}")
    return 0 if outcome.session.record.status == "finished" else 1


def _tell(row: dict[str, Any]) -> None:
    """One line as soon as a row is there: a run may take long, or be cut short."""
    from monkeyjump.bench.report import number

    where = f"{row['axis']}={row['value']}" if "axis" in row else row.get("loss", "")
    result = f"{number(row['median_ms'])} ms" if row["status"] == "ok" else f"failed: {row['error'][:25]}"
    print(f"{row['variant']:17}{row['mode']:15}{where:14}{result}", flush=True)
