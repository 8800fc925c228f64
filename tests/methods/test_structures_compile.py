"""MixLoRA, MoRE and MoA's full mix under torch.compile(fullgraph=True): no graph break, so nothing looks at values."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch._dynamo
from peft import PeftModel

from tests.helpers import COMPILING, assert_same, gradients, lm_batch, tiny_llama
from tests.methods.structures import adapted_mixlora, adapted_moa, adapted_more

pytestmark = COMPILING


def steps(model: PeftModel, call: Any, tasks: bool) -> list[dict[str, torch.Tensor]]:
    """Gradients of three training forwards; recompiling after the second (the first left losses behind) is an error."""
    found = []
    model.train()
    for step in range(3):
        batch = lm_batch(seed=step)
        batch["attention_mask"][0, :2] = 0
        if tasks:
            batch["task_ids"] = torch.tensor([0, 2, 1])
        with torch._dynamo.config.patch(error_on_recompile=step > 1):
            call(**batch).loss.backward()
        found.append(gradients(model))
    return found


@pytest.mark.parametrize("method", ["mixlora", "more", "moa"])
def test_compiled_equals_eager(method: str) -> None:
    base = tiny_llama(1)
    model = {
        "mixlora": lambda: adapted_mixlora(base, aux_loss_weight=0.1),
        "more": lambda: adapted_more(base, contrastive_weight=0.1),
        "moa": lambda: adapted_moa(base),
    }[method]()
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    tasks = method == "more"
    for a, b in zip(steps(twin, twin, tasks), steps(model, compiled, tasks), strict=True):
        assert_same(a, b, rtol=1e-3, atol=1e-4)
