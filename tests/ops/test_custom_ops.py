"""The kernels as registered ops, and the same functions under torch.compile: one graph, the numbers of eager mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.utils._pytree as pytree
from torch._ops import OpOverload

from monkeyjump.ops.lowrank import GateColumns
from tests.helpers import COMPILING
from tests.ops.common import DEVICE, TOLERANCE, error, gates_and_sums, gradients_of, normal, uniform

pytest.importorskip("monkeyjump.ops.gated_lora")
from monkeyjump.ops import gated_lora, grouped_products, routing

BACKEND = "aot_eager"  # traces forward and backward as inductor does, without a minute of C++ compilation
pytestmark = COMPILING


N, D, OUT, R = 7, 10, 6, 2


def leaf(*shape: int, seed: int) -> torch.Tensor:
    return normal(*shape, seed=seed).requires_grad_()


def seed() -> torch.Tensor:
    return torch.tensor(77, device=DEVICE)


def x() -> torch.Tensor:
    return normal(N, D, seed=1)


def two_a() -> list[torch.Tensor]:
    return [leaf(R, D, seed=2), leaf(R, D, seed=3)]


def dz() -> torch.Tensor:
    return normal(N, 2 * R, seed=4)


OUTS = (OUT, 3)


def group(gates: int = 0, diagonal: bool = False) -> tuple[Any, ...]:
    """Two projections of one input, whose weights are one: the arguments of `grouped_lora_op`."""
    columns = R * max(gates, 1)
    return (
        *(leaf(N, D, seed=1), None, [normal(sum(OUTS), D, seed=6)], [normal(sum(OUTS), seed=7)]),
        *(two_a(), [leaf(out, columns, seed=8 + m) for m, out in enumerate(OUTS)]),
        [uniform(N, gates, seed=10 + m).requires_grad_() for m in range(2)] if gates else [],
        [leaf(columns, seed=12 + m) for m in range(2)] if diagonal else [],
        *(seed(), 0.3, 0.7, [1, max(gates, 1), 0, 0], True, gates > 0),
    )


def detached(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, values)


def group_gradients() -> tuple[list[torch.Tensor], Any]:
    return [normal(N, out, seed=20 + m) for m, out in enumerate(OUTS)], detached(group())


def centers() -> list[torch.Tensor]:
    return [normal(D, seed=20 + e) for e in range(3)]


def _backward_arguments(with_x: bool) -> tuple[Any, ...]:
    dys, (tokens, _, weights, _, As, Bs, *_) = group_gradients()
    return (
        dys,
        tokens if with_x else None,
        normal(N, 2 * R),
        weights,
        As,
        Bs,
        [],
        [],
        seed(),
        0.3,
        0.7,
        [1, 1, 0, 0],
        True,
    )


def staged() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Where sums and counts are written: tensors of their own, as the layers of a block have them."""
    return [normal(D, seed=30 + e) for e in range(3)], [normal(1, seed=40 + e)[0] for e in range(3)]


OPS: dict[str, tuple[Any, Callable[[], tuple]]] = {
    "gated": (
        grouped_products.forward_op,
        lambda: (
            x(),
            normal(N, OUT),
            [],
            [],
            [normal(R, D)],
            [normal(OUT, R)],
            [],
            [],
            None,
            0.0,
            0.7,
            [1, 1, 0],
            False,
        ),
    ),
    "grouped": (gated_lora.grouped_lora_op, group),
    "grouped, gates and diagonals": (gated_lora.grouped_lora_op, lambda: group(gates=3, diagonal=True)),
    "grouped_forward": (
        grouped_products.forward_op,
        lambda: (*(given := detached(group(gates=3, diagonal=True)))[:-2], given[-1]),
    ),
    "grouped_backward": (grouped_products.backward_op, lambda: _backward_arguments(with_x=True)),
    "grouped_backward, frozen A": (grouped_products.backward_op, lambda: _backward_arguments(with_x=False)),
    "grouped_up_backward": (
        grouped_products.up_backward_op,
        lambda: (group_gradients()[0], normal(N, 2 * R), group_gradients()[1][5], [], [], 0.7, [1, 1, 0, 0]),
    ),
    "grouped_down_backward": (
        grouped_products.down_backward_op,
        lambda: (group_gradients()[0], x(), dz(), normal(2, 5), *group_gradients()[1][2:5:2], seed(), 0.3, True),
    ),
    "gates": (routing.gates_op, lambda: (x(), [*centers(), normal(D)], [2, 2], [0.5, 1.0], [True, False, True])),
    "gates_into": (
        routing.gates_into_op,
        lambda: (
            *(x(), centers(), torch.arange(N, device=DEVICE) > 2, *staged()),
            *([2, 2], [0.5, 1.0], [False, False, False]),
        ),
    ),
}


@pytest.mark.parametrize("name", OPS)
def test_registered_as_torch_asks(name: str) -> None:
    """Schema, fake tensors with the shapes and dtypes of the real ones, autograd, and all that under the compiler."""
    op, arguments = OPS[name]
    found = torch.library.opcheck(op, arguments())
    assert set(found.values()) == {"SUCCESS"}


def test_every_registered_op_is_checked() -> None:
    """An op added later must be added here too."""
    found = {**vars(gated_lora), **vars(grouped_products), **vars(routing)}
    registered = {value for value in found.values() if isinstance(value, OpOverload)}
    checked = {op for op, _ in OPS.values()}
    assert registered == checked | {grouped_products.drawn_seed}  # which is random, and has tests of its own


def test_a_group_is_taken_apart_before_it_is_compiled() -> None:
    """Both graphs hold the ops without gradient, a call of which costs the host the least."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    called: list[list[Any]] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        targets = [node.target for node in graph.graph.nodes]
        called.append([target for target in targets if getattr(target, "namespace", "") == "monkeyjump"])
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    ys = torch.compile(lambda given: gated_lora.grouped_lora_op(*given), backend=backend, fullgraph=True)(group())
    sum(y.sum() for y in ys).backward()
    assert called == [[grouped_products.forward_op], [grouped_products.backward_op]]


def test_autograd_sees_what_an_op_writes() -> None:
    """A tensor kept for backward and written into since is an error, not a wrong gradient."""
    sums, counts = staged()
    kept = normal(D, seed=1).requires_grad_() * sums[1]
    routing.gates_into_op(x(), centers(), None, sums, counts, [2, 2], [0.5, 1.0], [False, False, False])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.sum().backward()


B, T = 2, 5


def one_layer(
    x: torch.Tensor, base: torch.Tensor, A0: torch.Tensor, A1: torch.Tensor, B0: torch.Tensor, B1: torch.Tensor,
    how: dict[str, Any],
) -> torch.Tensor:  # fmt: skip
    """Two routed projections of one input, the second with a diagonal, and the sums the router makes."""
    settings = routing.Routing(2, 0.5, False, 1, True)
    gates, sums, counts = gates_and_sums(x.detach(), how["centers"], how["queries"], settings)
    mask = how["dropout"], seed()
    first = gated_lora.gated_lora(base, x, A0, B0, 0.7, gates[..., 0:1], None, *mask)
    second = gated_lora.gated_lora(base, x, A1, B1, 0.7, gates[..., 1:2], how["diagonal"], *mask)
    return torch.cat([first, second], -1).float() + (sums.sum() + (counts * how["weight"]).sum())


def layer_inputs(rank: int, dtype: torch.dtype = torch.float32) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    given = {
        "x": normal(B, T, D, seed=1, dtype=dtype),
        "base": normal(B, T, OUT, seed=2, dtype=dtype),
        "A0": normal(rank, D, seed=3, scale=0.5),
        "A1": normal(rank, D, seed=4, scale=0.5),
        "B0": normal(OUT, rank, seed=5, scale=0.5),
        "B1": normal(OUT, rank, seed=6, scale=0.5),
    }
    mask = torch.ones(B, T, dtype=torch.bool, device=DEVICE)
    mask[0, :2] = False
    how = {
        "centers": centers(),
        "queries": mask,
        "dropout": 0.0,
        "diagonal": normal(rank, seed=7),
        "weight": normal(3, seed=8),
    }
    return given, how


def compare(function: Callable[..., torch.Tensor], given: dict[str, torch.Tensor], tolerance: float) -> None:
    compiled = torch.compile(function, backend=BACKEND, fullgraph=True)
    dy = normal(*function(**given).shape, seed=9)
    results = []
    for call in (function, compiled):
        torch.manual_seed(5)
        results.append(gradients_of(call, given, dy))
    (y, found), (y_compiled, found_compiled) = results
    assert y.dtype == y_compiled.dtype
    assert error(y_compiled, y) < tolerance
    for name, gradient in found.items():
        assert gradient.dtype == found_compiled[name].dtype
        assert gradient.norm() > 0
        assert error(found_compiled[name], gradient) < tolerance, name


@pytest.mark.parametrize(("rank", "dropout"), [(R, 0.4), (9, 0.0)])
def test_compiled_equals_eager(rank: int, dropout: float) -> None:
    given, how = layer_inputs(rank)
    how["dropout"] = dropout
    compare(lambda **leaves: one_layer(**leaves, how=how), given, 2e-6)


@pytest.mark.parametrize(("rank", "dropout"), [(R, 0.0), (9, 0.4)])
def test_compiled_inference_equals_eager(rank: int, dropout: float) -> None:
    given, how = layer_inputs(rank)
    how["dropout"] = dropout
    compiled = torch.compile(one_layer, backend=BACKEND, fullgraph=True)
    with torch.no_grad():
        torch.manual_seed(5)
        expected = one_layer(**given, how=how)
        torch.manual_seed(5)
        assert error(compiled(**given, how=how), expected) < 2e-6


KINDS = ["simple", "gated", "diagonal", "frozen A", "experts on one A", "columns", "some columns"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_group_equals_eager(kind: str) -> None:
    """Several projections with one weight: outputs and every gradient; in eager mode their weights are apart."""
    number = {"gated": 2, "experts on one A": 3}.get(kind, 1)
    columns = 6 if kind == "experts on one A" else R
    given = {"x": normal(B, T, D, seed=1)}
    for m, out in enumerate(OUTS):
        given |= {f"A{m}": normal(R, D, seed=3 + m), f"B{m}": normal(out, columns, seed=5 + m)}
        given |= {f"diagonal{m}": normal(columns, seed=9 + m)} if kind == "diagonal" else {}
        given |= {f"gate{m}": uniform(B, T, number, seed=7 + m)} if kind in ("gated", "experts on one A") else {}
    if "columns" in kind:  # of one tensor, all of it or not
        given |= {"wide": uniform(B, T, 2 if kind == "columns" else 4, seed=7)}
    weight, bias = normal(sum(OUTS), D, seed=11), normal(sum(OUTS), seed=12)

    def function(x: torch.Tensor, **leaves: torch.Tensor) -> torch.Tensor:
        parts = zip(weight.split(OUTS), bias.split(OUTS), range(2), strict=True)
        columns = GateColumns(leaves["wide"], (0, 1) if kind == "columns" else (3, 1), 1) if "wide" in leaves else None
        gates = columns.by_projection() if columns else [leaves.get(f"gate{m}") for m in range(2)]
        projections = [
            gated_lora.Projection(
                *(w, b, leaves[f"A{m}"].detach() if kind == "frozen A" else leaves[f"A{m}"], leaves[f"B{m}"]),
                *(gates[m], leaves.get(f"diagonal{m}")),
            )
            for w, b, m in parts
        ]
        together = gated_lora.Frozen([weight], [bias]) if torch.compiler.is_compiling() else None
        ys = torch.cat(gated_lora.grouped_lora(x, projections, 0.7, 0.0, None, together, columns), -1)
        return ys + sum(0.01 * leaves[f"A{m}"].sum() for m in range(2)) if kind == "frozen A" else ys

    compare(function, given, 2e-6)


@pytest.mark.parametrize(("dtype", "rank"), [(torch.float16, 9), (torch.bfloat16, 2)])
def test_compiled_equals_eager_in_low_precision(dtype: torch.dtype, rank: int) -> None:
    given, how = layer_inputs(rank, dtype)
    compare(lambda **leaves: one_layer(**leaves, how=how), given, 2 * TOLERANCE[dtype])


def learned(base: torch.Tensor, x: torch.Tensor, A: torch.Tensor, B: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return gated_lora.gated_lora(base, x, A, B, 0.7, torch.softmax(gate, -1))


@pytest.mark.parametrize(("experts", "tokens"), [(2, T), (6, 1)], ids=["mixture", "shared A, gates of sequences"])
def test_compiled_gates_with_gradients(experts: int, tokens: int) -> None:
    """A learned router: the gradient reaches the gates, of the experts of one A too."""
    rank = 4
    columns = rank if experts == 2 else rank * experts
    given = {
        "base": normal(B, T, OUT, seed=1),
        "x": normal(B, T, D, seed=2),
        "A": normal(rank, D, seed=3, scale=0.5),
        "B": normal(OUT, columns, seed=4, scale=0.5),
        "gate": normal(B, tokens, experts, seed=5),
    }
    compare(learned, given, 2e-6)


def three_projections(
    x: torch.Tensor, base: torch.Tensor, As: list[torch.Tensor], B: torch.Tensor, centers: list[torch.Tensor]
) -> torch.Tensor:
    gates = routing.fused_gates(x, centers, routing.Routing(2, 0.5, False, 1, True))
    ys = [gated_lora.gated_lora(base, x, A, B, 0.7, gates[..., e : e + 1]) for e, A in enumerate(As)]
    return torch.stack(ys).sum(0)


def test_lengths_compile_no_more_than_twice() -> None:
    """Prompts of any length, no gradient: at the second length the compiler makes it a symbol."""
    compiled = torch.compile(three_projections, backend=BACKEND, fullgraph=True)
    weights = [normal(R, D, seed=3 + m) for m in range(3)], normal(OUT, R, seed=4), centers()
    for tokens in (5, 4, 3):
        x, base = normal(B, tokens, D, seed=1), normal(B, tokens, OUT, seed=2)
        with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=tokens < 4):
            found = compiled(x, base, *weights)
        assert error(found, three_projections(x, base, *weights)) < 1e-6


def test_compiled_routing_skips_padding_of_any_kind() -> None:
    """Rows that are no query hold NaN: neither sums nor counts see them."""
    h, mask = normal(B, T, D, seed=1), torch.ones(B, T, dtype=torch.bool, device=DEVICE)
    mask[0, :2] = False
    h[~mask] = torch.nan
    how = routing.Routing(2, 0.5, True, 1, True)
    compiled = torch.compile(gates_and_sums, backend=BACKEND, fullgraph=True)
    found, expected = compiled(h, centers(), mask, how), gates_and_sums(h, centers(), mask, how)
    assert torch.equal(found[0][mask], expected[0][mask])
    assert torch.equal(found[1], expected[1])
    assert torch.equal(found[2], expected[2])


@pytest.mark.parametrize("backend", [BACKEND, "inductor"])
def test_compiled_routing_writes_where_it_is_told(backend: str) -> None:
    """The same tensors hold the same sums as in eager mode, at every call."""
    how, (sums, counts) = routing.Routing(2, 0.5, False, 1, True), staged()
    compiled = torch.compile(routing.fused_gates, backend=backend, fullgraph=True)
    for step in range(3):
        h, (eager_sums, eager_counts) = normal(B, T, D, seed=50 + step), staged()
        gates = compiled(h, centers(), how, None, sums, counts)
        assert torch.equal(gates, routing.fused_gates(h, centers(), how, None, eager_sums, eager_counts))
        assert torch.equal(torch.stack(sums), torch.stack(eager_sums))
        assert torch.equal(torch.stack(counts), torch.stack(eager_counts))


def test_nothing_copies_what_compiled_routing_has_written() -> None:
    """The graph that is handed to inductor's code generation has the op alone: no clone before it, no copy after it."""
    from torch._inductor.utils import run_and_get_code

    how, (sums, counts) = routing.Routing(2, 0.5, False, 1, True), staged()
    compiled = torch.compile(routing.fused_gates, backend="inductor", fullgraph=True)
    _, code = run_and_get_code(compiled, normal(B, T, D, seed=50), centers(), how, None, sums, counts)
    assert "".join(code).count("monkeyjump.fused_gates_into.default(") == 1
    assert "copy" not in "".join(code).split("def call")[1]
    assert "cpp_fused" not in "".join(code)


def test_a_frozen_a_under_the_compiler_keeps_no_input() -> None:
    """LoRA-FA compiled: what the compiled forward hands to the backward is thin."""
    tokens = 64
    given = [normal(1, tokens, D, seed=2).requires_grad_(), normal(1, tokens, OUT, seed=1).requires_grad_()]
    A, up = normal(R, D, seed=3), normal(OUT, R, seed=4).requires_grad_()
    kept: list[int] = []
    compiled = torch.compile(gated_lora.gated_lora, backend=BACKEND, fullgraph=True)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        compiled(given[1], given[0], A, up, 0.7, None, None, 0.3)
    assert kept
    assert max(kept) <= tokens * R < given[1].numel()
