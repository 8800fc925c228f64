"""The router and the adapters alone, against the time it takes to read their input once at a plain copy's bandwidth.

Shapes: N tokens, D hidden width, E experts, R rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch.nn.functional import normalize

from monkeyjump.adapters import ADAPTERS
from monkeyjump.bench import runs
from monkeyjump.bench.settings import Settings
from monkeyjump.bench.turns import Measurement, Row
from monkeyjump.config import MonkeyJumpConfig
from monkeyjump.errors import ConfigError
from monkeyjump.ops import dispatch
from monkeyjump.registry import did_you_mean
from monkeyjump.routing.centroid import Staged, decide
from monkeyjump.routing.granularity import Selection

TOP_K = 2
SIZES = (4096, 16_384), (896, 4096), (3, 8)  # tokens, widths, experts
SIZES_ON_CPU = (16,), (16,), (3,)  # where Triton's kernels are interpreted
ROTATED_BYTES = 2**28  # several times the largest L2 cache, so that no input is still there when its turn comes again


TITLE = "Ops, one call"
TABLE_FOR_EACH = ()
SAME = ("mode", "N", "D", "E")
COLUMNS = [
    ("op", "variant", str),
    ("by", "mode", str),
    *((name, name, "{}".format) for name in "NDE"),
    ("us", "median_ms", lambda ms: f"{1e3 * ms:.1f}"),
    ("read us", "read_ms", lambda ms: f"{1e3 * ms:.1f}"),
    ("ratio", "over_read", "{:.1f}".format),
]
Prepared = tuple[Callable[[], Any], list[torch.Tensor]]  # a call with inputs of its own, and what one pass reads


def routing(size: tuple[int, int, int], dtype: torch.dtype, normal: Callable[..., Any], sums: bool = False) -> Prepared:
    """Gates of h [1, N, D] for E centres [D] in fp32; with the sums that the centres follow."""
    N, D, E = size
    h, centers = normal(1, N, D, dtype=dtype), list(normalize(normal(E, D), dim=-1))
    into = Staged([torch.empty_like(center) for center in centers], [h.new_empty(()).float() for _ in centers])
    config = MonkeyJumpConfig(top_k=TOP_K)
    return partial(decide, h, centers, None, Selection(), config, into=into if sums else None), [h, *centers]


def adapter(
    size: tuple[int, int, int], dtype: torch.dtype, normal: Callable[..., Any], name: str, backward: bool = False
) -> Prepared:
    """An adapter in training on x and the frozen output [N, D], with a gate for every token; R = 2, dropout 0.05."""
    N, D, _ = size
    x, out, grad = (normal(N, D, dtype=dtype) for _ in range(3))
    gate = normal(N, 1).sigmoid()
    module = ADAPTERS.get(name)(D, D, MonkeyJumpConfig(adapter=name, r=2, dropout=0.05)).to(x.device)
    wanted = [x.requires_grad_(backward), *module.parameters()]

    def call() -> Any:
        with torch.set_grad_enabled(backward):
            y = module(x, out, out, gate)
        return torch.autograd.grad(y, wanted, grad) if backward else y

    reads = [out, gate, *module.parameters(), *module.buffers(), *([grad] if backward else [])]
    return call, reads if name == "propulsion" else [x, *reads]


OPS: dict[str, Callable[..., Prepared]] = {
    "routing": routing,
    "routing+sums": partial(routing, sums=True),
    "lora": partial(adapter, name="lora"),
    "lora+backward": partial(adapter, name="lora", backward=True),
    "lora_fa+backward": partial(adapter, name="lora_fa", backward=True),
    "propulsion": partial(adapter, name="propulsion"),
}


def measurements(settings: Settings) -> list[Measurement]:
    """Every op at every size; only routing has experts."""
    names = settings.ops or tuple(OPS)
    unknown = [f"{name!r}.{did_you_mean(name, list(OPS))}" for name in names if name not in OPS]
    if unknown:
        raise ConfigError([f"ops={hint} Known: {', '.join(OPS)}." for hint in unknown], title="invalid bench")
    on_gpu = runs.is_cuda(settings.device)
    modes = settings.modes if dispatch.HAS_TRITON and (on_gpu or dispatch.interpreted()) else ("torch",)
    settings = replace(settings, modes=modes, copy_bytes_per_second=copy_bandwidth(settings.device, settings.repeats))
    return [
        Measurement(OpRun, name, replace(settings, size=(N, D, E)), {"N": N, "D": D, "E": E})
        for name in names
        for N, D, E in product(*(SIZES if on_gpu else SIZES_ON_CPU))
        if name.startswith("routing") or E == 3
    ]


def copy_bandwidth(device: str, repeats: int) -> float:
    """Bytes per second, read and written together, of copying a tensor that fits in no cache."""
    source = torch.empty(2**30 if runs.is_cuda(device) else 2**26, dtype=torch.uint8, device=device).zero_()
    target = torch.empty_like(source)
    times = runs.times(lambda: target.copy_(source), 3 + repeats, device)[3:]
    return 2 * source.numel() / (1e-3 * runs.summary(times)["median_ms"])


class OpRun(runs.ModesRun):
    """One op at one size, by torch and by the kernels."""

    def __init__(self, variant: str, settings: Settings) -> None:
        super().__init__(variant, settings)
        normal = partial(torch.randn, generator=self.generator, device=self.device)
        prepare = partial(OPS[variant], settings.size, getattr(torch, settings.dtype), normal)
        first, reads = prepare()
        self.read_bytes = sum(tensor.nbytes for tensor in reads)
        count = min(64, max(2, -(-ROTATED_BYTES // self.read_bytes))) if runs.is_cuda(self.device) else 2
        self.calls = [first, *(prepare()[0] for _ in range(count - 1))]

    def measure(self, mode: str) -> Row:
        """One call, the mean over all inputs; on a GPU in one CUDA graph, so that no launch is counted."""

        def all_calls() -> None:
            for call in self.calls:
                call()

        with dispatch.implementation(mode):
            all_calls()
            run = runs.captured(all_calls, all_calls).replay if runs.is_cuda(self.device) else all_calls
            times = runs.times(run, 2 + self.settings.repeats, self.device)[2:]
        bandwidth = self.settings.copy_bytes_per_second
        row = runs.summary([milliseconds / len(self.calls) for milliseconds in times])
        row |= {"input_bytes": self.read_bytes, "copy_bytes_per_second": bandwidth}
        row["read_ms"] = 1e3 * self.read_bytes / bandwidth
        return {**row, "over_read": row["median_ms"] / row["read_ms"]}
