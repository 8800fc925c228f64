"""Mixtures and learned routers on every kind of block list: identity, training with losses, padding, save and load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model

from monkeyjump.tuner.model import require_context
from tests.architectures.test_architectures import MODELS, base_of, batch_of, wrapped
from tests.architectures.test_architectures import config_of as config_for
from tests.helpers import assert_same, disturb, gradients
from tests.methods.common import spread

LAYOUTS: dict[str, dict[str, Any]] = {
    "projections": {"placement": "projection", "router": "linear", "aux_loss_weight": 0.5, "contrastive_weight": 0.1},
    "block": {"router": "linear", "aux_loss_weight": 0.5},
    "sigmoid": {"router": "sigmoid", "top_k": None},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_start_train_save(name: str, layout: str, tmp_path: Path) -> None:
    batch, settings = batch_of(name), LAYOUTS[layout]
    base = base_of(name)
    with torch.no_grad():
        expected = base(**batch).logits
        fresh = get_peft_model(base, config_for(name, **settings)).eval()
        assert torch.equal(fresh(**batch).logits, expected)
    found = []
    for _ in range(2):  # what the padding holds changes nothing
        model: Any = wrapped(name, **settings)
        disturb(model)
        spread(model)
        model.train()
        model(**batch).loss.backward()
        found.append(gradients(model))
        batch = {**batch, "input_ids": torch.where(batch["attention_mask"].bool(), batch["input_ids"], 7)}
    assert_same(found[0], found[1], rtol=1e-4, atol=1e-5)
    last = require_context(model).losses.last
    assert ("balance" in last) is ("aux_loss_weight" in settings)
    model.save_pretrained(str(tmp_path))
    again = PeftModel.from_pretrained(base_of(name), tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(again(**batch).logits, model.eval()(**batch).logits)
