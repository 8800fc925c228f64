"""Noise on learned routers: what it multiplies or is added to, in training only, and never the experts' input."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import monkeyjump as mj
from monkeyjump.routing.learned import LearnedRouter
from tests.helpers import lm_batch
from tests.methods.common import moved

KINDS = ["gaussian", "logit_mul", "input_mul"]


def router_of(noise: str, **changes: Any) -> LearnedRouter:
    settings: dict[str, Any] = {"router": "linear", "top_k": 2, "jitter": 0.3, "noise": noise, **changes}
    torch.manual_seed(0)
    return LearnedRouter(8, 4, mj.MonkeyJumpConfig(**settings))


@pytest.mark.parametrize("noise", KINDS)
def test_against_its_definition(noise: str) -> None:
    router, x = router_of(noise).train(), torch.randn(5, 8)
    kept = x.clone()
    torch.manual_seed(7)
    found = router(x).probabilities
    torch.manual_seed(7)
    if noise == "gaussian":
        logits = x @ router.weight.T
        logits = logits + 0.3 * torch.randn_like(logits)
    elif noise == "logit_mul":
        logits = x @ router.weight.T
        logits = logits * (0.7 + 0.6 * torch.rand_like(logits))
    else:
        logits = (x * (0.7 + 0.6 * torch.rand_like(x))) @ router.weight.T
    torch.testing.assert_close(found, logits.softmax(-1), rtol=1e-5, atol=1e-6)
    assert torch.equal(x, kept)  # the published code multiplies its input in place


@pytest.mark.parametrize("noise", KINDS)
def test_none_outside_training_or_without_jitter(noise: str) -> None:
    x = torch.randn(5, 8)
    clean = router_of("gaussian", jitter=0.0).train()(x).gates
    assert torch.equal(router_of(noise).eval()(x).gates, clean)
    assert torch.equal(router_of(noise, jitter=0.0).train()(x).gates, clean)
    assert not torch.equal(router_of(noise).train()(x).gates, clean)


@pytest.mark.parametrize("noise", KINDS)
def test_logits_of_zero(noise: str) -> None:
    """A factor leaves them at zero; only added noise can break a tie."""
    router = router_of(noise).train()
    torch.nn.init.zeros_(router.weight)
    even = router(torch.randn(5, 8)).probabilities
    assert torch.equal(even, torch.full_like(even, 0.25)) is (noise != "gaussian")


@pytest.mark.parametrize("case", ["mixlora", "mixlora published"])
def test_experts_see_the_input_without_noise(case: str) -> None:
    """All experts alike and weights that sum to 1: whatever the noise does to the router, the output is the same."""
    found = []
    for jitter in (0.0, 0.9):
        model = moved(case, jitter=jitter, noise="input_mul", aux_loss_weight=0.0).train()
        for module in model.modules():
            if hasattr(module, "expert_outputs"):
                with torch.no_grad():
                    module.A.copy_(module.A[: module.A.shape[0] // 4].repeat(4, 1))
                    module.B.copy_(module.B[:, : module.B.shape[1] // 4].repeat(1, 4))
        found.append(model(**lm_batch()).logits)
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)


def test_bad_noise() -> None:
    with pytest.raises(mj.ConfigError, match=r"noise='logit_mul' needs router='linear' or"):
        mj.MonkeyJumpConfig(method_options={"noise": "logit_mul"}, jitter=0.1)
