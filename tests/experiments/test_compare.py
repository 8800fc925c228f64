"""The comparison grid: learning rates by validation, pairing by seed, resuming, controls."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from monkeyjump.cli.main import main
from monkeyjump.errors import ConfigError
from monkeyjump.evaluation import score as memory
from monkeyjump.evaluation.score import Scorer
from monkeyjump.experiments import compare as module
from monkeyjump.experiments.ablate import study_rows
from monkeyjump.experiments.compare import grid_of_methods, run_grid, with_controls
from monkeyjump.experiments.comparison import Cell, Comparison, failed
from monkeyjump.experiments.tables import comparison_rows, comparison_tables, save_comparison
from monkeyjump.training import shared as shared_module
from monkeyjump.training.recipe import Recipe, load_recipe
from monkeyjump.training.run import run
from monkeyjump.tuner.centers import calibrate
from tests.helpers import same_on_gpu
from tests.tiny_folder import save_tiny_model, write_recipe


def compare(
    recipe: Recipe, methods: list[str], seeds: list[int], lrs: list[float], output: Path, jobs: int = 1, **options: Any
) -> Comparison:
    return run_grid(grid_of_methods(recipe, methods, seeds, lrs, **options), output, jobs)


class FakeRuns:
    """Stands in for training: scores that are a function of method, rate and seed, and a list of what was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[str, float, int, bool]] = []
        self.gates: list[float] = []
        self.settings: list[dict[str, Any]] = []
        self.tested: list[str] = []
        self.diverge: set[float] = set()  # rates at which training blows up
        self.nll: dict[float, float] = {}  # on validation, by rate
        self.kept = True  # whether adapters stay on disk
        monkeypatch.setattr(module, "run", self.run)
        monkeypatch.setattr(module.gc, "collect", lambda: 0)  # nothing was loaded, and it takes longer than the rest
        monkeypatch.setattr(module.Shared, "give_back", lambda *args: None)
        monkeypatch.setattr(module.Shared, "take", lambda *args: (None, None))
        monkeypatch.setattr(module, "load_adapter", lambda *args, **kwargs: (None, None))
        monkeypatch.setattr(module, "score_on_test", self.test)
        monkeypatch.setattr(module, "mean_gate", lambda *args: 0.25)

    def run(self, recipe: Recipe, *, overwrite: bool, test: bool, shared: Any) -> Any:
        lr = recipe.train.lr
        self.settings.append(recipe.adapter)
        self.asked.append((recipe.method, lr, recipe.seed, test))
        if self.kept:
            (recipe.folder / "adapter").mkdir(parents=True, exist_ok=True)
            (recipe.folder / "adapter" / "adapter_model.safetensors").touch()
        if recipe.method.endswith("_uniform"):
            self.gates.append(recipe.adapter["uniform_gate"])
        return SimpleNamespace(
            interrupted=False,
            best_validation=1.0 - abs(lr - 2e-3),
            parameters=SimpleNamespace(trainable=10, router=0),
            measurements={
                "steps": 5,
                "steps_per_second": 2.0,
                "peak_memory_bytes": None,
                "diverged_at": 3 if lr in self.diverge else None,
                "validation_nll": self.nll.get(lr),
            },
            report=self.report(recipe) if test else None,
            model=None,
            tokenizer=None,
            tasks=[],
        )

    def test(self, model: Any, tokenizer: Any, tasks: Any, recipe: Recipe, memory: Any) -> Any:
        self.tested.append(recipe.method)
        return self.report(recipe)

    def report(self, recipe: Recipe) -> Any:
        skill = {"lora": 0.6, "mjlora": 0.7}.get(recipe.method, 0.5) + 0.01 * recipe.seed
        rows = [
            SimpleNamespace(
                task=task, family=family, adapter=skill + bonus, base=0.4, majority=0.3, n=10, adapter_nll=1 - skill
            )
            for task, family, bonus in (("sst2", "glue", 0.0), ("boolq", "commonsense", 0.1))
        ]
        return SimpleNamespace(mean=skill + 0.05, rows=rows, overall=SimpleNamespace(adapter_nll=1 - skill))


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> FakeRuns:
    return FakeRuns(monkeypatch)


def test_an_option_goes_to_the_methods_that_read_it(fakes: FakeRuns, tmp_path: Path) -> None:
    recipe = load_recipe("quickstart", ["adapter.tasks=14", "adapter.r=4"])
    compare(recipe, ["lora", "more"], [0], [1e-3], tmp_path, controls=False)
    assert fakes.settings == [{"init_tokens": 1000, "r": 4}, {"init_tokens": 1000, "r": 4, "tasks": 14}]
    with pytest.raises(ConfigError, match="tasks=14 needs placement='nested'"):
        compare(recipe, ["lora"], [0], [1e-3], tmp_path, controls=False)


def test_the_rate_is_chosen_on_validation_and_only_final_runs_see_test(fakes: FakeRuns, tmp_path: Path) -> None:
    found = compare(load_recipe("quickstart"), ["lora"], [0, 1], [1e-3, 2e-3, 4e-3], tmp_path)
    assert found.best_lr("lora") == 2e-3
    assert [ask for ask in fakes.asked if not ask[3]] == [("lora", lr, 0, False) for lr in (1e-3, 2e-3, 4e-3)]
    assert [ask for ask in fakes.asked if ask[3]] == [("lora", 2e-3, 1, True)]
    assert fakes.tested == ["lora"]  # the winner of the search is scored, not trained again
    assert [cell.seed for cell in found.final] == [0, 1]
    assert all("mean" in cell.metrics for cell in found.final)


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_search_widens_until_its_ends_do_not_win(
    fakes: FakeRuns, tmp_path: Path, jobs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best rate of the fakes is 2e-3; a second command takes the same way without a run."""
    if jobs > 1:
        from tests.experiments.test_jobs import FakeWorkers

        FakeWorkers(monkeypatch)
    for lrs, found in (([5e-4, 1e-3], [5e-4, 1e-3, 2e-3, 4e-3]), ([4e-3, 8e-3], [4e-3, 8e-3, 2e-3, 1e-3])):
        for _ in range(2):
            output = tmp_path / str(lrs[0])
            grid = compare(load_recipe("quickstart"), ["lora"], [0, 1], lrs, output, jobs=jobs, widen=True)
            assert grid.lrs["lora"] == pytest.approx(found)
            assert grid.best_lr("lora") == 2e-3
            assert len(fakes.asked) == len(set(fakes.asked))
        fakes.asked.clear()


def test_a_rate_at_which_training_diverged_is_not_chosen(fakes: FakeRuns, tmp_path: Path) -> None:
    fakes.diverge = {2e-3}  # the best by validation, taken from a checkpoint before it blew up
    assert compare(load_recipe("quickstart"), ["lora"], [0], [1e-3, 2e-3], tmp_path).best_lr("lora") == 1e-3
    fakes.diverge = {1e-3, 2e-3}
    assert compare(load_recipe("quickstart"), ["lora"], [0], [1e-3, 2e-3], tmp_path / "b").best_lr("lora") == 2e-3
    assert fakes.tested == ["lora"]  # what diverged was trained again: it may be no adapter that loads
    assert fakes.asked[-1] == ("lora", 2e-3, 0, True)


def test_the_nll_chooses_the_rate_where_all_have_one(fakes: FakeRuns, tmp_path: Path) -> None:
    fakes.nll = {1e-3: 0.7, 2e-3: 0.8, 4e-3: 0.6}  # 2e-3 has the best score
    rates = [1e-3, 2e-3, 4e-3]
    assert compare(load_recipe("quickstart"), ["lora"], [0], rates, tmp_path).best_lr("lora") == 4e-3
    del fakes.nll[4e-3]
    assert compare(load_recipe("quickstart"), ["lora"], [0], rates, tmp_path / "b").best_lr("lora") == 2e-3


@pytest.mark.parametrize(
    ("tasks", "diverged_at", "expected"),
    [
        ({"sst2": 0.8, "boolq": 0.61, "stsb": 0.0}, None, False),
        ({"sst2": 0.45, "boolq": 0.62, "stsb": 0.9}, None, True),  # what has no most frequent answer does not count
        ({"sst2": 0.5, "boolq": 0.62, "stsb": 0.9}, None, True),
        ({"sst2": 0.8, "boolq": 0.61, "stsb": 0.0}, 7, True),
    ],
)
def test_a_run_failed_that_diverged_or_only_says_what_is_most_frequent(
    tasks: dict[str, float], diverged_at: int | None, expected: bool
) -> None:
    majority = {"sst2": 0.5, "boolq": 0.62, "stsb": None}
    assert failed({"tasks": tasks, "majority": majority, "diverged_at": diverged_at}) is expected


def test_a_run_whose_adapter_was_deleted_is_made_again(fakes: FakeRuns, tmp_path: Path) -> None:
    fakes.kept = False
    compare(load_recipe("quickstart"), ["lora"], [0], [1e-3, 2e-3], tmp_path)
    assert fakes.tested == []
    assert fakes.asked[-1] == ("lora", 2e-3, 0, True)


def test_a_stopped_comparison_goes_on_where_it_stopped(fakes: FakeRuns, tmp_path: Path) -> None:
    first = compare(load_recipe("quickstart"), ["lora"], [0], [2e-3], tmp_path)
    again = compare(load_recipe("quickstart"), ["lora"], [0, 1], [2e-3], tmp_path)
    assert [ask[2] for ask in fakes.asked] == [0, 1]
    assert again.final[0].metrics == first.final[0].metrics
    other = compare(load_recipe("quickstart", ["train.max_steps=7"]), ["lora"], [0], [2e-3], tmp_path)
    assert len(fakes.asked) == 3  # another recipe is another run
    cells = sorted(path.parent.name for path in tmp_path.glob("cells/**/record.json"))
    assert cells == ["seed-0", "seed-0-2", "seed-1"]  # beside the first
    compare(load_recipe("quickstart"), ["lora"], [0, 1], [2e-3], tmp_path)
    compare(load_recipe("quickstart", ["train.max_steps=7"]), ["lora"], [0], [2e-3], tmp_path)
    assert len(fakes.asked) == 3  # both are there
    for found in (again, other, again):
        save_comparison(found, tmp_path)
    tables = {path.name: json.loads(path.read_text()) for path in sorted(tmp_path.glob("*.json"))}
    assert {name: table["metrics"]["seeds"] for name, table in tables.items()} == {
        "compare.json": [0, 1],
        "compare-2.json": [0],
    }


def test_a_broken_test_split_stops_a_comparison_before_its_search(fakes: FakeRuns, tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("text,label\n" + "".join(f"row {n},{n % 2}\n" for n in range(100)))
    (tmp_path / "test.csv").write_text("text,label\nfine,1\nbad,2\n")
    (tmp_path / "own.yaml").write_text(
        'name: own\nprompt: "{text}"\noptions: [a, b]\nanswer: label\ndata: {train: train.csv, test: test.csv}\n'
    )
    with pytest.raises(ConfigError, match=r"'own', row 2: answer '2' is neither one of the options"):
        compare(load_recipe("quickstart", [f"tasks={tmp_path / 'own.yaml'}"]), ["lora"], [0], [1e-3, 2e-3], tmp_path)
    assert fakes.asked == []


def test_a_record_from_before_a_setting_existed_is_not_made_again(fakes: FakeRuns, tmp_path: Path) -> None:
    def again(**changes: Any) -> int:
        for path in tmp_path.glob("cells/**/record.json"):
            content = json.loads(path.read_text(encoding="utf-8"))
            content["config"]["train"].pop("compile", None)
            content["config"]["train"] |= changes
            path.write_text(json.dumps(content), encoding="utf-8")
        fakes.asked.clear()
        compare(load_recipe("quickstart"), ["lora"], [0], [1e-3], tmp_path)
        return len(fakes.asked)

    assert again() == 1
    assert again() == 0
    assert again(warmup=0.5) == 1  # another setting is another run
    assert again(forgotten=1) == 1  # and so is one that no longer exists


def test_controls_stand_beside_a_routed_method_with_its_mean_gate(fakes: FakeRuns, tmp_path: Path) -> None:
    assert with_controls(["lora", "mjlora"]) == ["lora", "mjlora", "mjlora_uniform", "mjlora_random", "mjlora_oracle"]
    of_prompt = ["mjlora_prompt_uniform", "mjlora_prompt_random", "mjlora_task"]
    assert with_controls(["mjlora_prompt"]) == ["mjlora_prompt", *of_prompt]
    assert with_controls(["lora"]) == ["lora"]
    compare(load_recipe("quickstart"), ["lora", "mjlora"], [0], [2e-3], tmp_path)
    assert fakes.gates == [0.25]


def test_tables_pair_differences_by_seed(fakes: FakeRuns, tmp_path: Path) -> None:
    found = compare(load_recipe("quickstart"), ["lora", "mjlora"], [0, 1, 2], [2e-3], tmp_path, controls=False)
    labels = [label for label, _ in comparison_rows(found)]
    assert labels == ["sst2", "glue mean", "boolq", "commonsense mean", "mean"]
    difference = found.differences("lora")["mjlora"]
    assert difference.mean == pytest.approx(0.1)
    assert difference.standard_error == pytest.approx(0.0, abs=1e-9)
    assert found.differences("lora", "mean_nll")["mjlora"].mean == pytest.approx(-0.1)
    assert found.differences("lora", "unknown") == {}
    json_path, csv_path = save_comparison(found, tmp_path)
    record = json.loads(json_path.read_text())
    assert record["metrics"]["results"]["mean"]["lora"] == pytest.approx([0.65, 0.66, 0.67])
    found.searched = [Cell("lora", lr, 0, {"validation": score}) for lr, score in ((1.0, None), (2.0, 0.0))]
    assert found.best_lr("lora") == 2.0  # a validation that never came to a number
    assert csv_path.read_text().splitlines()[0] == "task,lora mean,lora sd,mjlora mean,mjlora sd"


def test_unknown_methods_stop_before_the_first_run(fakes: FakeRuns, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'lora'"):
        compare(load_recipe("quickstart"), ["lora", "lroa"], [0], [1e-3], tmp_path)
    assert fakes.asked == []


def test_compare_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_recipe(tmp_path, save_tiny_model(tmp_path / "tiny"))
    words = [
        "compare",
        str(recipe),
        "train.max_steps=4",
        "train.save_steps=4",
        "--methods",
        "lora,mjlora",
        "--seeds",
        "1",
    ]
    assert main([*words, "--output", str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    for part in ("lora", "mjlora_uniform", "trainable", "Difference to lora", "compare.json"):
        assert part in text
    record = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert record["metrics"]["methods"] == ["lora", "mjlora", "mjlora_uniform", "mjlora_random", "mjlora_oracle"]
    assert record["metrics"]["costs"]["mjlora"]["trainable"] == record["metrics"]["costs"]["lora"]["trainable"]


def test_many_methods_stay_within_80_columns(fakes: FakeRuns, tmp_path: Path) -> None:
    import io

    from rich.console import Console

    methods = ["lora", "mjlora", "lora_fa", "adalora", "propulsion", "mjlorafa", "mjadalora", "mjpropulsion"]
    found = compare(load_recipe("quickstart"), methods, [0, 1], [2e-3], tmp_path, controls=False)
    screen = Console(file=io.StringIO(), width=80)
    for table in comparison_tables(found):
        screen.print(table)
    text = screen.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= 80
    for method in methods:
        assert text.count(method) >= 2
    assert "…" not in text


def test_a_cell_of_a_grid_is_its_separate_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Methods, rates and seeds that share a base, its centres and its scores, each against a run on its own."""
    path = write_recipe(tmp_path, save_tiny_model(tmp_path / "tiny"))
    settings = ["train.max_steps=3", "train.eval_steps=3", "train.save_steps=3"]
    made: Counter[str] = Counter()

    def count(owner: Any, name: str, what: Callable[..., str | None]) -> None:
        original = getattr(owner, name)

        def counted(*args: Any, **options: Any) -> Any:
            made[what(*args) or ""] += 1
            return original(*args, **options)

        monkeypatch.setattr(owner, name, counted)

    count(shared_module, "load_model", lambda *args: "loaded")
    count(calibrate, "collect", lambda *args: "tokens read")
    count(Scorer, "score", lambda scorer, lists, sides: "base scored" if "base" in sides else None)
    count(memory, "make_jobs", lambda *args: "encoded")
    methods = ["lora", "mjlora", "mjadalora", "hydralora"]
    found = compare(load_recipe(str(path), settings), methods, [0, 1], [1e-2, 1e-3], tmp_path / "grid", controls=False)
    made.pop("")
    # the two seeds draw other training and validation rows of the two tasks, and the same test rows
    assert made == {"loaded": 1, "tokens read": 2, "base scored": 1, "encoded": 6}
    for cell in [*found.final[1::2], found.final[2]]:  # of the second seed, and one that the search has trained
        alone = load_recipe(str(path), [
            *settings, f"method={cell.method}", f"seed={cell.seed}", f"train.lr={cell.lr}",
            f"output={tmp_path / 'alone' / cell.method / str(cell.seed)}",
        ])  # fmt: skip
        result = run(alone, overwrite=True)
        folder = tmp_path / "grid" / "cells" / cell.method / f"lr-{cell.lr:g}" / f"seed-{cell.seed}"
        assert_same_adapter(folder, alone.folder)
        assert result.report is not None
        assert cell.metrics["validation"] == result.best_validation
        assert cell.metrics["tasks"] == {row.task: row.adapter for row in result.report.rows}
        assert cell.metrics["base"] == {row.task: row.base for row in result.report.rows}
        if cell.seed:  # the report of a run that was trained and tested in one go
            saved = json.loads((folder / "evaluation.json").read_text())
            assert saved["rows"] == json.loads((alone.folder / "evaluation.json").read_text())["rows"]


def assert_same_adapter(folder: Path, other: Path) -> None:
    """Weights and centres."""
    mine, theirs = (load_file(path / "adapter" / "adapter_model.safetensors") for path in (folder, other))
    if torch.cuda.is_available():
        assert same_on_gpu(mine, theirs), folder
        return
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, theirs[name], atol=1e-6, rtol=1e-5, msg=f"{folder}: {name}")


def test_a_task_without_a_score_has_no_row(tmp_path: Path) -> None:
    """All its rows were too long for the model; no table and no file stumbles over it."""
    comparison = grid_of_methods(Recipe(), ["lora"], [0, 1], [1e-3], controls=False)
    costs = {"trainable": 1, "router": 0, "steps_per_second": 1.0}
    for seed in (0, 1):
        scores = {"mean": 0.5, "mean_nll": None, "tasks": {"a": 0.5, "b": None}, "families": {"a": "f", "b": "f"}}
        comparison.final.append(Cell("lora", 1e-3, seed, scores | costs))
    assert [label for label, _ in comparison_rows(comparison)] == ["a", "f mean", "mean"]
    assert [table.title for table in comparison_tables(comparison)]
    assert [row["by_task"] for row in study_rows(comparison)] == [{"a": 0.5}]
    assert all(path.is_file() for path in save_comparison(comparison, tmp_path))


def test_a_run_that_fails_stops_no_other(
    fakes: FakeRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The runs after it are made, its error is the last word, and the same command then makes only what is missing."""

    def fails(recipe: Recipe, **options: Any) -> Any:
        if (recipe.method, recipe.seed) == ("lora", 0):
            raise ValueError("out of luck")
        return fakes.run(recipe, **options)

    grid = (Recipe(tasks=["opinion"]), ["lora", "lora_fa"], [0, 1], [1e-3], tmp_path)
    monkeypatch.setattr(module, "run", fails)
    with pytest.raises(ConfigError, match=r"lora, rate 0.001, seed 0: ValueError: out of luck(.|\n)*are kept"):
        compare(*grid)
    assert "Traceback" in capsys.readouterr().err
    assert [(method, seed) for method, _, seed, _ in fakes.asked] == [("lora", 1), ("lora_fa", 0), ("lora_fa", 1)]
    monkeypatch.setattr(module, "run", fakes.run)
    assert len(compare(*grid).final) == 4
    assert len(fakes.asked) == 4
