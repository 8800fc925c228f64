"""Step 0 is the base model, bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import monkeyjump as mj
from tests.helpers import ADAPTER_NAMES, lm_batch, tiny_llama, wrap


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("adapter", ADAPTER_NAMES)
@pytest.mark.parametrize("granularity", ["token", "sequence"])
def test_step_zero_is_the_base_model(adapter: str, dtype: torch.dtype, granularity: str) -> None:
    base = tiny_llama().to(dtype)
    batch = lm_batch()
    batch["attention_mask"][0, -2:] = 0
    expected = copy.deepcopy(base)(**batch)
    model = wrap(base, adapter=adapter, granularity=granularity, dropout=0.5)
    for training in (False, True):
        model.train(training)
        output = model(**batch)
        assert torch.equal(output.logits, expected.logits)
        if not (training and adapter == "adalora"):  # AdaLoRA adds its orthogonality loss in training
            assert torch.equal(output.loss, expected.loss)


@pytest.mark.parametrize("adapter", ADAPTER_NAMES)
def test_kmeans_sees_the_frozen_model(adapter: str) -> None:
    """The centres do not depend on the adapter's values: adapters are off while tokens are collected."""
    from tests.helpers import adapted, centers

    config: dict[str, Any] = {"adapter": adapter, "center_init": "kmeans", "r": 2}
    fresh, trained = wrap(tiny_llama(), **config), adapted(tiny_llama(), **config)
    data = [lm_batch(batch=4, length=12, seed=s) for s in range(3)]
    for model in (fresh, trained):
        mj.initialize_centers(model, data, num_tokens=64, progress=False, restarts=2)
    for a, b in zip(centers(fresh).values(), centers(trained).values(), strict=True):
        assert torch.equal(a, b)
