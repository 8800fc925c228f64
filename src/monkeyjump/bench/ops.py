"""Each op alone, against the time it takes to read its input once at the bandwidth of a plain copy.

Shapes: N tokens, D hidden width, E experts, K top-k, R rank, O output width.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Any

import torch

from monkeyjump.bench import timing
from monkeyjump.bench.jobs import Row, failure
from monkeyjump.bench.report import Table
from monkeyjump.errors import ConfigError
from monkeyjump.ops import dispatch
from monkeyjump.ops import reference as ops
from monkeyjump.registry import did_you_mean

DROPOUT = 0.05
TOP_K = 2
DEGREE = 15
ROTATED_BYTES = 2**28  # several times the largest L2 cache, so that no input is still there when its turn comes again


@dataclass(frozen=True)
class Size:
    N: int
    D: int
    E: int
    R: int = 2
    dtype: str = "bfloat16"
    device: str = "cuda"


Inputs = dict[str, torch.Tensor]
Make = Callable[[Size, torch.Generator], Inputs]
Implementation = Callable[[Inputs], Any]


def _normal(shape: tuple[int, ...], size: Size, generator: torch.Generator, dtype: str = "float32") -> torch.Tensor:
    return torch.randn(shape, generator=generator, device=size.device, dtype=getattr(torch, dtype))


def hidden_and_centers(size: Size, generator: torch.Generator) -> Inputs:
    """h [N, D] in the model's dtype, centres [E, D] in fp32."""
    return {
        "h": _normal((size.N, size.D), size, generator, size.dtype),
        "centers": torch.nn.functional.normalize(_normal((size.E, size.D), size, generator), dim=-1),
    }


def lora_inputs(size: Size, generator: torch.Generator) -> Inputs:
    """x and the base output [N, D] in the model's dtype, A [R, D], B [D, R] and gates [N, 1] in fp32, the gradient."""
    return {
        "x": _normal((size.N, size.D), size, generator, size.dtype).requires_grad_(),
        "A": _normal((size.R, size.D), size, generator).requires_grad_(),
        "B": _normal((size.D, size.R), size, generator).requires_grad_(),
        "gate": _normal((size.N, 1), size, generator).sigmoid(),
        "base": _normal((size.N, size.D), size, generator, size.dtype),
        "grad": _normal((size.N, size.D), size, generator, size.dtype),
    }


def scaling_inputs(size: Size, generator: torch.Generator) -> Inputs:
    """y [N, D] in the model's dtype, Propulsion's offset [D] and the gates [N, 1] in fp32."""
    return {
        "y": _normal((size.N, size.D), size, generator, size.dtype),
        "offset": 0.01 * _normal((size.D,), size, generator),
        "gate": _normal((size.N, 1), size, generator).sigmoid(),
    }


def _gates(i: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    u = ops.features(i["h"], None, normalize=True)
    logits = ops.similarity_logits(u, i["centers"], "cosine")
    return u, logits, ops.gates(logits, TOP_K, 1.0, renormalize=False)


def _routing(i: Inputs) -> Any:
    return _gates(i)[2]


def _routing_and_sums(i: Inputs) -> Any:
    u, logits, gates = _gates(i)
    return gates, ops.cluster_sums(u, ops.top_k_mask(logits, TOP_K), None)


def _lora(i: Inputs) -> torch.Tensor:
    return i["base"] + ops.gated_lora(i["x"], i["A"], i["B"], i["gate"], DROPOUT)


def _lora_fa(i: Inputs) -> torch.Tensor:
    seed = torch.zeros((), dtype=torch.int64, device=i["x"].device)
    z = ops.SeededDropoutLinear.apply(i["x"], i["A"].detach(), seed, DROPOUT)
    return i["base"] + ops.project_up(z, i["B"], i["gate"])


def _scale(i: Inputs) -> torch.Tensor:
    return i["y"] + ops.scale_output(i["y"], i["offset"], DEGREE, i["gate"])


def _routing_settings() -> Any:
    from monkeyjump.ops.routing import Routing

    return Routing(TOP_K, 1.0, renormalize=False, member_k=TOP_K, unit=True)


def _routing_kernel(i: Inputs) -> Any:
    from monkeyjump.ops import routing

    return routing.fused_gates(i["h"], list(i["centers"].unbind()), _routing_settings())


def _routing_and_sums_kernel(i: Inputs) -> Any:
    from monkeyjump.ops import routing

    return routing.fused_gates_and_sums(i["h"], list(i["centers"].unbind()), None, _routing_settings())


def _lora_kernel(i: Inputs) -> torch.Tensor:
    from monkeyjump.ops.gated_lora import gated_lora

    return gated_lora(i["base"], i["x"], i["A"], i["B"], 1.0, i["gate"], None, DROPOUT)


def _lora_fa_kernel(i: Inputs) -> torch.Tensor:
    from monkeyjump.ops.gated_lora import gated_lora

    return gated_lora(i["base"], i["x"], i["A"].detach(), i["B"], 1.0, i["gate"], None, DROPOUT)


def _scale_kernel(i: Inputs) -> torch.Tensor:
    from monkeyjump.ops.propulsion import scaled

    return scaled(i["y"], i["offset"], DEGREE, i["gate"])


@dataclass(frozen=True)
class Op:
    """What makes the inputs, which of them one pass reads, what is differentiated, and who can compute it."""

    make: Make
    reads: tuple[str, ...]
    implementations: dict[str, Implementation]
    differentiated: tuple[str, ...] = ()  # empty: forward alone

    def run(self, implementation: Implementation, inputs: Inputs) -> Any:
        if not self.differentiated:
            with torch.no_grad():
                return implementation(inputs)
        wanted = [inputs[name] for name in self.differentiated]
        return torch.autograd.grad(implementation(inputs), wanted, inputs["grad"])


LORA_READS = ("x", "A", "B", "gate", "base")
# A further implementation is one more entry of its op.
OPS = {
    "routing": Op(hidden_and_centers, ("h", "centers"), {"torch": _routing, "triton": _routing_kernel}),
    "routing+sums": Op(
        hidden_and_centers, ("h", "centers"), {"torch": _routing_and_sums, "triton": _routing_and_sums_kernel}
    ),
    "lora": Op(lora_inputs, LORA_READS, {"torch": _lora, "triton": _lora_kernel}),
    "lora+backward": Op(lora_inputs, (*LORA_READS, "grad"), {"torch": _lora, "triton": _lora_kernel}, ("x", "A", "B")),
    "lora_fa+backward": Op(
        lora_inputs, (*LORA_READS, "grad"), {"torch": _lora_fa, "triton": _lora_fa_kernel}, ("x", "B")
    ),
    "propulsion": Op(scaling_inputs, ("y", "offset", "gate"), {"torch": _scale, "triton": _scale_kernel}),
}
COMPILED = "compiled"  # every torch implementation, through torch.compile


@dataclass(frozen=True)
class OpsSettings:
    ops: tuple[str, ...] = tuple(OPS)
    tokens: tuple[int, ...] = (4096, 16_384)
    widths: tuple[int, ...] = (896, 4096)
    experts: tuple[int, ...] = (3, 8)
    rank: int = 2
    dtype: str = "bfloat16"
    device: str = "cuda"
    compiled: bool = False
    backend: str = "inductor"
    repeats: int = 30
    seed: int = 0

    def __post_init__(self) -> None:
        problems = [
            f"ops={name!r} is not known.{did_you_mean(name, list(OPS))} Known: {', '.join(OPS)}."
            for name in self.ops
            if name not in OPS
        ]
        if self.repeats < 2:
            problems.append(f"repeats={self.repeats} must be at least 2.")
        if problems:
            raise ConfigError(problems, title="invalid bench")


def kernels_run_on(device: str) -> bool:
    return dispatch.has_triton() and (timing.is_cuda(device) or dispatch.interpreted())


def copy_bandwidth(device: str, repeats: int) -> float:
    """Bytes per second, read and written together, of copying a tensor that fits in no cache."""
    source = torch.empty(2**30 if timing.is_cuda(device) else 2**26, dtype=torch.uint8, device=device).zero_()
    target = torch.empty_like(source)
    timing.times(lambda: target.copy_(source), 3, device)
    found = timing.spread(timing.times(lambda: target.copy_(source), repeats, device))
    return 2 * source.numel() / (1e-3 * found.median_ms)


def ops_rows(settings: OpsSettings) -> Iterator[Row]:
    bandwidth = copy_bandwidth(settings.device, settings.repeats)
    for name in settings.ops:
        op = OPS[name]
        chosen = dict(op.implementations)
        if not kernels_run_on(settings.device):
            del chosen["triton"]
        if settings.compiled:
            chosen[COMPILED] = torch.compile(chosen["torch"], fullgraph=True, dynamic=False, backend=settings.backend)
        # only routing has experts
        experts = settings.experts if op.make is hidden_and_centers else settings.experts[:1]
        for N, D, E in product(settings.tokens, settings.widths, experts):
            size = Size(N, D, E, settings.rank, settings.dtype, settings.device)
            sets = _sets(op.make, size, settings.seed)
            bytes_read = sum(sets[0][key].numel() * sets[0][key].element_size() for key in op.reads)
            for implementation, call in chosen.items():
                row: Row = {"variant": name, "mode": implementation, **asdict(size), "started": time.time()}
                row |= {"input_bytes": bytes_read, "copy_bytes_per_second": bandwidth}
                try:
                    found = timing.spread(_times(partial(op.run, call), sets, settings))
                    read_ms = 1e3 * bytes_read / bandwidth
                    row |= {"status": "ok", **asdict(found), "read_ms": read_ms, "over_read": found.median_ms / read_ms}
                except Exception as error:
                    row |= failure(error)
                yield {**row, "ended": time.time()}


def _sets(make: Make, size: Size, seed: int) -> list[Inputs]:
    """As many input sets as are needed to fill several caches, at least two."""
    generator = torch.Generator(device=size.device).manual_seed(seed)
    first = make(size, generator)
    one = sum(tensor.numel() * tensor.element_size() for tensor in first.values())
    count = min(64, max(2, -(-ROTATED_BYTES // one))) if timing.is_cuda(size.device) else 2
    return [first, *(make(size, generator) for _ in range(count - 1))]


def _times(call: Implementation, sets: list[Inputs], settings: OpsSettings) -> list[float]:
    """Milliseconds of one call, the mean over all sets, repeated; on a GPU in one CUDA graph: no launches counted."""

    def all_sets() -> None:
        for inputs in sets:
            call(inputs)

    all_sets()
    run: Callable[[], object] = all_sets
    if timing.is_cuda(settings.device):
        run = _captured(all_sets)
    timing.times(run, 2, settings.device)
    return [ms / len(sets) for ms in timing.times(run, settings.repeats, settings.device)]


def _captured(call: Callable[[], None]) -> Callable[[], None]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    return graph.replay


def ops_tables(rows: Sequence[Row], title: str) -> list[Table]:
    """Microseconds of one call, those of reading the input once, and their ratio."""
    columns = ["op", "by", "N", "D", "E", "us", "read us", "ratio"]
    cells = [
        [row["variant"], row["mode"], str(row["N"]), str(row["D"]), str(row["E"])]
        + (
            ["failed", "", ""]
            if row["status"] != "ok"
            else [f"{1e3 * row['median_ms']:.1f}", f"{1e3 * row['read_ms']:.1f}", f"{row['over_read']:.1f}"]
        )
        for row in rows
    ]
    return [Table(title, columns, cells)]
