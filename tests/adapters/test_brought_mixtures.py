"""Several DoRA, VeRA or (IA)3 experts on one projection under a learned router: the fused form against a plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

import monkeyjump as mj
from monkeyjump.adapters import ADAPTERS
from monkeyjump.tuner.layer import FrozenLinear
from tests.adapters.peers import biased_llama
from tests.helpers import adapted, adapter_tensors, assert_same, gradients, layers_of, lm_batch, wrap

N = 3
CASES: dict[str, dict[str, Any]] = {
    name: {
        "adapter": name,
        "r": 4,
        "target_modules": ["q_proj", "down_proj"],
        "shared_modules": None,
        "placement": "projection",
        "experts": N,
        "router": "linear",
        "top_k": 2,
    }
    for name in ("dora", "vera", "ia3")
}
every = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def one_of(mixture: Any, n: int, config: mj.MonkeyJumpConfig, linear: Any) -> Any:
    """Expert n as an adapter of its own, with views of the mixture's tensors: gradients reach them."""
    single = ADAPTERS.get(config.adapter).for_linear(linear, config)
    r = config.r
    for name in [name for name, _ in single.named_parameters()]:
        stacked = getattr(mixture, name)
        part = {"A": lambda t: t[n * r : (n + 1) * r], "B": lambda t: t[:, n * r : (n + 1) * r]}.get(name)
        delattr(single, name)
        setattr(single, name, stacked[n] if part is None else part(stacked))
    return single


@every
@pytest.mark.parametrize("gated", [True, False])
def test_fused_equals_a_loop_over_experts(case: dict[str, Any], gated: bool) -> None:
    model = adapted(biased_llama(), **case).eval()
    config: Any = model.peft_config["default"]
    for layer in layers_of(model).values():
        mixture: Any = layer.monkeyjump_adapter["default"]
        x = torch.randn(2, 5, layer.in_features, generator=torch.Generator().manual_seed(0), requires_grad=True)
        base = layer.base_layer(x)
        gate = torch.rand(2, 5, N, generator=torch.Generator().manual_seed(1))
        gate = (gate * (gate > 0.4)).requires_grad_()
        singles = [one_of(mixture, n, config, FrozenLinear(layer)) for n in range(N)]
        loop = sum(single.delta(x, base, gate[..., n : n + 1] if gated else None) for n, single in enumerate(singles))
        fused = mixture.delta(x, base, gate if gated else None)
        torch.testing.assert_close(fused, loop, rtol=1e-4, atol=1e-5)
        wanted = [*mixture.parameters(), x, *([gate] if gated else [])]
        weights = torch.randn(fused.shape, generator=torch.Generator().manual_seed(2))
        ours = torch.autograd.grad((fused * weights).sum(), wanted, retain_graph=True)
        theirs = torch.autograd.grad((loop * weights).sum(), wanted)
        for a, b in zip(ours, theirs, strict=True):
            assert b.abs().max() > 0
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
        flat, flat_base = x.flatten(0, 1).detach(), base.flatten(0, 1).detach()
        alone = torch.stack([single.delta(flat, flat_base, None) for single in singles], dim=1)
        torch.testing.assert_close(mixture.expert_outputs(flat, flat_base), alone, rtol=1e-4, atol=1e-5)


@every
def test_identity_router_gradients_and_saving(case: dict[str, Any], tmp_path: Path) -> None:
    base = biased_llama()
    with torch.no_grad():
        expected = base(**lm_batch()).logits
        torch.testing.assert_close(wrap(base, **case)(**lm_batch()).logits, expected, rtol=0, atol=0)
    model = adapted(biased_llama(), **case, aux_loss_weight=0.01).train()
    model(**lm_batch()).loss.backward()
    assert all(gradient.abs().max() > 0 for gradient in gradients(model).values())
    model.eval().save_pretrained(str(tmp_path))
    loaded = PeftModel.from_pretrained(biased_llama(), tmp_path)
    assert_same(adapter_tensors(model), adapter_tensors(loaded))
    with torch.no_grad():
        assert torch.equal(loaded(**lm_batch()).logits, model(**lm_batch()).logits)
    half = adapted(biased_llama().bfloat16(), **case)
    with torch.no_grad():
        assert half(**lm_batch()).logits.dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"routed|mixture"):
        model.merge_adapter()
