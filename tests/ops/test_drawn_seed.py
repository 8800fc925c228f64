"""The seed of a mask as a registered op: random, drawn anew by every call, and kept for backward by the compiler."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers import COMPILING
from tests.ops.common import DEVICE, normal

grouped_products = pytest.importorskip("monkeyjump.ops.grouped_products")
pytestmark = COMPILING


def test_a_seed_is_registered_as_torch_asks() -> None:
    """All but the check that two calls give the same, which they must not."""
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    assert set(torch.library.opcheck(grouped_products.drawn_seed, (normal(7, 10),), test_utils=checks).values()) == {
        "SUCCESS"
    }
    found = [grouped_products.drawn_seed(normal(3, dtype=torch.bfloat16).requires_grad_()) for _ in range(4)]
    assert all((seed.shape, seed.dtype, seed.device.type) == ((), torch.int64, DEVICE.type) for seed in found)
    assert len({int(seed) for seed in found}) == 4
    assert all(0 <= int(seed) < 2**31 and not seed.requires_grad for seed in found)


def test_a_compiled_backward_has_the_seed_of_its_forward() -> None:
    """Drawn once for each tensor in the graph, and never again for backward."""

    def function(x: torch.Tensor) -> torch.Tensor:
        seeds = grouped_products.drawn_seed(x), grouped_products.drawn_seed(2 * x)
        return torch.stack([(x * seed).sum() for seed in seeds])

    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    tokens = normal(3).requires_grad_()
    for _ in range(2):
        values = compiled(tokens)
        assert values[0] != values[1]
        for value in values:
            (slope,) = torch.autograd.grad(value, tokens, retain_graph=True)
            torch.testing.assert_close(slope, (value / tokens.sum()).detach().expand(3), rtol=1e-4, atol=0.0)
    calls = [[node for node in graph.graph.nodes if node.op == "call_function"] for graph in graphs]
    drawn = [sum("drawn_seed" in str(node.target) for node in nodes) for nodes in calls]
    assert drawn == [2, 0]
