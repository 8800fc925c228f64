"""expert_unit="rank": every rank-one part of an adapter is an expert with a centre of its own."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor

import monkeyjump as mj
from monkeyjump.ops import dispatch
from monkeyjump.training.compile import compiled
from monkeyjump.tuner.count import count_parameters
from monkeyjump.tuner.trace import staged_load
from tests.helpers import (
    COMPILING,
    adapted,
    assert_same,
    gradients,
    layers_of,
    lm_batch,
    mj_config,
    routed_layers,
    routing_state,
    tiny_llama,
    train_steps,
    wrap,
)

pytestmark = COMPILING
R = 3
RANKED: dict[str, Any] = {"r": R, "expert_unit": "rank", "top_k": 4, "ema_interval": 1}
WAYS = ["torch", pytest.param("triton", marks=pytest.mark.skipif(not dispatch.HAS_TRITON, reason="needs Triton"))]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest):
    if request.param == "triton" and not dispatch.interpreted():
        pytest.skip("the models of this file are on the CPU, where kernels need Triton's interpreter")
    with dispatch.implementation(request.param):
        yield request.param


def inputs_and_outputs(model: PeftModel, batch: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    found: dict[str, tuple[Tensor, Tensor]] = {}
    handles = []
    for path, layer in layers_of(model).items():
        keep = lambda module, args, output, path=path: found.__setitem__(path, (args[0], output))  # noqa: E731
        handles.append(layer.register_forward_hook(keep))
    with torch.no_grad():
        model(**batch)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("adapter", ["lora", "lora_fa", "adalora"])
def test_each_rank_has_its_gate(adapter: str, way: str) -> None:
    """Gates from the definition, and outputs as a sum over ranks, one after the other."""
    model = adapted(adapter=adapter, **RANKED).eval()
    batch = lm_batch()
    entered: dict[str, Tensor] = {}
    for path, block in model.named_modules():
        if path.endswith(("layers.0", "layers.1")):
            block.register_forward_pre_hook(
                lambda module, args, kwargs, path=path: entered.__setitem__(path, args[0]), with_kwargs=True
            )
    with mj.record_routing(model) as trace:
        seen = inputs_and_outputs(model, batch)
    routers = {router.path: router for router in mj.tuner.model.require_context(model).routers()}
    for path, router in routers.items():
        layers = router.layers["default"]
        h = next(states for name, states in entered.items() if name.endswith(path))
        centers = torch.cat([layer.monkeyjump_center["default"] for layer in layers])
        assert centers.shape == (len(layers) * R, h.shape[-1])
        cosines = torch.nn.functional.cosine_similarity(h.unsqueeze(-2), centers, dim=-1)
        p = cosines.softmax(-1)
        gates = p * (p >= p.topk(4, -1).values[..., -1:])
        torch.testing.assert_close(trace.gates(router.key), gates, atol=1e-6, rtol=1e-5)
        assert trace.experts(router.key)[: R + 1] == ["q_proj.0", "q_proj.1", "q_proj.2", "k_proj.0"]
        for place, layer in enumerate(layers):
            own: Any = layer.monkeyjump_adapter["default"]
            x, y = seen[next(name for name, module in layers_of(model).items() if module is layer)]
            expected = layer.base_layer(x)
            for rank in range(R):
                diagonal = own.diagonal[rank] if adapter == "adalora" else 1.0
                part = (x @ own.A[rank]).unsqueeze(-1) * own.B[:, rank] * own.scaling * diagonal
                expected = expected + gates[..., place * R + rank, None] * part
            torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-4)


def test_one_rank_is_one_adapter(way: str) -> None:
    models = [adapted(tiny_llama(1), r=1, expert_unit=unit, ema_interval=1) for unit in ("adapter", "rank")]
    losses = [train_steps(model, iter([lm_batch(seed=s) for s in range(3)])) for model in models]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    assert_same(gradients(models[0]), gradients(models[1]), atol=1e-6, rtol=1e-5)
    flat = [{name: state.reshape(-1) for name, state in routing_state(model).items()} for model in models]
    assert_same(flat[0], flat[1], atol=1e-6, rtol=1e-5)


def test_centres_follow_their_own_tokens(way: str) -> None:
    """Every rank's centre moves to the mean of the tokens that chose it."""
    model = adapted(**RANKED, ema_momentum=0.0).train()
    with mj.record_routing(model) as trace:
        model(**lm_batch())
    loads = staged_load(model)
    before = routing_state(model)
    for key in trace.blocks():
        gates, mask = trace.gates(key), trace.mask(key)
        chosen = (gates > 0) & (torch.ones_like(gates[..., :1], dtype=torch.bool) if mask is None else mask[..., None])
        counts = chosen.sum((0, 1)).double()
        assert loads[key].experts == trace.experts(key)
        assert loads[key].share == pytest.approx((counts / counts.sum()).tolist())
    model(**lm_batch(seed=1))  # commits
    for path, layer in routed_layers(model).items():
        count = before[f"{path}.monkeyjump_staged_count"]
        mean = before[f"{path}.monkeyjump_staged_sum"] / count.clamp_min(1).unsqueeze(-1)
        expected = torch.where(count.unsqueeze(-1) > 0, mean, before[f"{path}.monkeyjump_center"])
        assert count.shape == (R,)
        torch.testing.assert_close(layer.monkeyjump_center["default"], expected)


@pytest.mark.parametrize("init", ["kmeans", "random_tokens", "random"])
def test_centres_of_all_ranks_are_found_saved_and_loaded(init: str, tmp_path: Path) -> None:
    model = adapted(**RANKED, center_init=init)
    report = mj.initialize_centers(model, [lm_batch(seed=s) for s in range(4)], num_tokens=60, progress=False)
    assert all(len(shares) == 3 * R for shares in report.shares.values())
    assert report.tokens_kept == (0 if init == "random" else 60)
    for layer in routed_layers(model).values():
        center = layer.monkeyjump_center["default"]
        assert center.shape == (R, 32)
        assert len({tuple(row.tolist()) for row in center}) == R
    train_steps(model, iter([lm_batch()]))
    model.save_pretrained(str(tmp_path))
    loaded = PeftModel.from_pretrained(tiny_llama(), tmp_path)
    assert_same(routing_state(loaded), routing_state(model))
    batch = lm_batch(seed=7)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(**batch).logits, model.eval()(**batch).logits)


def test_trained_parameters_are_those_of_plain_adapters() -> None:
    plain, ranked = (count_parameters(wrap(tiny_llama(), r=R, expert_unit=unit)) for unit in ("adapter", "rank"))
    assert (ranked.trainable, ranked.router) == (plain.trainable, 0)
    assert ranked.buffers > plain.buffers


def test_compiled_is_eager(way: str) -> None:
    base = tiny_llama(1)
    base.config.use_cache = False
    model = adapted(base, **RANKED).train()
    twin = copy.deepcopy(model)
    # not 8, the size of a head: a graph first traced for it serves that length alone, and 12 would need another
    data = [lm_batch(seed=s, length=10 + 4 * (s % 2)) for s in range(3)]
    with compiled(model, "blocks", shapes=2, backend="aot_eager"):
        found = train_steps(model, iter(data))
    expected = train_steps(twin, iter(data))
    assert found == pytest.approx(expected, abs=1e-5)
    assert_same(gradients(model), gradients(twin), atol=1e-5, rtol=1e-4)
    assert_same(routing_state(model), routing_state(twin), atol=1e-5, rtol=1e-4)


def test_a_rank_is_knocked_out_by_its_name() -> None:
    model, batch = adapted(**RANKED).eval(), lm_batch()
    with (
        mj.record_routing(model, probabilities=True) as trace,
        mj.knock_out(model, {"0": ["k_proj.1"]}),
        torch.no_grad(),
    ):
        found = model(**batch).logits
    place = trace.experts("0").index("k_proj.1")
    assert not trace.gates("0")[..., place].any()
    probabilities = trace.probabilities("0")
    assert probabilities is not None
    assert probabilities.shape[-1] == 3 * R
    adapter: Any = next(
        layer for path, layer in layers_of(model).items() if path.endswith("layers.0.self_attn.k_proj")
    ).monkeyjump_adapter["default"]
    with torch.no_grad():
        adapter.B[:, 1] = 0
        torch.testing.assert_close(found, model(**batch).logits, atol=1e-5, rtol=1e-4)


WRONG: dict[str, dict[str, Any]] = {
    "expert_unit='rank' is for experts without router parameters": {"router": "linear", "top_k": 2},
    "adapter='propulsion' has no ranks that expert_unit='rank'": {"adapter": "propulsion"},
    "expert_unit='ranks'": {"expert_unit": "ranks"},
}


@pytest.mark.parametrize("message", WRONG)
def test_what_has_no_ranks_is_refused(message: str) -> None:
    with pytest.raises(mj.ConfigError, match=message):
        mj_config(**{"expert_unit": "rank", **WRONG[message]})


def test_top_k_counts_ranks() -> None:
    wrap(tiny_llama(), r=2, expert_unit="rank", top_k=6)
    with pytest.raises(mj.ConfigError, match=r"top_k=7 is larger than the 3 .* times 2 ranks, .* lower top_k to 6"):
        wrap(tiny_llama(), r=2, expert_unit="rank", top_k=7)
