"""The first hour of a new user, with data as people have it: nothing is lost, nothing broken is found late."""

from __future__ import annotations

import csv
import json
import os
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch

from monkeyjump.cli.main import main
from monkeyjump.evaluation.load import TASK_IDS, load_adapter
from monkeyjump.training.saving import saved_recipe
from tests.tiny_folder import save_tiny_model

COLOURS = ("red", "green", "blue")
CHOICES = """\
name: colours
prompt: "Which colour is {question}?"
options: choices
answer: answerKey
data: {train: my data/train.csv, test: my data/test.csv}
"""
MOODS = """\
name: moods
prompt: "{meta.text}"
options: {0: bad, 1: good}
answer: label
data: {train: ../moods.parquet, test: ../moods.parquet}
"""
RECIPE = """\
name: mine
model: ../tiny
tasks: [tasks/colours.yaml, tasks/moods.yaml]
adapter: {init_tokens: 200, granularity: task}
data: {answer: text, max_length: 256}
train: {lr: 1.0e-1, max_steps: 4, batch_size: 4, accumulation: 1, log_steps: 1}
evaluate: {validation_limit: 4, test_limit: 12}
"""

CLOSE = 0.02 if torch.cuda.is_available() else 1e-5  # a GPU scores in bf16


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project as a user has it: a recipe, task files in a folder, a CSV with nested choices, a parquet file."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    top = tmp_path_factory.mktemp("user")
    save_tiny_model(top / "tiny")
    home = top / "project"
    (home / "tasks" / "my data").mkdir(parents=True)
    for split, count in (("train", 200), ("test", 40)):
        with (home / "tasks" / "my data" / f"{split}.csv").open("w", newline="") as file:
            writer = csv.writer(file, delimiter=";")
            writer.writerow(["question", "choices", "answerKey"])
            for n in range(count):
                choices = {"label": ["A", "B", "C"], "text": list(COLOURS)}
                writer.writerow(
                    [f'thing "{n}";\nof {split}', json.dumps(choices) if n % 2 else str(choices), "ABC"[n % 3]]
                )
    rows = [{"meta": {"text": f"mood {n}"}, "label": float(n % 2)} for n in range(100)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), home / "moods.parquet")
    (home / "tasks" / "colours.yaml").write_text(CHOICES)
    (home / "tasks" / "moods.yaml").write_text(MOODS)
    (home / "mine.yaml").write_text(RECIPE)
    return home


@pytest.fixture(scope="module")
def trained(home: Path) -> Path:
    """The project after `monkeyjump train`, run inside it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        patch.setitem(sys.modules, "matplotlib", None)  # the picture is left out, and nothing else
        assert main(["train", "mine.yaml", "output=runs/my run"]) == 0
    return home / "runs" / "my run"


@pytest.fixture(autouse=True)
def _eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def likelihoods(stem: Path) -> list[float]:
    """Every number that the adapter's answers were chosen by."""
    lines = [json.loads(line) for line in Path(f"{stem}.predictions.jsonl").read_text().splitlines()]
    return [score for line in lines if line["side"] == "adapter" for score in line["scores"]]


def test_data_is_looked_at_before_anything_else(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(home)
    assert main(["validate", "mine.yaml"]) == 0
    shown = capsys.readouterr().out
    table = {line.split()[0]: line.split() for line in shown.splitlines() if line.startswith(("colours", "moods"))}
    assert table["colours"][3:] == ["40", "35.0", "red"]
    assert int(table["colours"][1]) + int(table["colours"][2]) == 200
    assert table["moods"][3:] == ["100", "50.0", "bad"]
    assert max(map(len, shown.splitlines())) <= 80
    assert main(["tasks", "tasks/colours.yaml", "--show", "2", "--split", "test", "--answer", "text"]) == 0
    shown = capsys.readouterr().out
    assert (
        'Which colour is thing "0";\nof test?\nA. red\nB. green\nC. blue\nAnswer with the option\'s text.\n=> red'
        in shown
    )
    assert shown.count("=> ") == 2


@pytest.mark.parametrize(
    ("file", "content", "parts"),
    [
        ("tasks/my data/test.csv", None, ["task 'colours': no such data file", "test.csv (test)"]),
        ("tasks/my data/test.csv", "question;choices\nx;[]\n", ["'colours', row 1 has no column 'answerKey'"]),
        (
            "tasks/my data/test.csv",
            "question;choices;answerKey\n" + 'x;"[1, 2]";A\n' + 'x;"[1, 2]";Z\n' * 5,
            ["'colours', row 2: answer 'Z' is neither", "'colours': 2 more rows of its test split are bad"],
        ),
        ("moods.parquet", "damaged", ["moods.parquet' is not a parquet file"]),
    ],
    ids=["missing", "column", "labels", "damaged"],
)
@pytest.mark.parametrize("verb", ["validate", "train"])
def test_what_is_broken_is_found_before_the_first_step(
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    verb: str,
    file: str,
    content: str | None,
    parts: list[str],
) -> None:
    monkeypatch.chdir(home)
    kept = (home / file).read_bytes()
    try:
        (home / file).unlink()
        if content is not None:
            (home / file).write_text(content)
        assert main([verb, "mine.yaml", f"output={tmp_path / 'none'}"]) == 2
    finally:
        (home / file).write_bytes(kept)
    error = capsys.readouterr().err
    for part in parts:
        assert part in error
    assert not (tmp_path / "none" / "log.jsonl").exists()


def test_a_finished_run_is_whole_and_is_not_overwritten(
    trained: Path, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(home)
    names = {path.name for path in trained.iterdir()}
    assert {"adapter", "evaluation.json", "evaluation.html", "record.json"} <= names
    assert "expert-usage.png" not in names  # matplotlib was not there
    before = {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()}
    assert main(["train", "mine.yaml", "output=runs/my run"]) == 2
    assert "holds a finished run: choose another folder with 'output=runs/my run-2'" in capsys.readouterr().err
    assert main(["train", "mine.yaml", "output=runs/my run", "--resume"]) == 2
    assert "--resume --overwrite" in capsys.readouterr().err
    assert main(["train", "mine.yaml", "output=runs/my run", "model=/nowhere", "--overwrite"]) == 2  # a slip
    assert {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()} == before


def test_an_adapter_is_evaluated_from_any_folder_and_keeps_every_report(
    trained: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = saved_recipe(trained / "adapter")
    assert recipe is not None
    assert [Path(name).resolve().name for name in recipe.tasks] == ["colours.yaml", "1-moods.yaml"]
    report = (trained / "evaluation.json").read_bytes()
    for _ in range(2):
        assert main(["evaluate", str(trained / "adapter"), "--limit", "12"]) == 0
    assert (trained / "evaluation.json").read_bytes() == report
    for again in ("evaluation-test-text", "evaluation-test-text-2"):
        assert likelihoods(trained / again) == pytest.approx(likelihoods(trained / "evaluation"), abs=CLOSE)
    taken = str(trained / "evaluation")
    assert main(["evaluate", str(trained / "adapter"), "--output", taken]) == 2
    assert "nothing is overwritten" in capsys.readouterr().err


def test_an_adapter_moves_to_another_machine(
    trained: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = tmp_path / "received"
    shutil.copytree(trained / "adapter", moved)
    monkeypatch.chdir(tmp_path)
    assert main(["evaluate", str(moved), "--base", str(home.parent / "tiny")]) == 2
    message = capsys.readouterr().err
    assert "no such data file" in message
    assert "holds colours/test.csv with --data DIR" in message
    for name, file in (("colours", "tasks/my data/test.csv"), ("moods", "moods.parquet")):
        (tmp_path / "data" / name).mkdir(parents=True)
        shutil.copy(home / file, tmp_path / "data" / name / f"test{Path(file).suffix}")
    data = ["--data", str(tmp_path / "data"), "--limit", "12"]
    assert main(["evaluate", str(moved), *data]) == 2
    message = capsys.readouterr().err
    assert "Name the base model yourself with --base NAME" in message
    assert "It was 'tiny' (LlamaForCausalLM, " in message
    assert main(["evaluate", str(moved), "--base", str(home.parent / "tiny"), *data]) == 0
    here, there = likelihoods(tmp_path / "evaluation-test-text"), likelihoods(trained / "evaluation")
    assert here == pytest.approx(there, abs=CLOSE)
    model, _ = load_adapter(moved, base=str(home.parent / "tiny"))
    assert getattr(model, TASK_IDS) == {"colours": 0, "moods": 1}  # of tasks whose data is not here
    card = (moved / "README.md").read_text()
    assert "| colours | train | 1" in card
    assert "| moods.parquet | " in card
    assert str(home) not in "".join(path.read_text() for path in (moved / "README.md", moved / "recipe.json"))


def test_commands_that_are_printed_can_be_run(
    trained: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(home)
    assert main(["train", "mine.yaml", f"output={tmp_path / 'a b'}", "train.max_steps=1", "evaluate.test_limit=2"]) == 0
    shown = capsys.readouterr().out
    assert max(len(line) for line in shown.splitlines() if "│" in line or "major" in line) <= 80
    assert "1 steps of 4 x 1 texts: this will take about" in shown
    folder = tmp_path / "a b"
    assert (folder / "adapter" / "expert-usage.png").read_bytes() == (folder / "expert-usage.png").read_bytes()
    assert (folder / "adapter" / "README.md").read_text().count("](expert-usage.png)") == 1
    next_ = [shlex.split(line)[1:] for line in shown.splitlines() if line.startswith("  monkeyjump ")]
    look, evaluate, train, compare = next_
    adapter = str(tmp_path / "a b" / "adapter")
    assert look == ["inspect", adapter]
    assert evaluate[:2] == ["evaluate", adapter]
    assert compare[:2] == ["compare", "mine.yaml"]
    assert main([*evaluate, "--limit", "2"]) == 0
    assert main([*train, "output=runs/other"]) == 0
    assert os.path.exists("runs/other/record.json")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["train", "quickstart", "--report-to", "tensorbord"], "Did you mean 'tensorboard'?"),
        (["validate", "quickstart", "train.report_to=[tensorbord]"], "Did you mean 'tensorboard'?"),
        (["compare", "quickstart", "--methods", "lora", "--lrs", "abc"], "--lrs abc must be numbers with commas"),
        (["compare", "quickstart", "--methods", "lora", "--lrs", "nan"], "must be above 0 and finite"),
        (["compare", "quickstart", "--methods", "lora", "--seeds", "0"], "--seeds 0 at least 1"),
        (["train", "quickstart", "lr=1e-3"], "Did you mean 'train.lr'?"),
        (["tasks", "--show", "3"], "needs N of at least 1 and the name of a task"),
    ],
)
def test_slips_are_one_message(arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert part in capsys.readouterr().err
