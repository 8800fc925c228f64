"""Models whose projections share inputs, and how they are compared with and without kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from monkeyjump.ops.dispatch import implementation
from tests.helpers import adapted, lm_batch, tiny_llama

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}


def batch(seed: int = 0) -> dict[str, torch.Tensor]:
    return {name: value.to(DEVICE) for name, value in lm_batch(batch=2, length=5, seed=seed).items()}


def always_on(targets: list[str] | None = None, layers: int = 1, **changes: Any) -> Any:
    """LoRA on the attention, nothing routed: q, k, v and o look alike."""
    settings = {"target_modules": targets or ATTENTION, "shared_modules": [], "layers_to_route": [], **changes}
    return adapted(tiny_llama(layers), **settings).to(DEVICE)


def spied_passes(patch: pytest.MonkeyPatch) -> list[int]:
    """How many projections took part in each pass over an input, filled as they are made."""
    from monkeyjump.ops.kernels import lora, lora_few_tokens
    from monkeyjump.ops.lowrank import Update

    found: list[int] = []
    for module, name in ((lora, "down"), (lora_few_tokens, "at_once")):
        original = getattr(module, name)

        def spy(x: torch.Tensor, what: Any, *rest: Any, _original: Any = original, **options: Any) -> torch.Tensor:
            found.append(len(what.As if isinstance(what, Update) else what))
            return _original(x, what, *rest, **options)

        patch.setattr(module, name, spy)
    return found


def logits(model: nn.Module, seed: int = 0) -> torch.Tensor:
    with torch.no_grad():
        return model(**batch(seed)).logits


def assert_torch_agrees(model: Any, seed: int = 0) -> None:
    """The logits of the model as it stands, with kernels and without."""
    with implementation("triton"):
        found = logits(model, seed)
    with implementation("torch"):
        torch.testing.assert_close(found, logits(model, seed), **CLOSE)
