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


class Slots(DynamicLayer):
    """Keys and values [rows, heads, slots, width] that stay where they are; a token is written into slot `place`.

    Transformers' own static layer counts its tokens on the device, and whoever asked for the number would wait.
    """

    keys: Any
    values: Any

    def __init__(self, like: Any, rows: int, slots: int, place: Tensor) -> None:
        super().__init__()
        # Zeros: a slot that no token has been written to is masked, but a NaN would show through the mask.
        self.keys, self.values = (
            given.new_zeros(rows, given.shape[1], slots, given.shape[3]) for given in (like.keys, like.values)
        )
        self.is_initialized, self.place = True, place

    def fill(self, given: Any) -> None:
        """Begin with the tokens of a growing layer."""
        rows, _, width, _ = given.keys.shape
        self.keys[:rows, :, :width].copy_(given.keys)
        self.values[:rows, :, :width].copy_(given.values)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.keys.index_copy_(2, self.place, key_states)
        self.values.index_copy_(2, self.place, value_states)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.keys.shape[2]
