"""The look at the data before the work: every split, every problem at once."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from monkeyjump import tasks
from monkeyjump.errors import ConfigError
from monkeyjump.tasks.custom import simple_task
from monkeyjump.tasks.preflight import SplitLook, look_at, notes, origins


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def task_of(folder: Path, train: list[dict], test: list[dict], name: str = "own") -> tasks.Task:
    files = {
        "train": write(folder / f"{name}-train.jsonl", train),
        "test": write(folder / f"{name}-test.jsonl", test),
    }
    return simple_task(name, prompt="{text}", options=["no", "maybe", "yes"], answer="label", data=files)


def rows(count: int, label: object = None) -> list[dict]:
    return [{"text": f"row {n}", "label": n % 2 if label is None else label} for n in range(count)]


def test_counts_are_those_of_the_loaded_splits(tmp_path: Path) -> None:
    task = task_of(tmp_path, rows(300), rows(40))
    looks = {look.split: look for look in look_at([task])}
    for split, look in looks.items():
        examples = tasks.load_examples(task, split)
        assert look.rows == len(examples)
        assert look.examples == examples[:100]
        assert look.answers == {answer: [e.answer for e in examples].count(answer) for answer in ("no", "maybe")}
    assert look_at([task], splits=["train"], most=50)[0].size == "50+"
    assert notes(list(looks.values())) == ["own: no training row has the answer 'yes'."]


def test_letters_are_counted_where_options_differ(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"all": ["x", "y{n}"], "right": {n % 3 > 0:d}}}\n' for n in range(60)))
    task = simple_task("own", prompt="Which?", options="all", answer="right", data={"test": path})
    (look,) = look_at([task], splits=["test"])
    assert look.most_frequent == ("B", 40 / 60)


def test_all_problems_of_all_splits_are_told_at_once(tmp_path: Path) -> None:
    bad = task_of(tmp_path, rows(100), [*rows(3), *rows(7, "legal")], "bad")
    gone = task_of(tmp_path, rows(100), rows(5), "gone")
    (tmp_path / "gone-test.jsonl").unlink()
    empty = task_of(tmp_path, rows(100), [], "empty")
    few = task_of(tmp_path, rows(2), rows(5), "few")
    with pytest.raises(ConfigError) as caught:
        look_at([bad, gone, empty, few])
    problems = caught.value.problems
    assert [p.partition(",")[0].partition(":")[0] for p in problems] == [
        *["task 'bad'"] * 4, "task 'gone'", "task 'empty'", "task 'few'",
    ]  # fmt: skip
    assert "row 4: answer 'legal' is neither" in problems[0]
    assert "4 more rows of its test split are bad" in problems[3]
    assert "no such data file" in problems[4]
    assert "has no rows. Add rows, or leave the task out" in problems[5]
    assert "A twentieth of the training rows is taken for it: add some, or name a file" in problems[6]


def test_a_bad_row_beyond_those_that_are_counted(tmp_path: Path) -> None:
    task = task_of(tmp_path, [*rows(60), *rows(1, "legal")], rows(5))
    with pytest.raises(ConfigError, match=r"row 61: answer 'legal' is neither") as caught:
        look_at([task], most=20)
    assert len(caught.value.problems) == 1


def test_a_constant_answer_is_noted(tmp_path: Path) -> None:
    found = notes(look_at([task_of(tmp_path, rows(100), rows(4, "yes"))], splits=["test"]))
    assert found == ["own: every answer of its test split is 'yes'."]


def test_origins_hold_on_another_machine(tmp_path: Path) -> None:
    own = task_of(tmp_path, rows(100), rows(4))
    chosen = [own, tasks.get("opinion"), tasks.get("sst2")]
    looks = [*look_at([own, tasks.get("opinion")]), SplitLook("sst2", "test")]
    found = {(entry["task"], entry["split"]): entry for entry in origins(chosen, looks, None)}
    assert len(found) == 5  # of the splits that were looked at; validation is a part of train
    digest = hashlib.sha256((tmp_path / "own-test.jsonl").read_bytes()).hexdigest()
    assert found["own", "test"] == {
        "task": "own", "split": "test", "rows": "4", "source": "own-test.jsonl", "sha256": digest,
    }  # fmt: skip
    assert found["opinion", "train"]["source"] == "built in"
    assert found["sst2", "test"]["source"] == "hub: nyu-mll/glue sst2 validation main"
