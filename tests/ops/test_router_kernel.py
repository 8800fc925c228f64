"""The centroid router takes its kernel where the kernel knows the way, decides the same, and steps aside elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import monkeyjump as mj
from monkeyjump.ops.dispatch import implementation
from monkeyjump.routing import centroid as router
from monkeyjump.routing.granularity import Selection
from tests.helpers import Decided, decided
from tests.ops.common import DEVICE, error, normal

routing = pytest.importorskip("monkeyjump.ops.routing")


def centers(experts: int, width: int) -> list[torch.Tensor]:
    return [normal(width, seed=3 + e) for e in range(experts)]


@pytest.mark.parametrize(("experts", "fits"), [(1, True), (16, True), (17, False)])
def test_what_is_supported(experts: int, fits: bool) -> None:
    """At most 16 experts, as many as a matrix instruction has columns."""
    assert routing.supported(experts) == fits


def decide(implementation_: str, h: torch.Tensor, c: list[torch.Tensor], how: mj.MonkeyJumpConfig, **given: Any) -> Any:
    arguments = {"mean": None, "selection": Selection(), **given}
    torch.manual_seed(0)
    with implementation(implementation_):
        return decided(h, c, config=how, **arguments)


def config(**changes: Any) -> mj.MonkeyJumpConfig:
    return mj.MonkeyJumpConfig(target_modules=["q_proj"], **changes)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the kernels are asked for, each time."""
    called: list[str] = []
    original = routing.fused_gates

    def spy(*args: Any, **named: Any) -> Any:
        called.append("gates and sums" if len(args) > 4 else "gates")
        return original(*args, **named)

    monkeypatch.setattr(routing, "fused_gates", spy)
    return called


def assert_same_decision(found: Decided, other: Decided) -> None:
    torch.testing.assert_close(found.gates, other.gates, rtol=1e-5, atol=1e-6)
    assert error(found.sums, other.sums) < 2e-6
    assert torch.equal(found.counts, other.counts)


@pytest.mark.parametrize("with_statistics", [True, False])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"top_k": 3, "temperature": 0.3},
        {"top_k": 1, "renormalize": True},
        {"ema_assign": "top1"},
        {"ema_assign": "topk"},
        {"ema_space": "raw"},
        {"mean_gate": 0.5},
        {"route_space": "centered", "ema_assign": "topk"},
        {"route_space": "centered", "ema_space": "raw", "mean_gate": 1.0, "temperature": 0.2},
    ],
    ids=str,
)
def test_the_router_takes_the_kernel_and_decides_the_same(
    changes: dict[str, Any], with_statistics: bool, launches: list[str]
) -> None:
    h, c, how = normal(2, 9, 20, seed=1, scale=2.0), centers(3, 20), config(**changes)
    mask = torch.ones(2, 9, dtype=torch.bool, device=DEVICE)
    mask[0, :4] = False
    given = {"selection": Selection(queries=mask), "staged": with_statistics}
    if how.route_space == "centered":
        given["mean"] = 0.1 * normal(20, seed=8)
    found = decide("triton", h, c, how, **given)
    assert launches == ["gates and sums" if with_statistics else "gates"]
    assert_same_decision(found, decide("torch", h, c, how, **given))
    assert len(launches) == 1


ASIDE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "another similarity": ({"similarity": "dot"}, {}),
    "noise": ({"jitter": 0.5}, {"training": True}),
    "one decision for a row": ({}, {"selection": Selection(source=torch.tensor([[3], [1]]))}),
    "pooled rows": ({}, {"selection": Selection(pool="mean")}),
}


@pytest.mark.parametrize("name", ASIDE)
def test_the_kernel_steps_aside_for_what_it_does_not_know(name: str, launches: list[str]) -> None:
    changes, given = ASIDE[name]
    h, c, how = normal(2, 9, 20, seed=1), centers(3, 20), config(**changes)
    assert_same_decision(decide("triton", h, c, how, **given), decide("torch", h, c, how, **given))
    assert not launches


def test_jitter_is_for_training_alone(launches: list[str]) -> None:
    decide("triton", normal(2, 9, 20), centers(3, 20), config(jitter=0.5))
    assert launches


def test_beyond_the_limits_torch_routes(launches: list[str]) -> None:
    h, c = normal(1, 3, 8, seed=1), centers(17, 8)
    assert_same_decision(decide("triton", h, c, config(top_k=1)), decide("torch", h, c, config(top_k=1)))
    assert not launches


def test_float64_states_take_torch(launches: list[str]) -> None:
    h, c = normal(1, 3, 8, seed=1).double(), centers(2, 8)
    decide("triton", h, c, config())
    assert not launches


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_router_stages_as_an_eager_one() -> None:
    """One op in the graph, which writes into the tensors of the layers: nothing is copied there afterwards."""
    from torch._dynamo.backends.registry import lookup_backend

    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return lookup_backend("aot_eager")(graph, inputs)

    h, c, how = normal(2, 9, 20, seed=1), centers(3, 20), config()

    def staged() -> router.Staged:
        return router.Staged([normal(20, seed=30 + e) for e in range(3)], [normal(1, seed=e)[0] for e in range(3)])

    def stage(h: torch.Tensor, into: router.Staged) -> torch.Tensor:
        return router.decide(h, c, None, Selection(), how, training=True, into=into)

    eager, compiled = staged(), staged()
    with implementation("triton"):
        gates = stage(h, eager)
        assert torch.equal(torch.compile(stage, backend=backend, fullgraph=True)(h, compiled), gates)
    for found, expected in zip(compiled.sums + compiled.counts, eager.sums + eager.counts, strict=True):
        assert torch.equal(found, expected)
    calls = [str(node.target) for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    assert sum("fused_gates_into" in call for call in calls) == 1
    assert not [call for call in calls if "copy" in call]


def test_routing_has_no_gradient() -> None:
    h = normal(1, 5, 8, seed=1).requires_grad_()
    assert not decide("triton", h, centers(2, 8), config()).gates.requires_grad
