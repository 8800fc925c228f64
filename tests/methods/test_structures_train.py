"""MixLoRA and MoA as published, and MoRE, learn from their own start: every tensor moves, the loss falls."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import monkeyjump as mj
from tests.helpers import lm_batch, tiny_llama, wrap

SETTINGS: dict[str, dict[str, Any]] = {
    "mixlora": {"r": 4, "alpha": 8.0, "experts": 4},
    "more": {"r": 4, "alpha": 8.0, "tasks": 3},
    "moa": {"r": 4, "alpha": 8.0},
}


@pytest.mark.parametrize("method", SETTINGS)
def test_it_learns(method: str) -> None:
    torch.manual_seed(0)
    model = wrap(tiny_llama(), mj.methods.build(method, dropout=0.0, **SETTINGS[method])).train()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    start = {name: p.detach().clone() for name, p in trained.items()}
    optimizer = torch.optim.AdamW(trained.values(), lr=2e-2, weight_decay=0.0)
    batch = lm_batch(prompt=2)
    if method == "more":
        batch["task_ids"] = torch.tensor([0, 1, 2])
    losses = []
    for _ in range(25):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    assert all(not torch.equal(start[name], p) for name, p in trained.items())
