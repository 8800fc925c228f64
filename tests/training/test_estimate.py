"""The guess of a run's time: forwards counted in the tokens of the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from monkeyjump.models import load_model
from monkeyjump.tasks import expand
from monkeyjump.tasks.preflight import look_at
from monkeyjump.training import estimate as module
from monkeyjump.training.data import training_data
from monkeyjump.training.estimate import estimate, in_words, say_how_long
from monkeyjump.training.fast import FastSettings
from monkeyjump.training.recipe import load_recipe
from tests.tiny_folder import save_tiny_model, write_recipe


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.2, "1 s"), (7, "7 s"), (44, "40 s"), (89, "90 s"), (95, "2 min"), (3000, "50 min"), (8000, "2 h 10 min"),
     (300_000, "3 days")],
)  # fmt: skip
def test_times_in_words(seconds: float, words: str) -> None:
    assert in_words(seconds) == words


def test_tokens_of_every_part_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_recipe(tmp_path, save_tiny_model(tmp_path / "tiny"))
    recipe = load_recipe(str(path), ["train.accumulation=2"])
    tasks = expand(recipe.tasks)
    model, tokenizer = load_model(recipe.model)
    data = training_data(recipe, tasks, tokenizer, FastSettings())
    monkeypatch.setattr(module, "_seconds_per_token", lambda *args: 0.5)
    found = estimate(model, recipe, data, 8, look_at(tasks), center_tokens=100)
    length = sum(map(len, data.items)) / len(data.items)
    assert found is not None
    assert found == pytest.approx(
        {
            "centres": 50,
            "training": 8 * 2 * 4 * length * 0.5 * 2.5,
            "validation": 2 * (2 * 4) * length * 0.5,
            "test": (2 * 6) * 2 * length * 0.5,
        }
    )
    say_how_long(model, recipe, data, 8, look_at(tasks), 100)
    assert capsys.readouterr().out.startswith("8 steps of 4 x 2 texts: this will take about ")
