"""KV caches as evaluation needs them."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer


class _NothingKept(DynamicLayer):
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states


def nothing_kept() -> Cache:
    """A cache that stays empty: the forward is one without a cache, and the model sees that rows are not packed."""
    return Cache(layer_class_to_replicate=_NothingKept)
