"""A training step never waits for the GPU: forward, backward, optimiser and the move of the centres only issue work."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import get_peft_model

from monkeyjump import methods
from monkeyjump.bench.variants import skip_masks
from tests.helpers import disturb, tiny_llama
from tests.methods.common import told_the_task

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SETTLE = 3  # steps in which kernels are compiled and groups found


def built(method: str) -> Any:
    settings = {"center_init": "random_normalized"} if method.startswith("mj") else {}
    config = methods.build(method, preset="mj_paper", target_modules=["q_proj", "v_proj"], **settings)
    config.task_type = "CAUSAL_LM"
    base = tiny_llama(4)
    skip_masks(base)  # Transformers asks the host about padding where it makes masks
    model = get_peft_model(base, config).cuda().train()
    disturb(model)
    return model


@pytest.mark.parametrize("padded", [False, True], ids=["dense", "padded"])
@pytest.mark.parametrize("method", methods.names())
def test_no_step_waits(method: str, padded: bool) -> None:
    model = built(method)
    ids = torch.randint(100, (4, 16), device="cuda")
    given = {"input_ids": ids, "labels": ids, "use_cache": False}
    if padded:
        mask = torch.ones_like(ids)
        mask[0, :5] = 0
        given["attention_mask"] = mask
    if told_the_task(method):
        given["task_ids"] = torch.tensor([0, 1, 0, 1], device="cuda")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    try:
        for step in range(SETTLE + 2):
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error" if step >= SETTLE else "default")
            model(**given).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        torch.cuda.set_sync_debug_mode("default")
