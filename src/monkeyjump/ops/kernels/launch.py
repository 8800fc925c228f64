"""Launching a kernel again without asking Triton what kind of arguments it has.

Triton looks at every argument of every launch to find the variant it has compiled: 20 to 50 microseconds of host time
for kernels with many arguments, as long as several launches. The variant depends on dtypes, on integers, and on
pointers only by their alignment; with these as a key, the compiled kernel is found in a dictionary and called directly.
"""

from __future__ import annotations

from typing import Any

import torch

from monkeyjump.ops.kernels.tiles import INTERPRETED


class Launcher:
    """One kernel and what has been compiled of it."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.compiled: dict[tuple, Any] = {}

    def __call__(self, grid: tuple[int, int], *args: Any, warps: int = 4, stages: int = 3) -> None:
        """Launch with all arguments of the kernel, in their order; `warps` and `stages` must follow from these."""
        if INTERPRETED:
            self.kernel[grid](*args)
            return
        variant = (torch.cuda.current_device(), *_traits(args))
        compiled = self.compiled.get(variant)
        if compiled is None:
            self.compiled[variant] = self.kernel[grid](*args, num_warps=warps, num_stages=stages)
        else:
            compiled[(*grid, 1)](*args)


def _traits(args: tuple) -> list[Any]:
    """What Triton specialises a kernel on: dtypes, alignment of pointers, integers; not floats."""
    found: list[Any] = []
    for arg in args:
        if isinstance(arg, torch.Tensor):
            found += (arg.dtype, arg.data_ptr() & 15)
        elif type(arg) is tuple:
            found.append(len(arg))
            found += _traits(arg)
        elif type(arg) is not float:
            found.append(arg)
    return found
