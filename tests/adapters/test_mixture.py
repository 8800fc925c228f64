"""Mixtures as modules: shapes, starts, frozen parts, precision, and what they refuse."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import monkeyjump as mj
from monkeyjump.adapters import AdaLoraAdapter
from monkeyjump.adapters.mixture import MIXTURES, SHARED_A, mixture_of
from tests.helpers import TARGETS, adapted, layers_of, lm_batch, mj_config, tiny_llama, wrap

IN, OUT, N, R = 12, 10, 3, 2


def build(kind: str, **changes: Any) -> Any:
    settings = {"placement": "projection", "router": "linear", "adapter": kind, "r": R, "alpha": 3.0, **changes}
    linear: Any = SimpleNamespace(path="", in_features=IN, out_features=OUT)
    return mixture_of(mj_config(**settings), linear, N)


def randomized(adapter: Any) -> Any:
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.copy_(0.2 * torch.randn_like(parameter))
    return adapter


@pytest.mark.parametrize("share_A", [False, True])
@pytest.mark.parametrize("kind", list(MIXTURES))
def test_a_gate_of_one_is_that_expert_alone(kind: str, share_A: bool) -> None:
    """And the delta is linear in the gates: what `expert_outputs` says, weighted and summed."""
    if share_A and kind not in SHARED_A:
        return
    adapter = randomized(build(kind, share_A=share_A)).eval()
    x, base = torch.randn(2, 5, IN), torch.randn(2, 5, OUT)
    outputs = adapter.expert_outputs(x.flatten(0, 1), base.flatten(0, 1)).unflatten(0, (2, 5))
    gates = torch.rand(2, 5, N)
    gates[..., 1] = 0
    expected = (gates.unsqueeze(-1) * outputs).sum(-2)
    torch.testing.assert_close(adapter.delta(x, base, gates), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(adapter.delta(x, base, None), outputs.sum(-2), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", list(MIXTURES))
def test_starts_as_the_identity_with_different_experts(kind: str) -> None:
    adapter = build(kind)
    x, base = torch.randn(4, IN), torch.randn(4, OUT)
    assert torch.equal(adapter(x, base, base, torch.rand(4, N)), base)
    if hasattr(adapter, "A"):
        assert not torch.equal(adapter.A[:R], adapter.A[R : 2 * R])
    assert adapter.experts == N


@pytest.mark.parametrize("share_A", [False, True])
def test_a_frozen_factor_is_saved_and_never_trained(share_A: bool) -> None:
    adapter = build("lora_fa", share_A=share_A)
    assert [name for name, _ in adapter.named_parameters()] == ["B"]
    assert adapter.state_dict()["A"].shape == ((1 if share_A else N) * R, IN)


def test_scale_is_that_of_one_expert() -> None:
    assert build("lora").scaling == 3.0 / R
    assert build("lora", share_A=True).scaling == 3.0 / R


def test_propulsion_resolves_small_scalings_in_bf16() -> None:
    adapter = build("propulsion")
    with torch.no_grad():
        adapter.offset.fill_(2e-4)
    base = torch.full((1, OUT), 1.0, dtype=torch.bfloat16)
    delta = adapter.delta(base, base, torch.full((1, N), 1 / N))
    torch.testing.assert_close(delta.float(), torch.full((1, OUT), 1.0002**15 - 1), rtol=1e-2, atol=0)


def test_there_is_nothing_to_merge() -> None:
    for kind in (*MIXTURES, "dora", "ia3", "vera"):
        model: Any = adapted(adapter=kind, placement="projection", router="linear")
        with pytest.raises(ValueError, match="is routed: its strength depends on the token"):
            model.merge_and_unload()


def test_shared_modules_carry_one_plain_adapter() -> None:
    model: Any = wrap(tiny_llama(), placement="projection", router="linear", shared_modules=["o_proj"])
    for path, layer in layers_of(model).items():
        experts = 1 if path.endswith("o_proj") else 4
        adapter: Any = layer.monkeyjump_adapter["default"]
        assert adapter.A.shape[0] == 2 * experts
        assert ("default" in layer.monkeyjump_router) is (experts > 1)


def test_a_uniform_gate_is_one_wide_adapter() -> None:
    """The control of a mixture: every expert at the same constant strength, no router."""
    settings: dict[str, Any] = {"placement": "projection", "router": "uniform", "uniform_gate": 0.5}
    for kind in MIXTURES:
        model: Any = adapted(shared_modules=None, adapter=kind, **settings).eval()
        assert mj.count_parameters(model).router == 0
        layer = next(iter(layers_of(model).values()))
        seen: list[torch.Tensor] = []
        layer.register_forward_hook(lambda module, args, out, seen=seen: seen.extend([args[0], out]))
        with torch.no_grad():
            model(**lm_batch())
            x, out = seen
            base = layer.base_layer(x)
            outputs = layer.monkeyjump_adapter["default"].expert_outputs(x, base)  # type: ignore[operator]
        torch.testing.assert_close(out - base, 0.5 * outputs.sum(-2), rtol=1e-4, atol=1e-5)


def test_rank_budget_counts_every_expert() -> None:
    """4 experts x 5 targets x 2 blocks: half of their ranks are left, whichever expert they belong to."""
    settings: dict[str, Any] = {"placement": "projection", "router": "linear", "adapter": "adalora"}
    model: Any = adapted(shared_modules=None, r=4, target_r=2, total_step=3, **settings).train()
    for _ in range(3):
        model.zero_grad()
        model(**lm_batch()).loss.backward()
        budget = mj.allocate_ranks(model)
    assert budget == 2 * 4 * len(TARGETS) * 2
    adapters = [m for m in model.modules() if isinstance(m, AdaLoraAdapter)]
    assert sum(int((a.diagonal != 0).sum()) for a in adapters) == budget


def test_routers_and_experts_stay_in_fp32_and_the_output_in_bf16() -> None:
    model: Any = adapted(tiny_llama().bfloat16(), placement="projection", router="linear", aux_loss_weight=0.1)
    model = model.to(torch.bfloat16).train()
    loss = model(**lm_batch()).loss
    loss.backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.dtype == parameter.grad.dtype == torch.float32, name
            assert parameter.grad.isfinite().all()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(**lm_batch()).loss.isfinite()


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_scalings_keep_no_mixed_factor() -> None:
    """Of a token's whole width only the output itself is kept, in its own dtype; and the numbers stay the same."""
    adapter = randomized(build("propulsion", adapter_options={"degree": 2}))
    compiled = torch.compile(adapter.delta, backend="aot_eager_decomp_partition")
    base = torch.randn(50, OUT, dtype=torch.bfloat16).requires_grad_()
    gates = torch.rand(50, N).softmax(-1).requires_grad_()
    found, wide = [], []
    for delta in (adapter.delta, compiled):
        kept: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor, kept: list[torch.Tensor] = kept) -> torch.Tensor:
            kept.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = delta(base, base, gates)
        wide.append([tensor.dtype for tensor in kept if tensor.numel() >= 50 * OUT])
        found.append(torch.autograd.grad(out.square().sum(), [base, gates, adapter.offset]))
    assert torch.float32 in wide[0]
    assert wide[1] == [torch.bfloat16]
    for eager, other in zip(*found, strict=True):
        torch.testing.assert_close(other, eager, rtol=1e-2, atol=1e-2)
