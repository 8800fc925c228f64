"""What values a recipe may have; every problem is one sentence with the field, its value and the rule."""

from __future__ import annotations

import math
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
    data, train, evaluate = recipe.data, recipe.train, recipe.evaluate
    above = "must be above 0 and finite"
    some = "must be at least 1, or null for all"
    return [
        (
            "name",
            _is_folder_name(recipe.name),
            "must be the name of one folder; choose another place with output=DIR",
        ),
        ("seed", 0 <= recipe.seed < 2**32, "must be from 0 to 4294967295"),
        ("data.answer", data.answer in ("letter", "text"), "must be 'letter' or 'text'"),
        ("data.cap", _is_limit(data.cap), some),
        ("data.caps", all(cap >= 1 for cap in data.caps.values()), "must be at least 1 for every task"),
        ("data.weights", all(map(_is_positive, data.weights.values())), f"{above} for every task"),
        ("data.temperature", data.temperature is None or _is_positive(data.temperature), f"{above}, or null"),
        ("data.max_length", data.max_length >= 8, "must be at least 8"),
        ("data.validation", data.validation >= 1, "must be at least 1: the best checkpoint is chosen on it"),
        ("data.buckets", all(size >= 1 for size in data.buckets), "must be a list of lengths, e.g. 128,256,512"),
        ("evaluate.mode", recipe.mode in ("letter", "text", "generate"), "must be letter, text or generate"),
        ("evaluate.validation_limit", _is_limit(evaluate.validation_limit), some),
        ("evaluate.test_limit", _is_limit(evaluate.test_limit), some),
        ("evaluate.batch_tokens", evaluate.batch_tokens >= 1, "must be at least 1"),
        ("train.lr", _is_positive(train.lr), above),
        ("train.epochs", _is_positive(train.epochs), above),
        ("train.max_steps", _is_limit(train.max_steps), "must be at least 1, or null for as many as the epochs have"),
        ("train.batch_size", train.batch_size >= 1, "must be at least 1"),
        ("train.accumulation", train.accumulation >= 1, "must be at least 1"),
        ("train.warmup", 0 <= train.warmup < 1, "must be a share of the steps in [0, 1)"),
        ("train.weight_decay", 0 <= train.weight_decay < math.inf, "must be at least 0 and finite"),
        ("train.max_grad_norm", 0 <= train.max_grad_norm < math.inf, "must be finite, 0 for no clipping or above"),
        ("train.eval_steps", _is_limit(train.eval_steps), "must be at least 1, or null for four times in the run"),
        ("train.save_steps", _is_limit(train.save_steps), "must be at least 1, or null for train.eval_steps"),
        ("train.log_steps", train.log_steps >= 1, "must be at least 1"),
        ("train.workers", train.workers >= 0, "must be at least 0"),
        ("train.keep_checkpoints", train.keep_checkpoints >= 2, "must be at least 2: one may be lost in a crash"),
        ("train.patience", _is_limit(train.patience), "must be at least 1, or null for never"),
        ("train.compile", train.compile in COMPILE, "must be false, true, 'blocks' or 'model'"),
        ("train.fused_loss", train.fused_loss in FUSED_LOSS, "must be auto, liger, torch, or true or false"),
        ("tasks", len(recipe.tasks) > 0, "must name at least one task"),
    ]


def _is_positive(value: float) -> bool:
    return 0 < value < math.inf  # NaN is neither


def _is_limit(value: int | None) -> bool:
    return value is None or value >= 1


def _is_folder_name(name: str) -> bool:
    return name not in ("", ".", "..") and not set(name) & set("/\\\0")


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
    if data.buckets and data.streaming and max(data.buckets) < data.max_length:
        found.append(
            f"data.buckets={data.buckets} must reach data.max_length={data.max_length}: a streamed text may be as long."
        )
    return found
