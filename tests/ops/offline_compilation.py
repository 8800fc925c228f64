"""Compile every kernel for a GPU on a machine without one; run as a script, one line for each kernel that compiles.

The interpreter runs kernels as Python and knows nothing of the compiler's rules: types that do not match, code behind a
`return`, a name that becomes a constant. The compiler needs no GPU, only a driver that says which one to build for.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver
from triton.runtime.jit import JITFunction


class Hopper(CudaDriver):
    """Stands for an H100 or H200 as far as the compiler asks."""

    def __init__(self) -> None:
        """No library is loaded and no context is made."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_device_capability(self, device: int = 0) -> tuple[int, int]:
        return 9, 0


launch = JITFunction.run


SHARED_MEMORY = 232_448  # bytes of a program, on this GPU


def compile_only(self: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
    compiled = launch(self, *args, grid=grid, warmup=True, **options)
    assert compiled.metadata.shared <= SHARED_MEMORY, f"{self.__name__} needs {compiled.metadata.shared} bytes"
    print(f"{self.fn.__module__.rpartition('.')[2]}.{self.__name__}")


def low_rank_kernels(rank: int, projections: int) -> None:
    """Every launcher once with and once without its optional parts, of a wide x and of a narrow one."""
    from monkeyjump.ops.kernels import lora, propulsion
    from monkeyjump.ops.kernels.partial_sums import total
    from monkeyjump.ops.lowrank import Dropout, Strengths

    N, wide = 64, 80
    base, Bs = torch.randn(N, wide).bfloat16(), [torch.randn(wide, rank)] * projections
    cases = ((96, Dropout(torch.tensor(1), 0.1), None, torch.rand(N, 1)), (1040, None, torch.rand(rank), None))
    for D, dropout, diagonal, gate in cases:
        x, As = torch.randn(N, D).bfloat16(), [torch.randn(rank, D)] * projections
        z = lora.down(x, As, dropout)
        strengths = Strengths(0.5, (gate,) * projections, (diagonal,) * projections)
        bases = [None if gate is None else base] * projections
        biases = [base[0] if gate is None else None] * projections
        lora.up(bases, z, Bs, strengths, [base] * projections, biases)
        dz, ups = lora.up_backward([base] * projections, z, Bs, strengths, diagonal is None)
        downs = lora.down_backward(x, dz, As, dropout, x)
        if dropout is not None:
            lora.down_backward(None, dz, As, dropout, x)
            lora.down_backward(x, dz, As, dropout, None)
        propulsion.scale(base, torch.rand(wide), 15, gate, 1)
        propulsion.scale_backward(base, base, torch.rand(wide), 15, gate, 1)
        total([ups, *downs])


def lora_sums_kernels(rank: int, projections: int, width: int, gated: bool) -> None:
    """Few columns, narrow outputs beside a wide one; gates and a mask, or diagonals."""
    from monkeyjump.ops.kernels import lora, lora_sums
    from monkeyjump.ops.lowrank import Dropout, Strengths

    N, outs, none = 128, (width, *[128] * (projections - 1)), (None,) * projections
    x, bases = torch.randn(N, width).bfloat16(), [torch.randn(N, out).bfloat16() for out in outs]
    As, Bs = [torch.randn(rank, width)] * projections, [torch.randn(out, rank) for out in outs]
    z = torch.randn(N, projections * rank)
    gates, diagonals = (torch.rand(N, 2 if rank > 1 else 1),) * projections, (torch.rand(rank),) * projections
    strengths = Strengths(0.5, gates, none) if gated else Strengths(0.5, none, diagonals)
    lora.down(x, As, Dropout(torch.tensor(1), 0.1) if gated else None, kept=z.bfloat16() if gated else None)
    lora.up(bases if gated else none, z, Bs, strengths, bases, none if gated else [base[0] for base in bases])
    lora_sums.LEAST_DY = 0
    lora.up_backward(bases, z, Bs, strengths, not gated)


def few_tokens(rank: int, width: int, experts: int = 1, dtype: torch.dtype = torch.bfloat16, cases: int = 2) -> None:
    """Both ways of one launch, with and without their optional parts."""
    from monkeyjump.ops.kernels import lora_few_tokens
    from monkeyjump.ops.lowrank import Dropout, Strengths, Update

    N, outs, columns = 8, (80, 16), rank * experts
    x, bases = torch.randn(N, width).to(dtype), [torch.randn(N, out).to(dtype) for out in outs]
    As, Bs = [torch.randn(rank, width)] * 2, [torch.randn(out, columns) for out in outs]
    parts = ((Dropout(torch.tensor(1), 0.1), None, torch.rand(N, experts)), (None, torch.rand(columns), None))
    for dropout, diagonal, gate in parts[:cases]:
        update = Update(As, Bs, Strengths(0.5, (gate,) * 2, (diagonal,) * 2), dropout)
        lora_few_tokens.at_once(x, update, bases, bases)


def wide_products() -> None:
    """More columns than fit beside a tile of full width."""
    from monkeyjump.ops.kernels import lora, lora_few_tokens

    few_tokens(lora_few_tokens.MOST_COLUMNS, 896, dtype=torch.float32, cases=1)
    lora.down(torch.randn(64, 896).bfloat16(), [torch.randn(64, 896)] * 3, None)


def logits_kernels(dtype: torch.dtype, experts: int) -> None:
    """The same kernels as learned routers use them."""
    from monkeyjump.ops.kernels import lora

    x, weights = torch.randn(64, 96).to(dtype), [torch.randn(experts, 96)] * 3
    logits = lora.down(x, weights, None, precise=True)
    lora.down_backward(x, logits, weights, None, torch.empty_like(x), precise=True)
    lora.down_backward(x, logits, weights, None, None, precise=True)


def routing_kernels(dtype: torch.dtype, experts: int, width: int) -> None:
    from monkeyjump.ops.kernels import route

    h, queries = torch.randn(64, width).to(dtype), torch.ones(64, dtype=torch.bool)
    centers, settings = list(torch.randn(experts, width)), route.Routing(1, 0.5, True, 1, True)
    route.token_gates(h, centers, settings)
    sums, counts = list(torch.empty(experts, width)), list(torch.empty(experts))
    route.token_gates(h, centers, settings, queries, sums, counts)
    if experts < route.MOST_EXPERTS:
        route.token_gates(h, centers, settings, mean=torch.rand(width))
        route.token_gates(h, centers, settings, queries, sums, counts, torch.rand(width))


def clustering_kernels(dtype: torch.dtype, clusters: int) -> None:
    """Ten restarts of a hidden size of today."""
    from monkeyjump.ops.kernels import kmeans

    x, inverse, centers = torch.randn(1, 256, 896).to(dtype), torch.rand(1, 256), torch.randn(1, 10, clusters, 896)
    labels, _ = kmeans.nearest(x, inverse, centers)
    kmeans.sums(x, inverse, labels, clusters)
    if dtype == torch.bfloat16:  # the loop of `nearest`, which takes the compiler long
        kmeans.chords(x, inverse, centers.flatten(1, 2), 4e-6)


if __name__ == "__main__":
    from monkeyjump.ops.kernels import route

    triton.runtime.driver.set_active(Hopper())
    JITFunction.run = compile_only
    torch.cuda.current_device = lambda: -1  # where the tensors are, which are only looked at
    # every loop over ranks, projections and experts is written out, and takes the compiler as much longer
    low_rank_kernels(rank=16, projections=2)
    lora_sums_kernels(rank=2, projections=2, width=896, gated=True)
    lora_sums_kernels(rank=4, projections=1, width=1040, gated=False)
    lora_sums_kernels(rank=1, projections=1, width=96, gated=False)
    few_tokens(rank=2, width=896)
    few_tokens(rank=1, width=4112, cases=1)  # in more steps than are loaded early
    few_tokens(rank=2, width=96, experts=8)  # through the matrix units
    wide_products()
    logits_kernels(torch.bfloat16, experts=4)
    # in one step along a row, in many, and by the matrix units
    for width, experts in ((96, 2), (4096, 2), (896, route.BY_SUMS + 1)):
        routing_kernels(torch.bfloat16, experts, width)
    clustering_kernels(torch.bfloat16, clusters=4)
    clustering_kernels(torch.float32, clusters=16)
