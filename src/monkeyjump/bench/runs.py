"""How a variant is run and timed: as it is, compiled, and captured in a CUDA graph.

On a GPU times come from CUDA events and memory from the caching allocator, on a CPU from the wall clock and a profile.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from monkeyjump.bench.settings import Settings
from monkeyjump.bench.turns import Row, failure
from monkeyjump.bench.variants import BuiltVariant
from monkeyjump.training.compile import whole_call
from monkeyjump.training.cuda_graphs import CudaGraph, Memory

Call = Callable[[], object]
SETTLE = 3  # steps until a compiled model compiles no more: the first leaves losses and gradients behind


class ModesRun:
    """One variant. It warms up beside others, and is alone when the row of a mode is measured."""

    built: BuiltVariant

    def __init__(self, variant: str, settings: Settings) -> None:
        self.variant, self.settings, self.device = variant, settings, settings.device
        self.generator = torch.Generator(device=self.device).manual_seed(settings.seed)
        self.compiled: list[tuple[Any, Any]] = []  # a module and its compiled call
        self.compiler: Row = {}  # what a row says of the compiler
        self.compile_failure: Row | None = None  # not the error itself, which would keep its frames' tensors alive

    def warm_up(self) -> None:
        """Everything that takes long and is not timed."""

    def measure(self, mode: str) -> Row:
        raise NotImplementedError

    def tidy(self) -> None:
        """Give back what a mode has left behind."""

    def row(self, mode: str) -> Row:
        compiled = mode.endswith(("compile", "graph"))
        if compiled and self.compile_failure is not None:
            return self.compile_failure
        self.use(compiled)
        try:
            return {"status": "ok", **self.measure(mode)}
        finally:
            with suppress(RuntimeError):  # after a failed capture even this may fail; the row says why
                self.tidy()

    def compile(self, parts: Callable[[Any], list[tuple[Any, Any]]], settle: Call) -> None:
        """Put compiled calls in place of modules' own, and call them until nothing more is compiled."""
        import torch._dynamo

        # the blocks share one code object, and each may need a graph of its own
        torch._dynamo.config.recompile_limit = max(64, 8 * len(self.built.decoder.layers))
        torch._dynamo.config.accumulated_recompile_limit = 16 * torch._dynamo.config.recompile_limit
        start, before = time.perf_counter(), graphs_made()
        try:
            if self.built.context is not None:
                self.built.context.shared_inputs.prepare()
            self.compiled = parts(
                torch.compile(whole_call, fullgraph=True, dynamic=False, backend=self.settings.backend)
            )
            self.use(compiled=True)
            settle()
            synchronize(self.device)
        except Exception as error:
            self.compile_failure = failure(error)
        seconds = time.perf_counter() - start
        self.compiler = {"compile_seconds": seconds, "compiled_graphs": graphs_made() - before}
        self.use(compiled=False)

    def use(self, compiled: bool) -> None:
        """Call the parts compiled or as they are."""
        for part, call in self.compiled:
            part._compiled_call_impl = call if compiled else None


def graphs_made() -> int:
    """How many graphs the compiler has made so far."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def summary(milliseconds: list[float]) -> dict[str, float]:
    """The median of repeated calls, their 10th and 90th percentile, and how far these are apart."""
    several = milliseconds if len(milliseconds) > 1 else 2 * milliseconds  # there are no percentiles of one
    low, *_, high = statistics.quantiles(several, n=10, method="inclusive")
    middle = statistics.median(milliseconds)
    spread = (high - low) / middle
    return {"median_ms": middle, "p10_ms": low, "p90_ms": high, "spread": spread, "repeats": len(milliseconds)}


def is_cuda(device: str) -> bool:
    return torch.device(device).type == "cuda"


def synchronize(device: str) -> None:
    if is_cuda(device):
        torch.cuda.synchronize(device)


def times(call: Call, repeats: int, device: str) -> list[float]:
    """Milliseconds of each of `repeats` calls in a row, each from the end of the one before.

    On a GPU nothing is waited for in between, as in training: a call is as long as the longer of what the host issues
    and what the device does.
    """
    if not is_cuda(device):
        ends = [time.perf_counter()]
        for _ in range(repeats):
            call()
            ends.append(time.perf_counter())
        return [1e3 * (b - a) for a, b in pairwise(ends)]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    torch.cuda.synchronize(device)
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize(device)
    return [a.elapsed_time(b) for a, b in pairwise(marks)]


def captured(call: Callable[[], Any], warm_up: Callable[[], Any], before: Call = lambda: None) -> CudaGraph:
    """One call in a CUDA graph; `warm_up` runs on the stream of the capture, `before` just before the capture."""
    graph = CudaGraph(Memory())
    graph.rehearse(warm_up)
    before()
    graph.record(call)
    return graph


def reset_peak(device: str) -> None:
    if is_cuda(device):
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: str) -> int | None:
    """Most bytes of tensors alive at once since `reset_peak`; None where nothing counts them (CPU)."""
    return torch.cuda.max_memory_allocated(device) if is_cuda(device) else None


def cpu_peak_bytes(call: Call) -> int:
    """The most bytes that one call had allocated on the CPU at once, beside what was there before it.

    What earlier calls left for the garbage collector is collected first, since it would count as given back.
    """
    gc.collect()
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            call()
    finally:
        gc.enable()
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = sorted((event.start_ns(), event.nbytes()) for event in events)
    return max(accumulate((size for _, size in changes), initial=0))


def release_cache(device: str) -> None:
    """Give unused memory back to the device, for the other processes on it."""
    if is_cuda(device):
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def kernels(call: Call, device: str, most: int = 40) -> list[dict[str, object]]:
    """The kernels of one call, on a CPU its operations, the longest first: name, calls, microseconds of all calls."""
    cuda = is_cuda(device)
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as found:
        call()
        synchronize(device)
    rows = [
        {"name": row.key, "calls": row.count, "us": row.device_time_total if cuda else row.self_cpu_time_total}
        for row in found.key_averages()
    ]
    return sorted(rows, key=lambda row: -row["us"])[:most]
