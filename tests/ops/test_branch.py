"""Short kernels on a branch beside the frozen products: the same numbers, whatever runs at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from tests.ops.common import DEVICE, normal, uniform

ops = pytest.importorskip("monkeyjump.ops.grouped")
OUTS = (48, 16, 16)


class Pretended:
    """A branch that is there, on the one stream there is: the kernels are those of a branch, in their order."""

    apart = True

    def __init__(self, tensor: torch.Tensor) -> None:
        pass

    def beside(self) -> Any:
        return nullcontext()

    def reached(self) -> None:
        return None

    def join(self, reached: None = None) -> None:
        pass


def projections(outs: Sequence[int], tokens: int, width: int, rank: int, dtype: torch.dtype) -> list[Any]:
    gates = uniform(tokens, len(outs), seed=5)
    return [
        ops.Projection(
            weight=normal(out, width, seed=10 + m, dtype=dtype, scale=width**-0.5),
            bias=None,
            A=normal(rank, width, seed=30 + m, scale=width**-0.5),
            B=normal(out, rank, seed=40 + m, scale=0.5),
            gate=gates[:, m : m + 1],
            diagonal=None,
        )
        for m, out in enumerate(outs)
    ]


def together(given: Sequence[Any]) -> Any:
    return ops.Frozen([torch.cat([one.weight for one in given])], [None])


def leaves_of(given: Sequence[Any], trained: Sequence[str]) -> list[torch.Tensor]:
    return [getattr(one, name).requires_grad_() for one in given for name in trained]


def results(x: torch.Tensor, given: list[Any], leaves: list[torch.Tensor], seed: torch.Tensor) -> list[torch.Tensor]:
    ys = ops.grouped_lora(x, given, 0.7, 0.3, seed, together(given))
    dys = [torch.sin(y.detach() * 3) for y in ys]
    return [*(y.detach() for y in ys), *torch.autograd.grad(ys, leaves, dys)]


@pytest.mark.parametrize("trained", [("A", "B"), ("B",), ("A", "B", "gate")], ids="-".join)
@pytest.mark.parametrize("with_dx", [True, False])
def test_branched_is_straight(
    trained: tuple[str, ...], with_dx: bool, monkeypatch: pytest.MonkeyPatch, poison: None
) -> None:
    x, seed = normal(70, 40, seed=1).requires_grad_(with_dx), torch.tensor(3, device=DEVICE)
    given = projections(OUTS, 70, 40, 2, torch.float32)
    leaves = leaves_of(given, trained) + ([x] if with_dx else [])
    straight = results(x, given, leaves, seed)
    monkeypatch.setattr(ops, "Branch", Pretended)
    for found, expected in zip(results(x, given, leaves, seed), straight, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
def test_a_captured_step_is_an_eager_one() -> None:
    """At a real size, where branch and product do overlap, on new tokens in every replay."""
    x = normal(4096, 896, seed=1, dtype=torch.bfloat16).requires_grad_()
    seed = torch.tensor(3, device=DEVICE)
    given = projections((896, 128, 128), 4096, 896, 2, torch.bfloat16)
    leaves = [*leaves_of(given, ("A", "B")), x]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            results(x, given, leaves, seed)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results(x, given, leaves, seed)
    for replay in range(20):
        with torch.no_grad():
            x.copy_(normal(4096, 896, seed=100 + replay, dtype=torch.bfloat16))
            seed.fill_(replay)
        graph.replay()
        for found, expected in zip(captured, results(x, given, leaves, seed), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2 * float(expected.abs().max()))
