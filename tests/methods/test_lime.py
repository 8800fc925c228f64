"""LiME: the definition by loops, routing that no neighbour changes, and its balance loss."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model

import monkeyjump as mj
from monkeyjump import methods
from monkeyjump.tuner.count import count_parameters
from tests.helpers import disturb, gradients, layers_of, lm_batch, tiny_llama, train_steps

E = 4


def model_of(**changes: Any) -> Any:
    settings: dict[str, Any] = {"task_type": "CAUSAL_LM", "dropout": 0.0, "jitter": 0.0, **changes}
    model = get_peft_model(tiny_llama(), methods.build("lime", "mj_paper", **settings))
    disturb(model)
    return model


def weights_of(adapter: Any, linear: Any, x: torch.Tensor) -> torch.Tensor:
    """Auto top-k for one token."""
    y0, delta = linear(x)[:E], (adapter.scaling * adapter.B @ (adapter.A @ x))[:E]
    logits = [(0.3 * y0[e] / y0.abs().max() + 0.7 * delta[e] / delta.abs().max()) / 0.5 for e in range(E)]
    p = torch.stack(logits).softmax(0)
    kept = torch.stack([p[e] / (1 + math.exp(-(float(p[e]) - 0.5 * float(p.max())) / 0.5)) for e in range(E)])
    return kept / kept.sum()


@torch.no_grad()
def test_the_definition_token_by_token() -> None:
    model = model_of().eval()
    seen: dict[str, Any] = {}
    for path, seen_layer in layers_of(model).items():
        seen_layer.register_forward_hook(lambda module, args, out, path=path: seen.__setitem__(path, (args[0], out)))
    with mj.record_routing(model) as trace:
        model(**lm_batch(batch=2, length=5))
    path = next(path for path in seen if path.endswith("layers.1.self_attn.v_proj"))
    layer: Any = layers_of(model)[path]
    adapter: Any = layer.monkeyjump_adapter["default"]
    x, y = seen[path]
    gates = trace.gates("1.v_proj")
    for row in range(2):
        for token in range(5):
            w = weights_of(adapter, layer.base_layer, x[row, token])
            torch.testing.assert_close(gates[row, token], w, atol=1e-5, rtol=1e-4)
            modulation = sum(w[e] * adapter.v[e] for e in range(E)) + adapter.shared_gate * adapter.shared
            delta = adapter.scaling * adapter.B @ (adapter.A @ x[row, token])
            expected = layer.base_layer(x[row, token]) + delta * modulation
            torch.testing.assert_close(y[row, token], expected, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_no_neighbour_changes_the_routing_of_a_token() -> None:
    """The same row alone, beside a row of other tokens, and with padding."""
    model, batch = model_of().eval(), lm_batch(batch=3, length=6)
    alone = model(input_ids=batch["input_ids"][:1]).logits
    together = model(input_ids=batch["input_ids"]).logits[:1]
    padded = torch.cat([batch["input_ids"][:1], torch.zeros(1, 3, dtype=torch.long)], 1)
    mask = torch.tensor([[1] * 6 + [0] * 3])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(model(input_ids=padded, attention_mask=mask).logits[:, :6], alone, atol=1e-5, rtol=1e-4)


def test_what_is_trained_starts_as_the_frozen_model() -> None:
    torch.manual_seed(0)
    model: Any = get_peft_model(tiny_llama(), methods.build("lime", "mj_paper", task_type="CAUSAL_LM"))
    batch = lm_batch()
    with torch.no_grad(), model.disable_adapter():
        expected = model(**batch).logits
    assert torch.equal(model(**batch).logits, expected)
    layers: list[Any] = list(layers_of(model).values())
    count = count_parameters(model)
    sizes = [2 * (layer.in_features + layer.out_features) + (E + 1) * layer.out_features + 1 for layer in layers]
    assert (count.trainable, count.router) == (sum(sizes), 0)
    v = torch.cat([layer.monkeyjump_adapter["default"].v.flatten() for layer in layers])
    assert 0.9 <= v.min() < 0.92
    assert 1.08 < v.max() <= 1.1


def test_the_balance_loss() -> None:
    """0.1 (E sum p^2 - 1) + 0.01 KL(p, even), the mean over routers, of real tokens alone."""
    model, plain = model_of().train(), model_of(aux_loss_weight=0.0).train()
    batch = lm_batch()
    batch["attention_mask"][0, -3:] = 0
    batch["labels"][0, -3:] = -100
    probabilities = []
    with mj.record_routing(model, probabilities=True) as trace:
        loss = model(**batch).loss
    for key in trace.blocks():
        p = trace.probabilities(key)
        assert p is not None
        mean = p[batch["attention_mask"].bool()].mean(0)
        probabilities.append(0.1 * (E * mean.square().sum() - 1) + 0.01 * (mean * (E * mean).log()).sum())
    expected = plain(**batch).loss + torch.stack(probabilities).mean()
    torch.testing.assert_close(loss, expected, atol=1e-6, rtol=1e-5)
    loss.backward()
    assert all(gradient.isfinite().all() for gradient in gradients(model).values())


def test_training_saving_and_loading(tmp_path: Path) -> None:
    model = model_of(jitter=0.1)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = train_steps(model, iter([lm_batch()] * 12), optimizer)
    assert losses[-1] < losses[0]
    model.save_pretrained(str(tmp_path))
    loaded = PeftModel.from_pretrained(tiny_llama(), tmp_path)
    batch = lm_batch(seed=3)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(**batch).logits, model.eval()(**batch).logits)
        knocked: Any = model
        with mj.knock_out(knocked, {"0.q_proj": ["expert 1"]}):
            assert not torch.equal(model(**batch).logits, loaded(**batch).logits)


def test_its_parts_go_together() -> None:
    for changes in ({"adapter": "lora"}, {"placement": "block"}):
        with pytest.raises(mj.ConfigError, match=r"use methods\.build\('lime'\)"):
            methods.build("lime", **changes)
