"""What a recipe's training reads: the mixture, which sequences go into a batch, and how many shapes batches have."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from monkeyjump.errors import ConfigError
from monkeyjump.tasks import Task, expand
from monkeyjump.tasks.batches import BatchSampler, bucket_sizes, by_tokens
from monkeyjump.tasks.collate import PackingCollator, PaddingCollator
from monkeyjump.tasks.encode import Encoder
from monkeyjump.tasks.mixture import Mixture, StreamingMixture
from monkeyjump.training.fast import FastSettings
from monkeyjump.training.progress import say
from monkeyjump.training.recipe import Recipe

# Widths of padded batches that are compiled: each is a compilation, short for blocks and long for a whole model.
WIDTHS = {"blocks": 6, "model": 4}
GPU_TOKENS, CPU_TOKENS = 16_384, 1_024  # of one forward while tokens are read for the centres


@dataclass
class TrainingData:
    """Data for a Trainer."""

    items: Any
    sampler: BatchSampler | None  # None: streamed
    collator: Any
    shapes: int | None  # how many shapes batches can have; None: as many as there are lengths
    calibration: Iterable[dict[str, torch.Tensor]] | None = None  # for the centres; None: streamed, from the stream

    def steps(self, recipe: Recipe, ranks: int = 1) -> int:
        """Optimiser steps of the whole run, counted as the Trainer counts them; ranks share the batches of an epoch."""
        if recipe.train.max_steps is not None or self.sampler is None:
            return recipe.train.max_steps or 1
        per_epoch = math.ceil(math.ceil(len(self.sampler) / ranks) / recipe.train.accumulation)
        return max(1, math.ceil(recipe.train.epochs * per_epoch))


def training_data(recipe: Recipe, tasks: list[Task], tokenizer: Any, fast: FastSettings) -> TrainingData:
    """The data of a recipe. Compiled or captured training gets batches of few fixed shapes."""
    data = recipe.data
    encoder = Encoder(tokenizer, **encoding(recipe))
    if data.packing and any(task.modality != "text" for task in tasks):
        raise ConfigError("data.packing=true: rows with pictures or clips are not packed. Set data.packing=false.")
    if data.streaming:
        items = StreamingMixture(tasks, encoder, data.folder, weights=data.weights, seed=recipe.seed)
        # lengths are not known before they come: full, half and quarter length
        sizes = bucket_sizes([-(-data.max_length // part) for part in (4, 2, 1)], count=3)
        return _padded(recipe, encoder, items, None, sizes if fast.few_shapes else ())
    mixture = _mixture(recipe, tasks, encoder)
    if data.packing:
        return _packed(recipe, encoder, mixture, fast)
    longest = max(mixture.lengths)
    if data.buckets and longest > max(data.buckets):
        raise ConfigError(
            f"data.buckets={data.buckets}: none holds the longest training text, {longest} tokens. Add a bucket as "
            "large, or lower data.max_length."
        )
    sampler = BatchSampler.bucketed(mixture.order, mixture.lengths, recipe.train.batch_size, recipe.seed)
    count = WIDTHS.get(str(fast.compile), WIDTHS["blocks"])
    sizes = bucket_sizes(mixture.lengths, count) if fast.few_shapes else ()
    found = _padded(recipe, encoder, mixture, sampler, sizes)
    if widths := found.collator.buckets:  # sequences of one batch differ, so it is a little more
        padded = sum(min(width for width in widths if width >= length) for length in mixture.lengths)
        share = 1 - sum(mixture.lengths) / padded
        say(f"batches are {', '.join(map(str, widths))} tokens wide, {share:.0%} of it padding (data.packing: none)")
    return found


def encoding(recipe: Recipe) -> dict[str, Any]:
    """How the examples of a recipe become ids."""
    same = {name: getattr(recipe.data, name) for name in ("max_length", "bad_media", "frames")}
    return {**same, "answer_format": recipe.data.answer}


def encode_ahead(recipe: Recipe, tokenizer: Any) -> None:
    """Leave the training texts of a recipe in the cache on disk, where its run will find them."""
    tasks = expand(recipe.tasks, recipe.data.bad_media)
    if not recipe.data.streaming and all(task.modality == "text" for task in tasks):
        _load(recipe, tasks, Encoder(tokenizer, **encoding(recipe)))


def _load(recipe: Recipe, tasks: list[Task], encoder: Encoder) -> Mixture:
    data = recipe.data
    caps: dict[str, int] = {task.name: data.cap for task in tasks if data.cap is not None} | data.caps
    drawn: dict[str, Any] = {"weights": data.weights, "temperature": data.temperature or 1.0}
    return Mixture.load(tasks, encoder, data.folder, caps=caps, seed=recipe.seed, **drawn)


def _mixture(recipe: Recipe, tasks: list[Task], encoder: Encoder) -> Mixture:
    mixture = _load(recipe, tasks, encoder)
    left_out = {
        "the context of {count} of {all} training texts was cut to max_length": encoder.counts.truncated,
        "{count} training rows were left out because their pictures or clips cannot be used": encoder.counts.unreadable,
        "{count} training texts did not fit max_length even without context and were left out": encoder.counts.dropped,
    }
    for words, counts in left_out.items():
        for name, count in counts.items():
            say(f"{name}: {words.format(count=count, all=encoder.counts.encoded[name])}")
    return mixture


def _padded(
    recipe: Recipe, encoder: Encoder, items: Any, sampler: BatchSampler | None, sizes: tuple[int, ...]
) -> TrainingData:
    """Padded batches: as wide as the recipe says, or of the given sizes, or multiples of 8 wide."""
    fixed = tuple(sorted(recipe.data.buckets)) or sizes
    rows = recipe.train.batch_size if sizes else 0
    pad, pictures = encoder.tokenizer.pad_token_id, encoder.pictures
    collator = PaddingCollator(pad, multiple_of=8, buckets=fixed, rows=rows, pictures=pictures)
    calibration = CalibrationBatches(items, encoder, recipe.seed) if isinstance(items, Mixture) else None
    return TrainingData(items, sampler, collator, len(fixed) or None, calibration)


def _packed(recipe: Recipe, encoder: Encoder, mixture: Mixture, fast: FastSettings) -> TrainingData:
    capacity = recipe.data.max_length * recipe.train.batch_size
    most = None
    if fast.few_shapes:  # attention works through as many sequences as a row may have: not more than it needs
        mean = sum(mixture.lengths) / len(mixture)
        most = min(capacity // min(mixture.lengths), max(8, int(2 * capacity / mean)))
    boundaries = recipe.data.max_length if fast.few_shapes else None
    return TrainingData(
        mixture,
        BatchSampler.packed(mixture.order, mixture.lengths, capacity, most),
        PackingCollator(encoder.tokenizer.pad_token_id, capacity, most, boundaries),
        shapes=1,
        calibration=CalibrationBatches(mixture, encoder, recipe.seed),
    )


class CalibrationBatches:
    """Texts of a mixture in random order, in batches that fill a device: centres need no loss and no small batches."""

    def __init__(self, mixture: Mixture, encoder: Encoder, seed: int) -> None:
        self.mixture = mixture
        self.collator = PaddingCollator(encoder.tokenizer.pad_token_id, multiple_of=8, pictures=encoder.pictures)
        self.seed = seed

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        order = list(range(len(self.mixture)))
        random.Random(f"{self.seed}/centres").shuffle(order)
        budget = GPU_TOKENS if torch.cuda.is_available() else CPU_TOKENS
        for batch in by_tokens(order, self.mixture.lengths, budget, f"{self.seed}/centres/batches"):
            yield self.collator([self.mixture[index] for index in batch])
