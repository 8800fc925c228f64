"""What single keys of a recipe cannot show: settings that do not go together."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from monkeyjump.training.recipe import Recipe


def is_folder_name(name: str) -> bool:
    return name not in ("", ".", "..") and not set(name) & set("/\\\0")


def check(recipe: Recipe) -> list[str]:
    """Problems between settings, one sentence each."""
    data, train = recipe.data, recipe.train
    found = []
    if data.streaming and train.max_steps is None:
        found.append("data.streaming=true needs train.max_steps: the length of streamed data is not known.")
    if train.compile == "model" and train.gradient_checkpointing:
        found.append(
            "train.compile='model' cannot hold train.gradient_checkpointing=true, which runs blocks twice: "
            "set train.compile='blocks'."
        )
    if data.buckets and data.packing:
        found.append("data.buckets is for padded batches: data.packing=true has one length; leave one of them out.")
    if data.buckets and data.streaming and max(data.buckets) < data.max_length:
        found.append(
            f"data.buckets={data.buckets} must reach data.max_length={data.max_length}: a streamed text may be as long."
        )
    return found
