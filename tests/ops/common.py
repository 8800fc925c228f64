"""Where the kernels run, and tensors that show what a kernel reads and writes besides its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MARGIN = 64  # entries before and after: what is 16-byte aligned stays so
# of an output whose operands are rounded to the dtype; the interpreter cuts fp32 off to bf16 where a GPU rounds
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 6e-3 if DEVICE.type == "cuda" else 1.5e-2}


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
    """Normal numbers on the device of the tests, the same on every device, between NaNs."""
    values = scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed * 7919 + math.prod(shape)))
    return guarded(values.to(dtype))


def uniform(*shape: int, seed: int = 0) -> torch.Tensor:
    values = torch.rand(shape, generator=torch.Generator().manual_seed(seed * 7919 + math.prod(shape)))
    return guarded(values)


def guarded(values: torch.Tensor) -> torch.Tensor:
    """A copy whose neighbours in memory are NaN: an entry read by mistake shows."""
    memory = torch.full((values.numel() + 2 * MARGIN,), math.nan, dtype=values.dtype, device=DEVICE)
    inside = memory[MARGIN : MARGIN + values.numel()]
    return inside.copy_(values.flatten()).view(values.shape)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """|found - expected| / |expected|, in float64; NaN anywhere in `found` gives NaN, which no tolerance allows."""
    assert found.shape == expected.shape
    difference = (found.detach().double() - expected.detach().double()).norm()
    size = expected.detach().double().norm()
    return float(difference if size == 0 else difference / size)


class Poison:
    """`torch.empty` and its kin give NaNs between NaNs: what is not written, or written outside, shows."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.memories: list[tuple[torch.Tensor, int]] = []
        self.full = torch.full
        empty = torch.empty

        def poisoned(*size: Any, **kwargs: Any) -> torch.Tensor:
            given = empty(*size, **kwargs)
            return self.like(given) if given.is_floating_point() and not given.is_meta else given

        def as_like(other: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            return poisoned(other.shape, **{"dtype": other.dtype, "device": other.device, **kwargs})

        def as_new(other: torch.Tensor, *size: Any, **kwargs: Any) -> torch.Tensor:
            return poisoned(*size, **{"dtype": other.dtype, "device": other.device, **kwargs})

        patch.setattr(torch, "empty", poisoned)
        patch.setattr(torch, "empty_like", as_like)
        patch.setattr(torch.Tensor, "new_empty", as_new)

    def like(self, given: torch.Tensor) -> torch.Tensor:
        memory = self.full((given.numel() + 2 * MARGIN,), math.nan, dtype=given.dtype, device=given.device)
        self.memories.append((memory, given.numel()))
        return memory[MARGIN : MARGIN + given.numel()].view(given.shape)

    def check(self) -> None:
        """Nothing was written outside of a tensor, and kernels did get poisoned memory."""
        assert self.memories, "no tensor was made with torch.empty: the poison found nothing to poison"
        for memory, size in self.memories:
            assert memory[:MARGIN].isnan().all(), "written before the beginning of a tensor"
            assert memory[MARGIN + size :].isnan().all(), "written past the end of a tensor"


def gradients_of(
    function: Callable[..., torch.Tensor], inputs: dict[str, torch.Tensor], dy: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The output of `function(**inputs)` and the gradient of every input for the output gradient `dy`."""
    leaves = {name: value.detach().requires_grad_() for name, value in inputs.items()}
    out = function(**leaves)
    found = torch.autograd.grad(out, list(leaves.values()), dy.to(out.dtype))
    return out.detach(), dict(zip(leaves, found, strict=True))


def gates_and_sums(
    h: torch.Tensor, centers: list[torch.Tensor], queries: torch.Tensor | None, how: Any, mean: Any = None
) -> Any:
    """Gates of the kernels, with the sums [E, D] and counts [E] that they write."""
    from monkeyjump.ops import routing

    sums, counts = torch.empty(len(centers), h.shape[-1], device=h.device), torch.empty(len(centers), device=h.device)
    return routing.fused_gates(h, centers, how, queries, sums.unbind(), counts.unbind(), mean), sums, counts
