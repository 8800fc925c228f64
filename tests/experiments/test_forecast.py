"""What is said before training: tasks that ask for the same, and tasks that ask for the opposite."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

from monkeyjump.cli.main import main
from monkeyjump.errors import ConfigError
from monkeyjump.experiments.conflict_tasks import Setting, write_tasks
from monkeyjump.experiments.forecast import Forecast, forecast, passed_around
from monkeyjump.record import read_record
from monkeyjump.tasks import Example
from monkeyjump.training.recipe import Recipe, overridden
from tests.tiny_folder import save_tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def of(setting: Setting, tiny: Path, folder: Path, rows: int = 200, draws: int = 1) -> Forecast:
    recipe = overridden(Recipe(), [f"model={tiny}", "data.answer=text", "adapter.init_tokens=200", "data.cap=40"])
    return forecast(recipe.model_copy(update={"tasks": write_tasks(setting, folder)}), rows, draws)


def test_rules_that_agree_and_rules_that_do_not(tiny: Path, tmp_path: Path) -> None:
    """Two rules that swap all answers are opposed; the same rule under two cues agrees nearly with itself."""
    same, opposed = (of(Setting(conflict, 2, 1, "given"), tiny, tmp_path) for conflict in (0, 1))
    assert same.agreement > 0.5
    assert opposed.agreement < 0.1
    assert same.within == pytest.approx(opposed.within, abs=0.3)  # the measure of noise knows nothing of conflict
    assert [row[0] for row in same.table().rows] == ["rule-00", "rule-01"]


def test_every_draw_reads_other_rows(tiny: Path, tmp_path: Path) -> None:
    found = of(Setting(0, 2, 1, "given"), tiny, tmp_path, rows=12, draws=3)
    assert len(set(found.draws)) == 3
    again = of(Setting(0, 2, 1, "given"), tiny, tmp_path, rows=12, draws=3)
    assert sum(again.draws, ()) == pytest.approx(sum(found.draws, ()))  # another adapter would be off by percents
    assert found.within == pytest.approx(fmean(within for within, _ in found.draws))
    assert found.between == pytest.approx(fmean(between for _, between in found.draws))


def test_the_error_is_that_of_a_ratio() -> None:
    """Resamples of the draws say how far a ratio of means goes; a draw alone may divide by nearly nothing."""
    rng = np.random.default_rng(0)
    draws = [(float(w), float(b)) for w, b in rng.normal([0.3, 0.15], 0.08, (40, 2))]
    cosines = [[fmean(w for w, _ in draws), fmean(b for _, b in draws)]] * 2
    cosines = [cosines[0], cosines[0][::-1]]
    found = Forecast(["a", "b"], cosines, 0.0, 0.0, draws)
    again = np.array(draws)[rng.integers(0, 40, (4000, 40))].mean(1)
    assert found.standard_error == pytest.approx((again[:, 1] / again[:, 0]).std(), rel=0.1)
    assert Forecast(["a", "b"], cosines, 0.0, 0.0, draws[:1]).standard_error is None


def test_every_answer_stays_and_goes_to_another_row() -> None:
    examples = [Example(str(n), ("a", "b", "c", "d"), label=n % 4) for n in range(12)]
    moved = passed_around(examples)
    assert [one.question for one in moved] == [one.question for one in examples]
    assert sorted(one.label for one in moved) == sorted(one.label for one in examples)
    free = passed_around([Example(str(n), free_answer=str(n)) for n in range(5)])
    assert all(one.free_answer != one.question for one in free)
    assert sorted(one.free_answer for one in free) == ["0", "1", "2", "3", "4"]


def test_agreement_is_measured_in_units_of_noise() -> None:
    found = Forecast(["a", "b"], [[0.4, 0.2], [0.2, 0.4]], 0.0, 0.0)
    assert (found.within, found.between, found.agreement) == pytest.approx((0.4, 0.2, 0.5))


@pytest.mark.parametrize(
    ("between", "own", "draws", "bits", "advice"),
    [
        (-0.2, 0.4, [], 0.9, "method=mjlora_prompt,"),
        (-0.2, 0.4, [], 0.3, "try method=mjlora_task."),  # of 1 bit at most
        (0.1, 0.4, [], 0.9, "method=lora."),
        (-0.2, 0.4, [(0.4, -0.6), (0.4, 0.2)], 0.9, "method=lora."),  # the draws do not agree that they are opposed
        (-0.2, -0.1, [], 0.9, "The halves of b do not agree"),  # so nothing can be said of it and another
    ],
)
def test_what_to_try(between: float, own: float, draws: list[tuple[float, float]], bits: float, advice: str) -> None:
    found = Forecast(["a", "b"], [[0.4, between], [between, own]], 0.0, 0.0, draws, bits, 3)
    assert advice in found.advice
    assert len(found.advice) <= 120
    several = Forecast([*"abcde"], [[-0.1] * 5] * 5, 0.0, 0.0)
    assert "The halves of a, b and 3 more do not" in several.advice
    assert math.isnan(several.to_dict()["agreement_of_known"][0])


def test_a_task_that_nothing_is_known_of_is_left_out() -> None:
    """c is opposed to both others, as far as its rows say; a and b agree a little."""
    cosines = [[0.4, 0.1, -0.9], [0.1, 0.4, -0.9], [-0.9, -0.9, -0.1]]
    assert Forecast([*"abc"], cosines, 0.0, 0.0).advice.endswith("method=lora. Left out, as their halves do not agree "
                                                                 "(read more --rows): c.")  # fmt: skip
    cosines[2][2] = 0.9
    assert Forecast([*"abc"], cosines, 0.0, 0.0).advice.endswith("try method=mjlora_task.")
    cosines[0][2] = cosines[2][0] = 0.5  # pairs that disagree on the sign do not say that tasks are opposed
    assert Forecast([*"abc"], cosines, 0.0, 0.0).advice.endswith("method=lora.")


def test_prompts_of_other_wording_are_told_apart_and_equal_ones_are_not(tiny: Path, tmp_path: Path) -> None:
    wording, domain = (of(Setting(1, 2, 1, cue), tiny, tmp_path, rows=8) for cue in ("wording", "given"))
    assert wording.prompt_bits > 0.5
    assert wording.told_apart
    assert domain.prompt_bits < wording.prompt_bits


def test_the_verb(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = [
        "tasks=[opinion,tense]",
        f"model={tiny}",
        "adapter.init_tokens=200",
        "data.cap=24",
        "data.max_length=512",
    ]
    command = ["forecast", "quickstart", *settings, "--rows", "8", "--output", str(tmp_path / "found.json")]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "agreement of the tasks" in said
    assert "bits where prompts decide" in said
    assert max(len(line) for line in said.splitlines() if str(tmp_path) not in line) <= 90
    assert read_record(tmp_path / "found.json").metrics["tasks"] == ["opinion", "tense"]
    assert main(command) == 2  # nothing is overwritten
    assert main(["forecast", "quickstart", "--rows", "2"]) == 2
    with pytest.raises(ConfigError, match="is one task: a forecast compares at least two"):
        forecast(Recipe(tasks=["opinion"]))
