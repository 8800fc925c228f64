"""Clocks and memory counters: CUDA events and the caching allocator on a GPU, the wall clock on a CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch


@dataclass(frozen=True)
class Spread:
    """Milliseconds of repeated calls: the median and the 10th and 90th percentile."""

    median_ms: float
    p10_ms: float
    p90_ms: float
    repeats: int


def spread(milliseconds: list[float]) -> Spread:
    if len(milliseconds) == 1:
        return Spread(milliseconds[0], milliseconds[0], milliseconds[0], 1)
    tenths = statistics.quantiles(milliseconds, n=10, method="inclusive")
    return Spread(statistics.median(milliseconds), tenths[0], tenths[8], len(milliseconds))


def is_cuda(device: str | torch.device) -> bool:
    return torch.device(device).type == "cuda"


def synchronize(device: str | torch.device) -> None:
    if is_cuda(device):
        torch.cuda.synchronize(device)


def times(call: Callable[[], object], repeats: int, device: str | torch.device) -> list[float]:
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


def reset_peak(device: str | torch.device) -> None:
    if is_cuda(device):
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: str | torch.device) -> int | None:
    """Most bytes of tensors alive at once since `reset_peak`; None where nothing counts them (CPU)."""
    return torch.cuda.max_memory_allocated(device) if is_cuda(device) else None


def resident_bytes(device: str | torch.device) -> int | None:
    """Bytes of the tensors alive now."""
    if not is_cuda(device):
        return None
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device)


def release_cache(device: str | torch.device) -> None:
    """Give unused memory back to the device, for the other processes on it."""
    if is_cuda(device):
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def kernels(call: Callable[[], object], device: str | torch.device, most: int = 40) -> list[dict[str, object]]:
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
