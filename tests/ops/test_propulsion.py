"""Propulsion's power without a logarithm: exact to fp32 for every offset and degree, cheap in a compiled step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd

from monkeyjump.ops import reference as ops
from tests.helpers import COMPILING

pytestmark = COMPILING
EPS, TINY = 2.0**-24, torch.finfo(torch.float32).tiny
# tiny, ordinary, around -1 (p = 0), around -2 (p = -1, whose even powers are 1), beyond
OFFSETS = [0.0, 1e-12, 1e-9, -1e-9, 1e-7, -1e-7, 2e-4, -3e-3, 0.05, -0.3, 0.7, 1.4]
OFFSETS += [-0.999, -1.0, -1.001, -1.5, -1.999, -2.0, -2.001, -2.7]


def exact(offset: torch.Tensor, degree: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(1 + o) ** n - 1, of which a tiny offset survives, and its slope, in float64."""
    o = offset.double()
    near = torch.expm1(degree * torch.log1p(o.clamp_min(-0.5)))
    return torch.where(o > -0.5, near, (1 + o) ** degree - 1), degree * (1 + o) ** (degree - 1)


@pytest.mark.parametrize("degree", range(1, 33))
def test_power_and_its_slope(degree: int) -> None:
    offset = torch.tensor(OFFSETS, requires_grad=True)
    f = ops.power_minus_one(offset, degree)
    (found,) = torch.autograd.grad(f.sum(), offset)
    power, slope = exact(offset.detach(), degree)
    # 3 roundings of the result, and 3 of the offset: what the conditioning of the power makes of those
    allowed = 3 * EPS * (power.abs() + (slope * offset.detach()).abs())
    assert ((f.detach().double() - power).abs() <= allowed).all()
    # 1 + o is rounded before it is raised, and every product after it
    assert ((found.double() - slope).abs() <= 2 * degree * EPS * slope.abs() + TINY).all()


def test_second_derivative() -> None:
    offset = torch.tensor([0.1, -0.4, -1.3], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda o: ops.power_minus_one(o, 5), offset)


def case(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {
        "base": torch.randn(2, 9, 16, generator=draw).to(dtype),
        "offset": 0.1 * torch.randn(16, generator=draw),
        "gate": torch.rand(2, 9, 1, generator=draw),
        "dy": torch.randn(2, 9, 16, generator=draw).to(dtype),
    }


def scaled(base: torch.Tensor, offset: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return base + ops.scale_output(base, offset, 15, gate)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_step(dtype: torch.dtype) -> None:
    """Products and sums alone, in both directions; nothing but its own inputs is kept for backward."""
    graphs: list[Any] = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph)

    given = case(dtype)
    base, offset = given["base"].clone().requires_grad_(), given["offset"].clone().requires_grad_()
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    y = torch.compile(scaled, fullgraph=True, backend=backend)(base, offset, given["gate"])
    y.backward(given["dy"])
    forward, backward = graphs
    ops_used = {str(node.target).split(".")[1] for g in graphs for node in g.graph.nodes if node.op == "call_function"}
    assert ops_used <= {"mul", "add", "sum", "view", "_to_copy", "ones_like", "full_like", "full", "clone"}, ops_used
    assert len(forward.graph.nodes) < 30
    kept = [node.meta["val"] for node in backward.graph.nodes if node.op == "placeholder"]
    assert sum(value.numel() == base.numel() for value in kept) == 2  # base and dy
    assert all(value.numel() <= base.numel() // 16 for value in kept if value.numel() < base.numel())

    wide64 = {name: value.double() for name, value in given.items()}
    base64, offset64 = wide64["base"].requires_grad_(), wide64["offset"].requires_grad_()
    y64 = base64 * (1 + wide64["gate"] * ((1 + offset64) ** 15 - 1))
    y64.backward(wide64["dy"])
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    for found, expected in ((y, y64), (base.grad, base64.grad), (offset.grad, offset64.grad)):
        assert found is not None
        assert expected is not None
        assert float((found.detach().double() - expected.detach()).norm() / expected.detach().norm()) < tolerance
