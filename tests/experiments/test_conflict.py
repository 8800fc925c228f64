"""The map of conflict: tasks that disagree as much as they say, planted gains found again, rates searched once."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model

import monkeyjump as mj
from monkeyjump import methods as presets
from monkeyjump.cli.main import main
from monkeyjump.errors import ConfigError
from monkeyjump.evaluation.metrics import holm
from monkeyjump.experiments import conflict, conflict_map
from monkeyjump.experiments.comparison import Cell, Comparison
from monkeyjump.experiments.conflict_tasks import ANSWERS, CUES, Setting, rows_of, write_tasks
from monkeyjump.experiments.forecast import Forecast
from monkeyjump.models import load_model
from monkeyjump.routing.centroid import task_gates
from monkeyjump.tables import Bold
from monkeyjump.tasks import load_examples
from monkeyjump.tasks.task_file import load_task_file
from monkeyjump.training.recipe import Recipe, overridden
from tests.experiments.test_compare import FakeRuns, fakes
from tests.tiny_folder import save_tiny_model

__all__ = ["fakes"]


@pytest.mark.parametrize("conflict", [0, 0.5, 0.75, 1])
def test_rules_disagree_on_the_share_of_sentences_that_the_dial_says(conflict: float) -> None:
    setting = Setting(conflict, 8, 1, "given")
    answers = [[answer for _, answer in rows_of(setting, rule, "train")] for rule in range(8)]
    for a, b in combinations(range(8), 2):
        apart = sum(x != y for x, y in zip(answers[a], answers[b], strict=True)) / len(answers[a])
        if (a - b) % 2 or a % 2 == 0:  # neighbours oppose each other, and rules of even numbers are one
            assert apart == conflict * ((a - b) % 2)
        assert apart in (0, conflict)
    assert len(set(map(tuple, answers))) == max(1, setting.disputed)
    assert all(answers[0].count(answer) == len(answers[0]) / 4 for answer in ANSWERS)


def test_whoever_does_not_know_the_rule_is_right_by_the_most_frequent_answer() -> None:
    places = {(0, 8): 1, (0.5, 2): 0.75, (0.5, 3): 5 / 6, (1, 2): 0.5, (1, 3): 2 / 3, (1, 8): 0.5}
    for (dial, rules), share in places.items():
        setting, answers = Setting(dial, rules, 1, "given"), dict[str, list[str]]()
        for rule in range(rules):
            for text, answer in rows_of(setting, rule, "test"):
                answers.setdefault(text.split(". ", 1)[1], []).append(answer)
        right = sum(max(map(some.count, some)) for some in answers.values()) / sum(map(len, answers.values()))
        assert setting.blind == pytest.approx(right) == pytest.approx(share)


def test_the_cue_alone_tells_the_rule() -> None:
    for cue in CUES:
        texts = [[text for text, _ in rows_of(Setting(1, 32, 1, cue), rule, "train")] for rule in range(32)]
        assert all(not set(a) & set(b) for a, b in combinations(texts, 2)), cue
    given = [[text for text, _ in rows_of(Setting(1, 4, 1, "given"), rule, "test")] for rule in range(4)]
    sentences = [[text.split(". ", 1)[1] for text in some] for some in given]
    assert sentences[0] == sentences[1] == sentences[3]


@pytest.mark.parametrize("cue", CUES)
def test_train_and_test_share_no_word_of_a_sentence(cue: str) -> None:
    words = {}
    for split in ("train", "test"):
        rows = [text for rule in range(8) for text, _ in rows_of(Setting(1, 8, 1, cue), rule, split)]
        found = [text[text.index("The ") :].split(".")[0].split() for text in rows]
        words[split] = {word for sentence in found for word in (sentence[1], sentence[4], sentence[6])}
        assert len(set(rows)) == len(rows) or split == "train"
    assert len(words["test"]) > 20 or cue == "domain"
    assert not words["train"] & words["test"]


def test_the_files_are_tasks_like_a_users_own(tmp_path: Path) -> None:
    setting = Setting(0.5, 2, 4, "wording")
    task = load_task_file(write_tasks(setting, tmp_path)[1])
    found = [(example.question, example.options[example.label]) for example in load_examples(task, "test")]
    assert found == list(rows_of(setting, 1, "test"))
    assert task.name == "rule-01"


def test_mistakes_are_named_all_at_once() -> None:
    with pytest.raises(ConfigError, match=r"conflict=0.25 must be(.|\n)*rules=99(.|\n)*rank=0(.|\n)*cue='gvien'"):
        Setting(0.25, 99, 0, "gvien")
    assert main(["study", "conflict", "--rules", "two"]) == 2
    assert main(["study", "conflict", "--methods", "papr"]) == 2


@pytest.mark.parametrize("rank", [1, 8])
def test_what_has_centres_has_the_strength_of_the_constant_gate(rank: int) -> None:
    setting, configs = Setting(1, 8, rank, "given"), {}
    for method in [*conflict.REFERENCES, *conflict.ROUTED, *conflict.MIXTURES]:
        recipe = overridden(Recipe(), [*conflict.RECIPE, *conflict._settings(method, setting, "")])
        configs[method] = presets.build(recipe.method, recipe.preset, **recipe.adapter)
    assert {config.r for config in configs.values()} == {rank}
    assert {configs[name].mean_gate for name in ("centred", "ranks")} == {conflict.GATE}
    assert configs["ranks"].top_k == {1: 2, 8: 12}[rank]
    assert configs["prompt"].sequence_token == "mean"  # the last token of a prompt is the same for all rules
    control = replace(configs["prompt"], center_init="random_normalized")
    assert configs["random"].to_dict() == control.to_dict()


@pytest.mark.parametrize(("rules", "rank", "apart"), [(2, 1, 2), (8, 1, 5), (2, 8, 2), (8, 8, 8), (32, 1, 5)])
def test_the_oracle_deals_all_ranks_to_the_rules(rules: int, rank: int, apart: int) -> None:
    """Every rank of every projection has one rule, or several rules where there are not enough of them."""
    setting = Setting(1, rules, rank, "given")
    recipe = overridden(Recipe(), [*conflict.RECIPE, *conflict._settings("oracle", setting, "")])
    config = presets.build(recipe.method, recipe.preset, **recipe.adapter)
    gates = task_gates(torch.arange(rules).unsqueeze(1), 5 * rank, config).squeeze(1)  # [rules, experts]
    owners = gates.unique(dim=0)
    assert len(owners) == apart
    assert torch.equal(owners.sum(0), torch.ones(5 * rank))
    assert owners.sum(1).max() - owners.sum(1).min() <= 1
    if rank % rules == 0:  # as many of every projection
        assert gates.view(rules, 5, rank).sum(2).unique().tolist() == [rank / rules]


def test_holm_corrects_as_in_a_worked_example() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    found = holm([float("nan"), 0.02])
    assert found[0] != found[0]
    assert found[1] == 0.02  # what was not tested does not count


def test_a_planted_gain_is_found_where_it_was_planted() -> None:
    """20 seeds with noise of a point: five points are certain, a tenth of a point is not."""
    places, seeds, gain = [Setting(c, 8, 1, "given") for c in (0, 1)], list(range(20)), {0: 0.001, 1: 0.05}
    recipes = {conflict._label(m, p): Recipe() for p in places for m in conflict._names(["paper", "moelora"])}
    grid = Comparison(Recipe(), recipes, seeds, {name: [1e-3] for name in recipes})
    for place in places:
        for method in conflict._names(["paper", "moelora"]):
            for seed in seeds:
                noise = 0.01 * ((seed * (7 if method == "paper" else 3)) % 5 - 2)
                points = 0.6 + noise + (gain[int(place.conflict)] if method == "paper" else 0)
                metrics = {"mean": points, "mean_nll": 1 - points, "trainable": 1}
                grid.final.append(Cell(conflict._label(method, place), 1e-3, seed, metrics))
    before = {place.data: {"agreement_of_known": [1.0, None], "prompt_bits": 0.0} for place in places}
    found = conflict.Map(places, ["paper", "moelora"], Recipe(), grid, before)
    certain = {(gain.setting.conflict, gain.method, gain.reference) for gain in found.gains() if gain.certain}
    assert certain == {(1, "paper", "constant gate"), (1, "paper", "lora")}
    assert {gain.reference for gain in found.gains()} == {"constant gate", "lora", "lora for moelora"}
    assert all(gain.nll["mean"] == pytest.approx(-gain.points["mean"]) for gain in found.gains())
    rows = conflict_map.map_table(found).rows
    assert [row[1:3] for row in rows] == [["60.0", "paper"], ["60.0", "paper"]]
    assert [isinstance(row[3], Bold) for row in rows] == [False, True]
    assert found.unlearned() == []
    for cell in grid.final:  # down to 36 % where guessing gives 25, and to 58 % where half of the rules are one
        cell.metrics["mean"] -= 0.24 if "-0-" in cell.method else 0.07
    assert found.unlearned() == [places[1]]
    for cell in grid.final:
        cell.metrics["mean"] -= 0.02
    assert found.unlearned() == places


def test_a_map_searches_rates_once_and_ends_in_a_table_a_record_and_a_picture(
    fakes: FakeRuns, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def before_training(recipe: Recipe, **_: Any) -> Forecast:
        seen.append(recipe)
        return Forecast(["a", "b"], [[1.0, 0.5], [0.5, 1.0]], 0, 0)

    monkeypatch.setattr(conflict, "forecast", before_training)
    model = save_tiny_model(tmp_path / "tiny")
    words = ["study", "conflict", f"model={model}", "--conflict", "0,1", "--rules", "2,3", "--ranks", "1"]
    words += ["--methods", "paper,ranks,moelora", "--seeds", "2", "--lrs", "1e-3,2e-3,4e-3"]
    words += ["--output", str(tmp_path / "out"), "--jobs", "1"]
    assert main(words) == 0
    said = capsys.readouterr().out
    table = said[said.index("Accuracy of the constant gate") :].replace(str(tmp_path), "")
    assert "best of 3 methods" in table
    assert max(map(len, table.splitlines())) <= 80
    assert len([ask for ask in fakes.asked if not ask[3]]) == 6 * 3  # three methods and three that stand beside them
    assert {ask[1] for ask in fakes.asked if ask[3]} == {2e-3}
    assert len([ask for ask in fakes.asked if ask[3]]) == 6 * (4 * 2 - 1)  # the search trained one of each
    record = json.loads((tmp_path / "out" / "conflict.json").read_text())
    assert len(record["metrics"]["gains"]) == 4 * 3 * 2
    one, larger = sorted({settings["r"] for settings in fakes.settings})
    assert one == 1
    size = {
        (name, rank): mj.count_parameters(
            get_peft_model(load_model(str(model))[0], presets.build(name, "mj_paper", r=rank))
        )
        for name, rank in (("lora", larger - 1), ("moelora", 1), ("lora", larger))
    }
    assert size["lora", larger - 1].trainable < size["moelora", 1].trainable <= size["lora", larger].trainable
    assert (tmp_path / "out" / "conflict.png").stat().st_size > 5000
    assert (tmp_path / "out" / "conflict.csv").read_text().startswith("cue,conflict,rules,rank,method,reference,points")
    assert [forecast["agreement"] for forecast in record["metrics"]["forecasts"].values()] == [0.5] * 4
    assert all(recipe.method == "mjlora" and "uniform_gate" not in recipe.adapter for recipe in seen)
    made = len(fakes.asked)
    assert main(words) == 0
    assert len(fakes.asked) == made
