"""Learned routers, MixLoRA, MoRE and MoA's full mix, whole, under torch.compile(fullgraph=True): no graph break."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch._dynamo
from peft import PeftModel

from tests.helpers import COMPILING, assert_same, gradients, lm_batch, tiny_llama
from tests.methods.common import moved
from tests.methods.structures import FFN, adapted_mixlora, adapted_moa, adapted_more

pytestmark = COMPILING


def steps(model: PeftModel, call: Any, tasks: bool) -> list[dict[str, torch.Tensor]]:
    """Gradients of two training forwards, of which the second compiles nothing.

    An eager forward comes first: it leaves losses behind, with which the model is compiled anew (what happens without
    them: `test_graphs.py`).
    """
    found = []
    batch = lm_batch(seed=9)
    batch |= {"task_ids": torch.tensor([0, 2, 1])} if tasks else {}
    model.train()(**batch)
    for step in range(2):
        batch = lm_batch(seed=step)
        batch["attention_mask"][0, :2] = 0
        if tasks:
            batch["task_ids"] = torch.tensor([0, 2, 1])
        with torch._dynamo.config.patch(error_on_recompile=step > 0):
            call(**batch).loss.backward()
        found.append(gradients(model))
    return found


@pytest.mark.parametrize("method", ["moelora", "mixlora", "more", "moa"])
def test_compiled_equals_eager(method: str) -> None:
    """With the balance loss staged inside the graph and added to the loss after it."""
    base = tiny_llama(1)
    model = {
        "moelora": lambda: moved("moelora", base, aux_loss_weight=0.5, target_modules=["q_proj", "gate_proj"]),
        "mixlora": lambda: adapted_mixlora(base, aux_loss_weight=0.1, target_modules=["q_proj", *FFN]),
        "more": lambda: adapted_more(base, contrastive_weight=0.1, target_modules=["q_proj", "v_proj"]),
        "moa": lambda: adapted_moa(base, target_modules=["q_proj", "down_proj"]),
    }[method]()
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    tasks = method == "more"
    for a, b in zip(steps(twin, twin, tasks), steps(model, compiled, tasks), strict=True):
        assert_same(a, b, rtol=1e-3, atol=1e-4)
