from __future__ import annotations

import gzip
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

from monkeyjump import tasks
from monkeyjump.errors import ConfigError
from monkeyjump.models import hub
from monkeyjump.tasks import load

SST2 = tasks.get("sst2")


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)


def reviews(count: int, word: str) -> list[dict[str, Any]]:
    return [{"sentence": f"{word} {index}", "label": index % 2} for index in range(count)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "sst2" / "train.jsonl.gz", reviews(400, "train"))
    write(tmp_path / "sst2" / "test.jsonl", reviews(30, "test"))  # gzip and plain both
    return tmp_path


def test_validation_is_carved_from_train_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "VALIDATION_FRACTION", 0.2)
    train, validation, test = (
        {example.context for example in tasks.load_examples(SST2, split, folder)}
        for split in ("train", "validation", "test")
    )
    assert not train & validation
    assert train | validation == {f"Review: train {index}" for index in range(400)}
    assert 50 < len(validation) < 110
    assert test == {f"Review: test {index}" for index in range(30)}


def test_the_split_does_not_move_when_rows_are_added(folder: Path) -> None:
    before = {example.context for example in tasks.load_examples(SST2, "validation", folder)}
    write(folder / "sst2" / "train.jsonl.gz", reviews(10, "more") + reviews(400, "train"))
    after = {example.context for example in tasks.load_examples(SST2, "validation", folder)}
    assert before == {context for context in after if "train" in context}


def test_a_validation_file_is_used_as_it_is(folder: Path) -> None:
    write(folder / "sst2" / "validation.jsonl", reviews(7, "valid"))
    assert len(tasks.load_examples(SST2, "validation", folder)) == 7
    assert len(tasks.load_examples(SST2, "train", folder)) == 400


def test_row_numbers_are_those_of_the_file(folder: Path) -> None:
    rows = reviews(300, "train")
    del rows[250]["sentence"]
    write(folder / "sst2" / "train.jsonl.gz", rows)
    with pytest.raises(ConfigError, match=r"row 251 has no column 'sentence'"):
        list(load.SplitData(SST2, "train", folder).examples())


def test_empty_split(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "sst2" / "test.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match=r"empty split: task 'sst2': its test split .* has no rows"):
        tasks.load_examples(SST2, "test", folder)
    monkeypatch.setattr(load, "VALIDATION_FRACTION", 0.0)
    with pytest.raises(ConfigError, match=r"its validation split .* has no rows. A twentieth of the training rows"):
        tasks.load_examples(SST2, "validation", folder)


def test_bad_files(folder: Path) -> None:
    path = folder / "sst2" / "test.jsonl"
    path.write_text('{"sentence": "a", "label": 1}\n{"sentence": \n')
    with pytest.raises(ConfigError, match=r"test.jsonl', line 2 is not JSON"):
        tasks.load_examples(SST2, "test", folder)
    path.write_text("[1, 2]\n")
    with pytest.raises(ConfigError, match=r"line 1 is a list, not a JSON object"):
        tasks.load_examples(SST2, "test", folder)
    (folder / "sst2" / "train.jsonl.gz").write_bytes(gzip.compress(b"x" * 1000)[:20])
    with pytest.raises(ConfigError, match=r"cannot be read"):
        tasks.load_examples(SST2, "train", folder)


def test_what_is_not_in_the_folder(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"no qnli/train.jsonl .* which holds sst2"):
        tasks.load_examples(tasks.get("qnli"), "train", folder)
    with pytest.raises(ConfigError, match=r"does not exist"):
        tasks.load_examples(SST2, "train", folder / "nowhere")
    assert tasks.load_examples(tasks.get("opinion"), "train", folder)  # brings its own data


def test_unknown_split() -> None:
    with pytest.raises(ConfigError, match=r"split='validaton' must be one of .* Did you mean 'validation'"):
        tasks.load_examples(SST2, "validaton")


def test_state_of_the_data(folder: Path) -> None:
    states = {state.name: state.state for state in tasks.describe(folder)}
    assert (states["sst2"], states["qnli"], states["opinion"]) == ("in the folder", "missing", "built in")
    assert {state.name: state.state for state in tasks.describe()}["sst2"] == "on the hub"


def test_no_datasets_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        ConfigError, match=r"without sst2/train.jsonl .* needs datasets: pip install .monkeyjump\[hub\]"
    ):
        tasks.load_examples(SST2, "train")


def test_hub_out_of_reach(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert not hub.hub_reachable()
    with pytest.raises(ConfigError, match=r"'sst2' of 'nyu-mll/glue': did not load.*HF_HUB_OFFLINE is set.*Go online"):
        tasks.load_examples(SST2, "train")


@pytest.mark.parametrize("task", tasks.expand("all"), ids=lambda task: task.name)
def test_every_task_can_be_sent_to_another_process(task: Any) -> None:
    sent = pickle.loads(pickle.dumps(task))
    assert (sent.name, sent.fields, sent.options) == (task.name, task.fields, task.options)
