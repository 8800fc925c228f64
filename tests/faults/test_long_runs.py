"""Nothing grows: memory, hooks, open files and compiled graphs over many steps, and over adapters that come and go.

`MONKEYJUMP_STEPS=10000` and `MONKEYJUMP_ADAPTERS=500` take as long as that sounds; fewer are enough in between.
"""

from __future__ import annotations

import gc
import os
import tracemalloc
from collections import Counter
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import monkeyjump as mj
from tests.helpers import adapted, lm_batch, routing_state, tiny_llama

STEPS = int(os.environ.get("MONKEYJUMP_STEPS", "140"))
ADAPTERS = int(os.environ.get("MONKEYJUMP_ADAPTERS", "12"))


def kept(model: Any) -> dict[str, int]:
    """What may not grow."""
    gc.collect()
    modules = list(model.modules())
    hooks = sum(
        len(getattr(module, name))
        for module in modules
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_state_dict_hooks")
    )
    tensors = sum(isinstance(each, torch.Tensor) for each in gc.get_objects())
    files = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    graphs = sum(counters["stats"].values())
    return {"modules": len(modules), "hooks": hooks, "tensors": tensors, "files": files, "graphs": graphs}


def grown(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """What there is more of; other tests of this process may have left something that is gone by now."""
    return {name: after[name] - before[name] for name in before if after[name] > before[name]}


@pytest.mark.parametrize("settings", [{}, {"placement": "projection", "router": "linear", "shared_modules": None}])
def test_many_steps_leave_nothing_behind(settings: dict[str, Any]) -> None:
    model = adapted(tiny_llama(2), ema_interval=1, **settings).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    batches = [lm_batch(batch=2, length=6 + number % 3, seed=number) for number in range(6)]

    def steps(count: int) -> None:
        for number in range(count):
            loss = model(**batches[number % len(batches)]).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if number % 7 == 0:
                with torch.no_grad():
                    model(**batches[0])

    steps(40)  # what is made once is there now
    before = kept(model)
    tracemalloc.start()
    steps(STEPS // 2)
    gc.collect()
    half, _ = tracemalloc.get_traced_memory()
    steps(STEPS // 2)
    gc.collect()
    whole, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown(before, kept(model)) == {}
    assert whole - half < 64 * 1024  # bytes; a number kept of each step would be more over 10,000 of them
    state = routing_state(model)
    assert all(torch.isfinite(tensor).all() for tensor in state.values())


def test_adapters_that_come_and_go_leave_nothing_behind() -> None:
    model = adapted(tiny_llama(2))
    batch = lm_batch()
    names = Counter(name.split(".")[-1] for name, _ in model.named_modules())

    def come_and_go(number: int) -> None:
        kind: list[dict[str, Any]] = [
            {},
            {"router": "linear", "placement": "projection", "shared_modules": None},
            {"adapter": "propulsion"},
        ]
        model.add_adapter(f"other-{number}", mj.MonkeyJumpConfig(**CONFIG, **kind[number % 3]))
        model.set_adapter(f"other-{number}")
        model(**batch).loss.backward()
        model.delete_adapter(f"other-{number}")
        model.set_adapter("default")
        model.zero_grad()

    for number in range(3):
        come_and_go(number)
    before = kept(model)
    for number in range(ADAPTERS):
        come_and_go(number)
    assert grown(before, kept(model)) == {}
    assert Counter(name.split(".")[-1] for name, _ in model.named_modules()) == names


CONFIG: dict[str, Any] = {"target_modules": ["q_proj", "k_proj", "v_proj"]}
