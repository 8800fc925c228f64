"""Clocks and memory counters: CUDA events and the caching allocator on a GPU, the wall clock on a CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import accumulate, pairwise

import torch


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


def times(call: Callable[[], object], repeats: int, device: str) -> list[float]:
    """Milliseconds of each of `repeats` calls in a row, each from the end of the one before.

    On a GPU nothing is waited for in between, as in training: a call is as long as the longer of what the host issues
    and what the device does.
    """
    if not is_cuda(device):
        found = []
        for _ in range(repeats):
            start = time.perf_counter()
            call()
            found.append(1e3 * (time.perf_counter() - start))
        return found
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    torch.cuda.synchronize(device)
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize(device)
    return [a.elapsed_time(b) for a, b in pairwise(marks)]


def captured(
    call: Callable[[], object], warm_up: Callable[[], object], before: Callable[[], object] = lambda: None
) -> torch.cuda.CUDAGraph:
    """One call in a CUDA graph; `warm_up` runs on the stream of the capture, `before` just before the capture."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        warm_up()
    torch.cuda.current_stream().wait_stream(stream)
    before()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    return graph


def reset_peak(device: str) -> None:
    if is_cuda(device):
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: str) -> int | None:
    """Most bytes of tensors alive at once since `reset_peak`; None where nothing counts them (CPU)."""
    return torch.cuda.max_memory_allocated(device) if is_cuda(device) else None


def cpu_peak_bytes(call: Callable[[], object]) -> int:
    """The most bytes that one call had allocated on the CPU at once, beside what was there before it."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        call()
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = sorted((event.start_ns(), event.nbytes()) for event in events)
    return max(accumulate((size for _, size in changes), initial=0))


def resident_bytes(device: str) -> int | None:
    """Bytes of the tensors alive now."""
    if not is_cuda(device):
        return None
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device)


def release_cache(device: str) -> None:
    """Give unused memory back to the device, for the other processes on it."""
    if is_cuda(device):
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def kernels(call: Callable[[], object], device: str, most: int = 40) -> list[dict[str, object]]:
    """The kernels of one call, on a CPU its operations, the longest first: name, calls, microseconds of all calls."""
    from torch.profiler import ProfilerActivity, profile

    cuda = is_cuda(device)
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as found:
        call()
        synchronize(device)
    rows = [
        {"name": row.key, "calls": row.count, "us": row.device_time_total if cuda else row.self_cpu_time_total}
        for row in found.key_averages()
    ]
    return sorted(rows, key=lambda row: -row["us"])[:most]
