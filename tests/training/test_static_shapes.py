"""Few fixed batch shapes: least padding for the widths, and rows of padding that change nothing."""

from __future__ import annotations

import copy
import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from monkeyjump.errors import ConfigError
from monkeyjump.models import load_tokenizer
from monkeyjump.tasks import expand
from monkeyjump.tasks.batches import bucket_sizes
from monkeyjump.tasks.collate import PaddingCollator
from monkeyjump.tasks.encode import Encoded
from monkeyjump.training.data import TrainingData, training_data
from monkeyjump.training.fast import FastSettings
from monkeyjump.training.recipe import load_recipe
from tests.helpers import VOCAB, adapted, assert_same, gradients, routing_state
from tests.methods.test_mixlora import adapted_mixlora
from tests.tiny_folder import save_tiny_model, write_recipe


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return write_recipe(folder, save_tiny_model(folder / "tiny"))


def prepared(path: Path, *overrides: str) -> TrainingData:
    recipe = load_recipe(str(path), overrides)
    fast = FastSettings.of_recipe(recipe, gpu=False)
    return training_data(recipe, expand(recipe.tasks), load_tokenizer(recipe.model), fast)


def shapes(data: TrainingData, epochs: int = 2) -> set[tuple]:
    found = set()
    for epoch in range(epochs):
        data.sampler.set_epoch(epoch)  # type: ignore[union-attr]
        for indices in data.sampler:  # type: ignore[union-attr]
            batch = data.collator([data.items[index] for index in indices])
            found.add(tuple(sorted((name, tuple(getattr(x, "shape", (x,)))) for name, x in batch.items())))
    return found


# --- widths ---------------------------------------------------------------------------------------------------------


def padded_tokens(sizes: tuple[int, ...], lengths: list[int]) -> int:
    return sum(min(size for size in sizes if size >= length) for length in lengths)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_no_other_widths_pad_less(count: int) -> None:
    rng = random.Random(count)
    for _ in range(20):
        lengths = [rng.randint(1, 60) for _ in range(15)]
        candidates = sorted({-(-length // 8) * 8 for length in lengths})
        choices = itertools.combinations(candidates[:-1], min(count, len(candidates)) - 1)
        least = min(padded_tokens((*choice, candidates[-1]), lengths) for choice in choices)
        sizes = bucket_sizes(lengths, count)
        assert len(sizes) <= count
        assert all(size % 8 == 0 for size in sizes)
        assert padded_tokens(sizes, lengths) == least


def test_widths_of_equal_lengths() -> None:
    assert bucket_sizes([17] * 9, 4) == (24,)


# --- rows of padding ------------------------------------------------------------------------------------------------


def items(count: int) -> list[Encoded]:
    rng = random.Random(3)
    return [
        Encoded(np.array([rng.randint(1, VOCAB - 1) for _ in range(length)]), length - 3, index % 2)
        for index, length in enumerate([9, 7, 12, 5][:count])
    ]


@pytest.mark.parametrize(
    "settings",
    [{}, {"granularity": "sequence"}, {"granularity": "sequence", "sequence_token": "mean"}, {"granularity": "task"}],
    ids=["token", "sequence", "mean", "task"],
)
def test_rows_of_padding_change_neither_gradients_nor_centres(settings: dict[str, Any]) -> None:
    full = adapted(**settings)
    assert_rows_do_not_count(full)


def test_rows_of_padding_change_no_loss_of_routers() -> None:
    assert_rows_do_not_count(adapted_mixlora(aux_loss_weight=0.5))


def assert_rows_do_not_count(model: Any) -> None:
    twin = copy.deepcopy(model)
    losses = []
    for one, rows in ((model, 4), (twin, 0)):
        batch = PaddingCollator(0, buckets=(16,), rows=rows)(items(3))
        assert batch["input_ids"].shape == (rows or 3, 16)
        loss = one.train()(**batch, num_items_in_batch=torch.tensor(9)).loss
        loss.backward()
        losses.append(loss.detach())
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-6)
    assert_same(gradients(model), gradients(twin), rtol=1e-4, atol=1e-6)
    assert_same(routing_state(model), routing_state(twin), rtol=1e-5, atol=1e-6)


def test_a_row_of_padding_belongs_to_a_task_that_exists() -> None:
    assert PaddingCollator(0, rows=4)(items(2))["task_ids"].tolist() == [0, 1, 1, 1]


# --- what a recipe gets ---------------------------------------------------------------------------------------------


def test_compiled_recipes_have_few_shapes(recipe_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = prepared(recipe_file, "data.cap=23")
    assert plain.shapes is None
    assert {dict(shape)["input_ids"][0] for shape in shapes(plain)} == {2, 4}  # 46 texts: the last batch is incomplete
    static = prepared(recipe_file, "data.cap=23", "train.compile=true")
    assert static.shapes == len(static.collator.buckets)
    assert 1 < len(shapes(static)) <= static.shapes
    assert {dict(shape)["input_ids"][0] for shape in shapes(static)} == {4}
    assert "of it padding" in capsys.readouterr().out


def test_packed_rows_have_one_shape(recipe_file: Path) -> None:
    assert len(shapes(prepared(recipe_file, "data.packing=true"))) > 1  # of task ids and prompt lengths
    static = prepared(recipe_file, "data.packing=true", "train.compile=model")
    assert len(shapes(static)) == static.shapes == 1


def test_widths_by_hand(recipe_file: Path) -> None:
    chosen = prepared(recipe_file, "data.buckets=128,144")
    assert {dict(shape)["input_ids"][1] for shape in shapes(chosen)} == {128}
    with pytest.raises(ConfigError, match=r"data\.buckets=\[64\]: none holds the longest training text"):
        prepared(recipe_file, "data.buckets=[64]")


def test_streamed_texts_get_widths_that_hold_them_all(recipe_file: Path) -> None:
    data = prepared(recipe_file, "data.streaming=true", "train.compile=true", "data.max_length=300")
    assert data.collator.buckets == (80, 152, 304)


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["train.compile=all"], "train.compile='all' must be false, true, blocks or model"),
        (["train.fused_loss=triton"], "train.fused_loss='triton' must be false, true, auto, liger, torch or off"),
        (["train.compile=model", "train.gradient_checkpointing=true"], "set train.compile='blocks'"),
        (["data.buckets=64", "data.packing=true"], "data.buckets=64 must be a list"),
        (["data.buckets=[64]", "data.packing=true"], "data.buckets is for padded batches"),
        (["data.buckets=[0, 64]"], "data.buckets.0=0 must be at least 1"),
        (["data.buckets=[64]", "data.streaming=true"], "must reach data.max_length"),
    ],
)
def test_settings_that_do_not_go_together(recipe_file: Path, overrides: list[str], part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(str(recipe_file), overrides)
    assert part in str(caught.value)
