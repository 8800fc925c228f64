"""torch.compile(fullgraph=True): no graph break, no recompilation, the numbers of eager mode over several steps."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch._dynamo
from peft import PeftModel

from tests.helpers import COMPILING, adapted, assert_same, gradients, lm_batch, routing_state, tiny_llama

pytestmark = COMPILING
FEW: dict[str, Any] = {"target_modules": ["q_proj", "k_proj", "gate_proj"], "shared_modules": ["gate_proj"]}
BACKEND = "aot_eager"  # traces forward and backward as inductor does, without a minute of C++ compilation


def three_steps(model: PeftModel, call: Any) -> list[dict[str, torch.Tensor]]:
    """Gradients and routing state after each of three training steps; recompiling after the second is an error."""
    model.train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    torch.manual_seed(0)
    history = []
    for step in range(3):
        batch = lm_batch(seed=step)
        batch["attention_mask"][0, :2] = 0
        with torch._dynamo.config.patch(error_on_recompile=step > 1):
            call(**batch).loss.backward()
        history.append({**gradients(model), **routing_state(model)})
        optimizer.step()
        optimizer.zero_grad()
    return history


def compare(model: PeftModel, twin: PeftModel, compiled: Any, eager: Any) -> None:
    for a, b in zip(three_steps(twin, eager), three_steps(model, compiled), strict=True):
        assert_same(a, b, rtol=1e-4, atol=1e-5)


def test_the_base_model() -> None:
    """Sequence routing, and the dropout whose mask is made again in backward."""
    model = adapted(tiny_llama(1), **FEW, ema_interval=1, granularity="sequence", adapter="lora_fa", dropout=0.3)
    twin = copy.deepcopy(model)
    compiled = torch.compile(model.get_base_model(), fullgraph=True, backend=BACKEND)
    compare(model, twin, compiled, twin.get_base_model())


def test_the_peft_model() -> None:
    model = adapted(tiny_llama(1), **FEW, ema_interval=1)
    twin = copy.deepcopy(model)
    compare(model, twin, torch.compile(model, fullgraph=True, backend=BACKEND), twin)
    model.eval()
    twin.eval()
    with torch.no_grad():
        batch = lm_batch(seed=9)
        logits = torch.compile(model, fullgraph=True, backend=BACKEND)(**batch).logits
        torch.testing.assert_close(logits, twin(**batch).logits, rtol=1e-4, atol=1e-5)


def test_every_block_alone() -> None:
    """What a user does to a model whose loop over the blocks stays in Python."""
    model = adapted(tiny_llama(2), **FEW, ema_interval=1)
    twin = copy.deepcopy(model)
    for block in model.get_base_model().model.layers:  # type: ignore[union-attr]
        block.compile(fullgraph=True, backend=BACKEND)
    compare(model, twin, model, twin)
