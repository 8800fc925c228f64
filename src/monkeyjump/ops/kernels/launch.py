"""A launcher that calls a compiled kernel again without letting Triton inspect all its arguments.

Triton looks at every argument of every launch to find the variant it has compiled: 20 to 50 microseconds of host time
for kernels with many arguments, as long as several launches. The variant depends on dtypes, on pointers only by their
alignment, on integers and on constants; with these as a key, the compiled kernel is found in a dictionary and called
directly. The call leaves out what Triton prepares for the hooks of profilers at every launch, unless there are any. It
is not part of Triton's public interface, so only versions that it was seen to work with get it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from monkeyjump.ops.kernels.tiles import INTERPRETED

MOST_KEYS = 4096  # of a kernel, so that batches of ever new lengths do not fill the memory
FIRST_SEEN, LAST_SEEN = (3, 6), (3, 9)  # versions of Triton whose compiled kernels were called directly


def knows_compiled_kernels(version: str) -> bool:
    """Whether this version of Triton is one of those in which compiled kernels were called directly."""
    major, minor, *_ = version.split(".")
    return FIRST_SEEN <= (int(major), int(minor)) <= LAST_SEEN


DIRECT = knows_compiled_kernels(triton.__version__)
_named: ContextVar[dict[Any, Callable[[], None]] | None] = ContextVar("_named", default=None)


@contextmanager
def compiled_together(threads: int = 8) -> Iterator[dict[Any, Callable[[], None]]]:
    """Launches of this thread inside only name the kernels they need; on leaving, all are compiled at the same time.

    What such launches should have written is undefined. Triton gives the GIL away while it compiles, so that the
    twenty kernels of a training step take the time of three.
    """
    named: dict[Any, Callable[[], None]] = {}
    token = _named.set(named)
    try:
        yield named
    finally:
        _named.reset(token)
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(compile) for compile in named.values()]:
            done.result()


class Launcher:
    """One kernel and what has been compiled of it."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.compiled: dict[tuple, Any] = {}
        # where the arguments begin that are constants to the compiler: they come last
        self.constants = 0 if INTERPRETED else sum(not parameter.is_constexpr for parameter in kernel.params)

    def __call__(self, grid: tuple[int, int], *args: Any, warps: int = 4, stages: int = 3) -> None:
        """Launch with all arguments of the kernel, in their order; `warps` and `stages` must follow from these."""
        if INTERPRETED:
            self.kernel[grid](*args)
            return
        device = _device(args)
        if device != torch.cuda.current_device():  # Triton launches on the current one
            with torch.cuda.device(device):
                self(grid, *args, warps=warps, stages=stages)
            return
        if not DIRECT:
            self.kernel[grid](*args, num_warps=warps, num_stages=stages)
            return
        variant = (device, *_traits(args[: self.constants]), args[self.constants :])
        compiled = self.compiled.get(variant)
        if compiled is not None:
            _launch(compiled, device, (*grid, 1), args)
            return
        if len(self.compiled) == MOST_KEYS:
            self.compiled.clear()
        named = _named.get()
        if named is None:
            self.compiled[variant] = self.kernel[grid](*args, num_warps=warps, num_stages=stages)
        else:
            named[self, variant] = partial(self._compile, variant, device, grid, args, warps, stages)

    def _compile(
        self, variant: tuple, device: int, grid: tuple[int, int], args: tuple, warps: int, stages: int
    ) -> None:
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # a new thread knows no context of the device until it has asked for something
            compiled = self.kernel.warmup(*args, grid=grid, num_warps=warps, num_stages=stages)
            _ = compiled.run  # what launches it is compiled now, too
            self.compiled[variant] = compiled


def _launch(compiled: Any, device: int, grid: tuple[int, int, int], args: tuple) -> None:
    """Do what `compiled[grid](*args)` does."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):  # a chain of hooks, or one in its place
        compiled[grid](*args)
        return
    stream = driver.active.get_current_stream(device)
    # the arguments for hooks are None: there are neither metadata for them nor hooks
    compiled.run(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *args)


def _device(args: Iterable[Any]) -> int:
    """The device of the first tensor, or of the first tuple that begins with one (a tuple may hold none)."""
    for arg in args:
        first = arg[0] if type(arg) is tuple else arg
        if isinstance(first, Tensor):
            return first.get_device()
    raise ValueError("a kernel needs a tensor")


def _traits(args: Iterable[Any]) -> list[Any]:
    """What tells the variants of a kernel apart, which floats do not. It runs at every launch, so it must be fast."""
    found: list[Any] = []
    for arg in args:
        kind = type(arg)
        if kind is int or arg is None:
            found.append(arg)  # Triton needs less than the value, but finding out what takes longer than a look-up
        elif kind is tuple:
            found.append(len(arg))
            found += arg if type(arg[0]) is int else _traits(arg)
        elif kind is not float:  # a tensor
            found.append(arg.dtype)
            found.append(arg.data_ptr() & 15)
    return found
