"""What values a recipe may have; every problem is one sentence with the field, its value and the rule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from monkeyjump.training.recipe import Recipe

COMPILE = (False, True, "blocks", "model")
FUSED_LOSS = (False, True, "auto", "liger", "torch", "off")


def check(recipe: Recipe) -> list[str]:
    """Problems with values, one sentence each."""
    found = []
    for name, ok, rule in _rules(recipe):
        if not ok:
            value: Any = recipe
            for part in name.split("."):
                value = getattr(value, part)
            found.append(f"{name}={value!r} {rule}.")
    if recipe.data.streaming and recipe.train.max_steps is None:
        found.append("data.streaming=true needs train.max_steps: the length of streamed data is not known.")
    return found + _speed_problems(recipe)


def _rules(recipe: Recipe) -> list[tuple[str, bool, str]]:
    data, train = recipe.data, recipe.train
    return [
        ("data.answer", data.answer in ("letter", "text"), "must be 'letter' or 'text'"),
        ("evaluate.mode", recipe.mode in ("letter", "text", "generate"), "must be letter, text or generate"),
        ("data.max_length", data.max_length >= 8, "must be at least 8"),
        ("data.validation", data.validation >= 1, "must be at least 1: the best checkpoint is chosen on it"),
        ("train.lr", train.lr > 0, "must be above 0"),
        ("train.epochs", train.epochs > 0, "must be above 0"),
        ("train.max_steps", train.max_steps is None or train.max_steps > 0, "must be above 0"),
        ("train.batch_size", train.batch_size >= 1, "must be at least 1"),
        ("train.accumulation", train.accumulation >= 1, "must be at least 1"),
        ("train.keep_checkpoints", train.keep_checkpoints >= 2, "must be at least 2: one may be lost in a crash"),
        ("train.warmup", 0 <= train.warmup < 1, "must be a share of the steps in [0, 1)"),
        ("train.patience", train.patience is None or train.patience >= 1, "must be at least 1"),
        ("train.compile", train.compile in COMPILE, "must be false, true, 'blocks' or 'model'"),
        ("train.fused_loss", train.fused_loss in FUSED_LOSS, "must be auto, liger, torch, or true or false"),
        ("data.buckets", all(_is_length(size) for size in data.buckets), "must be a list of lengths, e.g. 128,256,512"),
        ("tasks", len(recipe.tasks) > 0, "must name at least one task"),
    ]


def _is_length(size: Any) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and size >= 1


def _speed_problems(recipe: Recipe) -> list[str]:
    """Settings of the fast path that do not go together."""
    data, train = recipe.data, recipe.train
    found = []
    if train.compile == "model" and train.gradient_checkpointing:
        found.append(
            "train.compile='model' cannot hold train.gradient_checkpointing=true, which runs blocks twice: "
            "set train.compile='blocks'."
        )
    if train.cuda_graphs and train.compile != "model":
        found.append(
            f"train.cuda_graphs=true needs train.compile='model', not {train.compile!r}: graphs of single blocks "
            "would overwrite each other's outputs."
        )
    if data.buckets and data.packing:
        found.append("data.buckets is for padded batches: data.packing=true has one length; leave one of them out.")
    if (
        data.buckets
        and data.streaming
        and all(_is_length(b) for b in data.buckets)
        and max(data.buckets) < data.max_length
    ):
        found.append(
            f"data.buckets={data.buckets} must reach data.max_length={data.max_length}: a streamed text may be as long."
        )
    return found
