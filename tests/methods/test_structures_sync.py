"""No look at values in a training step: what a GPU would have to wait for does not occur."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers import lm_batch, tiny_llama, wrap
from tests.methods.structures import mixlora, moa, more

LOOKS = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "unique", "equal")
CONFIGS = {"mixlora": mixlora(aux_loss_weight=0.1), "moa": moa(), "more": more(contrastive_weight=0.1)}


class Looks(TorchDispatchMode):
    """Counts the operations that bring a value, or a shape that depends on values, to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in LOOKS:
            self.found.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def looks_of(model: Any, **extra: torch.Tensor) -> list[str]:
    batch = lm_batch()
    batch["attention_mask"][0, :2] = 0
    with Looks() as looks:
        model.train()(**batch, **extra).loss.backward()
    return looks.found


@pytest.mark.parametrize("method", CONFIGS)
def test_a_training_step_looks_at_no_value(method: str) -> None:
    base = tiny_llama()
    base.enable_input_require_grads()
    own = looks_of(base)  # the model's own masks
    tasks = {"task_ids": torch.tensor([0, 1, 2])} if method == "more" else {}
    found = looks_of(wrap(tiny_llama(), CONFIGS[method]), **tasks)
    # ids on the CPU are checked against the number of tasks, once per block, which costs nothing there
    checked = ["_local_scalar_dense"] * 2 if method == "more" else []
    assert sorted(found) == sorted([*own, *checked])
