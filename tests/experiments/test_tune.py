"""A search over settings: what it proposes, prunes, resumes and writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optuna", reason="optuna is not installed")

from monkeyjump.cli.main import main
from monkeyjump.errors import ConfigError
from monkeyjump.experiments import tune as module
from monkeyjump.experiments.tune import JOURNAL, Range, open_study
from monkeyjump.training.recipe import load_recipe
from tests.tiny_folder import save_tiny_model, write_recipe


@pytest.fixture
def score(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Runs whose validation is best at a rate of 0.01 and rank 4; the settings that were asked for."""
    asked: list[dict[str, Any]] = []

    def run(settings: dict[str, Any], number: int, journal: str, home: str) -> float:
        asked.append(settings)
        if settings["adapter"]["r"] == 3:
            raise ValueError("three is no rank")
        return 1 - abs(settings["train"]["lr"] - 0.01) - 0.1 * abs(settings["adapter"]["r"] - 4)

    monkeypatch.setattr(module, "make_trial", run)
    return asked


WORDS = ["tune", "quickstart", "--space", "train.lr=1e-4..1e-1", "--space", "adapter.r=1,3,4", "--trials", "8"]


def test_the_best_settings_are_found_and_written(
    score: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*WORDS, "--output", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.replace(str(tmp_path), "").splitlines())) <= 80
    runs = json.loads((tmp_path / "tune.json").read_text())["metrics"]["runs"]
    ended = [run for run in runs if run["state"] == "COMPLETE"]
    assert len(ended) == 8  # one that fails is no result, and takes nothing with it
    assert {run["state"] for run in runs if run["settings"]["adapter.r"] == 3} <= {"FAIL"}
    best = max(ended, key=lambda run: run["validation"])["settings"]
    tuned = load_recipe(str(tmp_path / "best.yaml"))
    assert (tuned.train.lr, tuned.adapter["r"]) == (best["train.lr"], best["adapter.r"])
    assert tuned.name == "quickstart-tuned"
    made = len(score)
    assert main([*WORDS, "--output", str(tmp_path)]) == 0  # nothing is missing
    assert len(score) == made


def test_a_search_goes_on_where_it_was_killed(score: list[dict[str, Any]], tmp_path: Path) -> None:
    assert main([*WORDS, "--output", str(tmp_path)]) == 0
    lost = open_study(tmp_path / JOURNAL).ask()
    lost.suggest_float("train.lr", 1e-4, 1e-1, log=True)
    lost.suggest_categorical("adapter.r", (1, 3, 4))
    score.clear()
    assert main([*WORDS, "--trials", "9", "--output", str(tmp_path)]) == 0
    assert score[0]["train"]["lr"] == lost.params["train.lr"]  # what was lost is made first
    with pytest.raises(ConfigError, match="holds a search of another recipe or space"):
        module.tune(load_recipe("quickstart"), [Range.read("train.lr=1,2")], 1, tmp_path, 1, "local")


def test_a_search_in_which_everything_fails_ends(score: list[dict[str, Any]], tmp_path: Path) -> None:
    words = ["tune", "quickstart", "--space", "adapter.r=3,3", "--trials", "3", "--output", str(tmp_path)]
    assert main(words) == 2
    assert len(score) == 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train.lr=1..", "must be KEY=LOW..HIGH with two numbers, or KEY=A,B,C"),
        ("train.lr=2..1", "must be KEY=LOW..HIGH"),
        ("trian.lr=1,2", "Did you mean 'train'"),
        ("train.lr=-1,2", "must be above 0"),
    ],
)
def test_mistakes_are_named_before_a_run(
    words: str, message: str, score: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", "quickstart", "--space", words, "--output", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not score
    assert not (tmp_path / "out").exists()


def test_a_run_reports_its_validations_and_ends_where_the_study_says(tmp_path: Path) -> None:
    """Six runs of which the last has the worst start: it is stopped at its first validation."""
    recipe = load_recipe(
        str(write_recipe(tmp_path, save_tiny_model(tmp_path / "tiny"))), ["train.max_steps=4", "train.eval_steps=2"]
    )
    study = open_study(tmp_path / JOURNAL)
    for _ in range(module.LEAST):
        trial = study.ask()
        trial.report(2.0, 2)  # above anything that a metric can be
        study.tell(trial, 2.0)
    trial = study.ask()
    settings = recipe.to_dict() | {"output": str(tmp_path / "run")}
    module.make_trial(settings, trial.number, str(tmp_path / JOURNAL), str(Path.cwd()))
    stored = open_study(tmp_path / JOURNAL).trials[trial.number]
    assert list(stored.intermediate_values) == [2]
    assert stored.user_attrs["pruned_at"] == 2
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert max(steps) == 2
