"""The logits of learned routers on kernels: against float64, with what rounding the weights would cost as the bar."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from monkeyjump.config import MonkeyJumpConfig
from monkeyjump.ops.dispatch import implementation
from monkeyjump.routing.learned import LearnedRouter, decide_together
from tests.helpers import COMPILING
from tests.ops.common import DEVICE, error, gradients_of, guarded, normal
from tests.ops.lora_cases import PRODUCTS, take

pytest.importorskip("triton")
from monkeyjump.ops import precision, router_logits
from monkeyjump.ops.kernels import lora as kernels
from monkeyjump.ops.kernels.tiles import TILES

# of a product with both halves of an operand: 16 bits of it, in bf16; fp32 accumulates in another order than float64
PRECISE = {torch.float32: 1e-6, torch.float16: 1e-6, torch.bfloat16: 2e-5}
OUTPUT = {torch.float32: 1e-6, torch.float16: 4e-4, torch.bfloat16: 4e-3 if DEVICE.type == "cuda" else 8e-3}
DTYPES = list(PRECISE)
SHAPES = {
    # tokens, width, routers, experts
    "one of everything": (1, 1, 1, 1),
    "single token": (1, 40, 1, 4),
    "an odd width": (50, 7, 2, 3),
    "past a tile": (11, 257, 1, 5),
    "three routers": (3 * TILES["down"].rows + 1, 130, 3, 4),
    "many columns": (37, 96, 1, 24),
    "as many as there may be": (20, 33, 4, 16),
}


def case(shape: str, dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    N, D, M, E = SHAPES[shape]
    weights = [normal(E, D, seed=2 + m, scale=0.3) for m in range(M)]
    return normal(N, D, seed=1, dtype=dtype), weights, normal(N, M * E, seed=9)


def found(x: torch.Tensor, **weights: torch.Tensor) -> torch.Tensor:
    with implementation("triton"):
        return router_logits.router_logits(x, list(weights.values())).flatten(-2)


def expected(x: torch.Tensor, **weights: torch.Tensor) -> torch.Tensor:
    return x @ torch.cat(list(weights.values())).T


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []
    for name in ("down", "down_backward"):
        original = getattr(kernels, name)

        def spy(*args: Any, _name: str = name, _original: Any = original, **kwargs: Any) -> Any:
            assert kwargs["precise"]
            calls.append(_name)
            return _original(*args, **kwargs)

        monkeypatch.setattr(kernels, name, spy)
    return calls


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_gradients(shape: str, dtype: torch.dtype, launched: list[str]) -> None:
    """In one pass forward and one backward, whatever the number of routers."""
    x, weights, dy = case(shape, dtype)
    named = {f"W{m}": weight for m, weight in enumerate(weights)}
    out, grads = gradients_of(found, {"x": x, **named}, dy)
    assert launched == ["down", "down_backward"]
    wide = {name: value.double() for name, value in {"x": x, **named}.items()}
    out64, grads64 = gradients_of(expected, wide, dy.double())
    assert out.dtype == torch.float32
    assert error(out, out64) < PRECISE[dtype]
    for name in named:
        assert grads[name].dtype == torch.float32
        assert error(grads[name], grads64[name]) < PRECISE[dtype]
    assert grads["x"].dtype == dtype
    assert error(grads["x"], grads64["x"]) < OUTPUT[dtype]


def test_rounded_weights_would_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tolerances tell two halves from one: W, or the gradient of the logits, in bf16 is a hundred times as far."""
    x, (weight,), dy = case("past a tile", torch.bfloat16)
    rounded = x.double() @ weight.bfloat16().double().T
    assert error(rounded, x.double() @ weight.double().T) > 50 * PRECISE[torch.bfloat16]
    rounded = dy.bfloat16().double().T @ x.double()
    assert error(rounded, dy.double().T @ x.double()) > 50 * PRECISE[torch.bfloat16]
    take(PRODUCTS, monkeypatch)
    plain = kernels.down(x, [weight], None)
    assert error(plain, x.double() @ weight.double().T) > 50 * PRECISE[torch.bfloat16]


def test_an_input_without_gradient_gets_none(launched: list[str]) -> None:
    x, (weight,), dy = case("past a tile", torch.bfloat16)
    weight.requires_grad_()
    found(x, W=weight).backward(dy)
    assert weight.grad is not None
    assert error(weight.grad, dy.double().T @ x.double()) < PRECISE[torch.bfloat16]
    assert x.grad is None
    assert launched == ["down", "down_backward"]


def test_what_kernels_do_not_know_is_left_to_torch(launched: list[str]) -> None:
    x = normal(5, 12, dtype=torch.bfloat16)
    many = normal(router_logits.MOST_COLUMNS + 1, 12)
    with implementation("triton"):
        assert torch.equal(router_logits.router_linear(x, many), precision.precise_linear(x, many))
        wide = normal(3, 12).double()
        assert router_logits.router_linear(x.double(), wide).dtype == torch.float64
    with implementation("torch"):
        router_logits.router_linear(x, normal(3, 12))
    assert launched == []


# --- routers ---------------------------------------------------------------------------------------------------------

ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {"router": "linear", "top_k": 2, "placement": "projection", "experts": 4},
    "sigmoid": {"router": "sigmoid", "top_k": None},
    "swiglu": {"router": "sigmoid", "top_k": None, "router_hidden": "swiglu"},
    "threshold": {"router": "sigmoid", "top_k": None, "threshold": 0.6, "threshold_grad": "ste"},
}


def router(kind: str, seed: int = 0) -> LearnedRouter:
    settings = {"target_modules": ["q_proj"], "shared_modules": [], **ROUTERS[kind]}
    module = LearnedRouter(21, 4, MonkeyJumpConfig(**settings)).to(DEVICE)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return module


def decided(module: LearnedRouter, x: torch.Tensor, choice: str, **given: Any) -> dict[str, torch.Tensor]:
    """Gates, and the gradient of every parameter and of x, for a gradient that tells the experts apart."""
    module = copy.deepcopy(module).to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    leaf = x.detach().requires_grad_()
    with implementation(choice):
        gates = module(leaf, **given).gates
        gates.backward(normal(*gates.shape, seed=8).to(gates.dtype))
    grads = {name: parameter.grad for name, parameter in module.named_parameters()}
    assert all(grad is not None for grad in grads.values())
    return {"gates": gates.detach(), "x": leaf.grad, **grads}


@pytest.mark.parametrize("kind", ROUTERS)
def test_every_parameter_of_every_router(kind: str, launched: list[str]) -> None:
    x = normal(2, 9, 21, seed=3, dtype=torch.bfloat16)
    got, exact = decided(router(kind), x, "triton"), decided(router(kind), x.double(), "torch")
    assert launched
    assert torch.equal(got["gates"] > 0, exact["gates"] > 0)
    for name in exact:
        assert error(got[name], exact[name]) < (OUTPUT[torch.bfloat16] if name == "x" else 1e-4), name


def test_routers_of_one_input_decide_as_they_do_alone(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """On the matrix units both: the few columns of one router would be plain sums, which keep more of the weights."""
    take(PRODUCTS, monkeypatch)
    x, routers = normal(2, 9, 21, seed=3, dtype=torch.bfloat16), [router("softmax", seed) for seed in range(3)]
    with implementation("triton"):
        together = decide_together(routers, x)
        assert launched == ["down"]
        assert together is not None
        for m, module in enumerate(routers):
            alone = module(x)
            assert torch.equal(together.chosen[..., m, :], alone.chosen)
            torch.testing.assert_close(together.gates[..., m, :], alone.gates, rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(together.probabilities[..., m, :], alone.probabilities, rtol=1e-6, atol=1e-7)
        assert decide_together([router("sigmoid"), router("sigmoid")], x) is None  # a bias each
        assert decide_together([router("threshold"), router("threshold")], x) is None
        assert decide_together(routers[:1], x) is None


class TestCompiled:
    pytestmark = COMPILING

    @pytest.mark.parametrize("trained", [True, False])
    def test_compiled_equals_eager(self, trained: bool) -> None:
        """As registered ops where there are gradients; compiled inference is torch's own product."""
        x, weights, dy = case("three routers", torch.bfloat16)
        graphs: list[torch.fx.GraphModule] = []

        def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            from torch._dynamo.backends.registry import lookup_backend

            graphs.append(graph)
            return lookup_backend("aot_eager")(graph, inputs)

        compiled = torch.compile(found, fullgraph=True, backend=keep)
        named = {f"W{m}": weight for m, weight in enumerate(weights)}
        if trained:
            out, grads = gradients_of(compiled, {"x": x, **named}, dy)
            same, wanted = gradients_of(found, {"x": x, **named}, dy)
            assert torch.equal(out, same)
            for name, grad in wanted.items():
                assert torch.equal(grads[name], grad)
        else:
            with torch.no_grad():
                assert (
                    error(compiled(x, **named), expected(x.double(), **{n: w.double() for n, w in named.items()}))
                    < 1e-6
                )
        assert len(graphs) == 1

    def test_the_registered_ops(self) -> None:
        x, weights, dy = case("three routers", torch.bfloat16)
        torch.library.opcheck(router_logits.logits_op, (x, weights), test_utils=("test_schema", "test_faketensor"))
        for with_dx in (True, False):
            torch.library.opcheck(
                router_logits.logits_backward_op,
                (x, dy, weights, with_dx),
                test_utils=("test_schema", "test_faketensor"),
            )


def test_tensors_that_are_not_dense() -> None:
    x, weight = normal(2, 24, 9, dtype=torch.bfloat16).mT, guarded(normal(24, 4).T.cpu()).T.contiguous().T
    assert not x.is_contiguous()
    assert not weight.is_contiguous()
    with implementation("triton"):
        logits = router_logits.router_linear(x, weight)
    assert error(logits, x.double() @ weight.double().T) < PRECISE[torch.bfloat16]
