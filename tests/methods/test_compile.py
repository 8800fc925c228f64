"""Every method with its blocks compiled (fullgraph): no graph break; the loss, gradients and state of eager mode.

Whole models, MixLoRA's and MoA's published structures among them, are compiled in `test_structures_compile.py` and, for
Monkey Jump, in `tests/tuner/test_compile.py`; blocks that share their graphs, over several steps, in `test_graphs.py`.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch._dynamo

from tests.helpers import COMPILING, assert_same, gradients, routing_state, tiny_llama
from tests.methods.common import LOUD, METHODS, batch_for, moved

pytestmark = COMPILING
# aot_eager traces forward and backward as inductor does, without a minute of C++ compilation: once for every adapter
# and every way to put experts together; what is made of the same parts is only looked at for graph breaks
WITH_BACKWARD = (
    *("lora", "lora_fa", "adalora", "propulsion", "mjpropulsion"),
    *("moelora", "hydralora", "more", "moa", "moe_adalora"),
)

# two projections and one block are the whole structure, and half the time
TWO: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"]}
SMALL: dict[str, dict[str, Any]] = {
    "mola": {**TWO, "experts": 3},
    "moe_adalora": {**TWO, "target_r": 1, "total_step": 4, "score_per_token": True},
    **{case: {"target_modules": ["q_proj", "v_proj", "o_proj"]} for case in METHODS if case.startswith("mj")},
}


def step(model: Any, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    loss = model(**batch).loss
    loss.backward()
    return {"loss": loss.detach(), **gradients(model), **routing_state(model)}


# mjlora, in the same way: tests/tuner/test_compile.py
CASES = [case for case in [*METHODS, "mjlora_prompt", "moa published, after the norm"] if case != "mjlora"]


@pytest.mark.parametrize("case", CASES)
def test_compiled_equals_eager(case: str) -> None:
    model = moved(case, tiny_llama(1), **{**LOUD.get(case, {}), **SMALL.get(case, TWO)}).train()
    twin = copy.deepcopy(model)
    batch = batch_for(case)
    batch["attention_mask"][0, :2] = 0
    for block in model.get_base_model().model.layers:
        block.compile(fullgraph=True, backend="aot_eager" if case in WITH_BACKWARD else "eager")
    assert_same(step(twin, batch), step(model, batch), rtol=1e-4, atol=1e-5)
