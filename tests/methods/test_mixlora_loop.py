"""MixLoRA against a plain loop over whole feed-forwards, written here: outputs and every gradient."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import GPT2Config, GPT2LMHeadModel

import monkeyjump as mj
from monkeyjump.routing.learned import LearnedRouter
from tests.helpers import assert_same, gradients, layers_of, lm_batch
from tests.methods.structures import (
    EXPERTS,
    FFN,
    K,
    adapted_mixlora,
    feed_forwards,
    routers,
)

SUBSETS = [FFN, ["gate_proj"], ["down_proj"], ["up_proj", "down_proj"]]


def delta(layer: Any, x: torch.Tensor, expert: int, config: mj.MonkeyJumpConfig) -> torch.Tensor:
    """What expert `expert` adds to one projection, or nothing where the projection is not adapted."""
    adapter = getattr(layer, "monkeyjump_adapter", {"default": None})["default"]
    if adapter is None:
        return torch.zeros(())
    ranks = slice(expert * config.r, (expert + 1) * config.r)
    return config.alpha / config.r * (x @ adapter.A[ranks].T) @ adapter.B[:, ranks].T


def base(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return getattr(layer, "base_layer", layer)(x)


def loop(mlp: Any, router: LearnedRouter, config: mj.MonkeyJumpConfig, x: torch.Tensor, gated: bool) -> torch.Tensor:
    """Route, then run every expert on every token as its own feed-forward, and sum what was chosen."""
    p = torch.softmax(x @ router.weight.T, -1)
    top = p.topk(config.top_k or EXPERTS, dim=-1)
    weights = torch.zeros_like(p).scatter(-1, top.indices, top.values / top.values.sum(-1, keepdim=True))
    y = torch.zeros_like(x)
    for n in range(EXPERTS):
        if gated:
            gate = base(mlp.gate_proj, x) + delta(mlp.gate_proj, x, n, config)
            hidden = mlp.act_fn(gate) * (base(mlp.up_proj, x) + delta(mlp.up_proj, x, n, config))
            out = base(mlp.down_proj, hidden) + delta(mlp.down_proj, hidden, n, config)
        else:
            hidden = mlp.act(base(mlp.c_fc, x) + delta(mlp.c_fc, x, n, config))
            out = base(mlp.c_proj, hidden) + delta(mlp.c_proj, hidden, n, config)
        y = y + weights[..., n : n + 1] * out
    return y


def looped_copy(model: PeftModel, gated: bool) -> PeftModel:
    """A deep copy whose feed-forwards are the loop above."""
    other = copy.deepcopy(model)
    config = other.peft_config["default"]
    assert isinstance(config, mj.MonkeyJumpConfig)
    for mlp in feed_forwards(other):
        (router,) = routers(mlp).values()
        mlp._forward_hooks.clear()
        mlp._forward_pre_hooks.clear()

        def forward(x: torch.Tensor, mlp: Any = mlp, router: LearnedRouter = router) -> torch.Tensor:
            return loop(mlp, router, config, x, gated)

        mlp.forward = forward
    return other


def compare(model: PeftModel, gated: bool) -> None:
    model = model.double()
    other = looped_copy(model, gated)
    batch = lm_batch()
    found, expected = model.train()(**batch), other.train()(**batch)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-9, atol=1e-9)
    found.loss.backward()
    expected.loss.backward()
    assert_same(gradients(model), gradients(other), rtol=1e-8, atol=1e-10)
    assert all(r.weight.grad is not None and r.weight.grad.abs().sum() > 0 for r in routers(model).values())


@pytest.mark.parametrize("ffn", SUBSETS, ids="+".join)
def test_equals_a_loop_over_experts(ffn: list[str]) -> None:
    compare(adapted_mixlora(target_modules=["q_proj", "v_proj", *ffn], aux_loss_weight=0.0), gated=True)


@pytest.mark.parametrize("top_k", [1, 3, None])
def test_equals_a_loop_for_other_top_k(top_k: int | None) -> None:
    model = adapted_mixlora(top_k=top_k, aux_loss_weight=0.0)
    other = looped_copy(model, gated=True)
    batch = lm_batch()
    torch.testing.assert_close(model(**batch).logits, other(**batch).logits, rtol=1e-4, atol=1e-4)


def tiny_gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=101, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.2, bos_token_id=None,
        eos_token_id=None, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).eval()


def test_a_feed_forward_without_a_gate() -> None:
    """GPT-2: c_fc and c_proj are Conv1D, and the attention has a c_proj too, which stays plain."""
    model = adapted_mixlora(tiny_gpt2(), target_modules=["c_attn", "c_proj", "c_fc"], aux_loss_weight=0.0)
    plain = [path for path, layer in layers_of(model).items() if "default" not in layer.routers]
    assert sorted({path.rpartition("h.")[2][2:] for path in plain}) == ["attn.c_attn", "attn.c_proj"]
    compare(model, gated=False)


def test_the_frozen_gate_and_up_projections_run_once_per_token() -> None:
    model = adapted_mixlora().eval()
    rows: dict[str, int] = {}
    for path, layer in layers_of(model).items():
        layer.base_layer.register_forward_hook(
            lambda _, args, out, path=path: rows.__setitem__(path.rpartition(".")[2], args[0].shape[0])
        )
    model(**lm_batch(3))
    assert (rows["gate_proj"], rows["up_proj"], rows["down_proj"]) == (3, 3, 3 * K)
