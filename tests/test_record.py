"""Run records: what is written comes back, and what cannot be read says why."""

from __future__ import annotations

import json
import math
import os
import subprocess
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from monkeyjump import record as records
from monkeyjump.errors import ConfigError
from monkeyjump.record import RunRecord, jsonable, portable_command, read_record, recording, write_record


class Colour(StrEnum):
    RED = "red"


def test_round_trip(tmp_path):
    path = tmp_path / "deep" / "run.json"
    record = RunRecord(kind="train", name="quick", config={"lr": 1e-4, "tasks": ["a", "b"]}, seed=3)
    record.metrics = {"mean": 0.5, "nested": {"x": [1, None, True]}}
    record.extra = {"note": "ümlaut"}
    write_record(record, path)
    assert read_record(path) == record
    assert [entry.name for entry in path.parent.iterdir()] == ["run.json"]


def test_what_a_record_knows():
    record = RunRecord(kind="train", name="x")
    expected = {"torch", "transformers", "peft", "monkeyjump", "triton", "liger-kernel", "python"}
    assert set(record.versions) == expected
    assert str(torch.__version__).startswith(str(record.versions["torch"]))
    assert record.device
    assert datetime.fromisoformat(record.started).utcoffset() is not None


def test_values_become_json(tmp_path):
    path = tmp_path / "run.json"
    record = RunRecord(kind="bench", name="x")
    values: dict[Any, Any] = {
        "numpy": np.float32(0.5),
        "integer": np.int64(3),
        "array": np.array([[1.0, math.nan]]),
        "tensor": torch.tensor(2.5, dtype=torch.bfloat16),
        "tensors": torch.arange(3),
        "nan": math.nan,
        "infinite": -math.inf,
        "enum": Colour.RED,
        "path": Path("a/b"),
        "dtype": torch.float32,
        "set": {2, 1},
        1: "number key",
    }
    record.metrics = values
    write_record(record, path)
    assert read_record(path).metrics == {
        "numpy": 0.5,
        "integer": 3,
        "array": [[1.0, None]],
        "tensor": 2.5,
        "tensors": [0, 1, 2],
        "nan": None,
        "infinite": None,
        "enum": "red",
        "path": "a/b",
        "dtype": "torch.float32",
        "set": [1, 2],
        "1": "number key",
    }
    assert type(jsonable(Colour.RED)) is str


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        (b"{broken", "not valid JSON"),
        (b"\xff\xfe\x00", "not valid JSON"),
        (b"[1, 2]", "no run record"),
        (b'{"kind": "train"}', "no run record"),
        (b'{"monkeyjump_record": 99}', "format 99"),
        (b'{"monkeyjump_record": 1, "kind": "train"}', "lacks name, status, metrics, config"),
    ],
)
def test_unreadable_files_say_why(tmp_path, content, message):
    path = tmp_path / "run.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        read_record(path)
    assert "run.json" in str(caught.value)


def test_a_directory_is_no_record(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_record(tmp_path)


def test_a_failed_write_leaves_the_old_record(tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    write_record(RunRecord(kind="train", name="old"), path)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_record(RunRecord(kind="train", name="new"), path)
    assert read_record(path).name == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize(("error", "status"), [(ValueError("no"), "failed"), (KeyboardInterrupt(), "cancelled")])
def test_recording_keeps_the_end(tmp_path, error, status):
    path = tmp_path / "run.json"

    def work() -> None:
        with recording(path, "train", "x", seed=1) as record:
            record.metrics["step"] = 5
            raise error

    with pytest.raises(type(error)):
        work()
    found = read_record(path)
    assert (found.status, found.metrics, found.seed) == (status, {"step": 5}, 1)
    assert found.extra["error"].startswith(type(error).__name__)


def test_recording_a_finished_run(tmp_path):
    with recording(tmp_path / "run.json", "train", "x") as record:
        record.metrics["mean"] = 1.0
    found = read_record(tmp_path / "run.json")
    assert found.status == "finished"
    assert found.finished is not None
    assert found.finished >= found.started


def test_commands_carry_no_machine_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    here = tmp_path / "data" / "text"
    argv = ["/opt/x/bin/monkeyjump", "train", "quickstart", "data.folder=" + str(here), "--out", "/home/me/out/run1"]
    argv += ["~/models/base", r"C:\Users\me\data", "train.lr=1e-4", "--data=/srv/sets/glue", "a/b=c"]
    argv += ["tasks=/srv/own/one.yaml,/srv/own/two.yaml"]
    assert portable_command(argv) == [
        "monkeyjump",
        "train",
        "quickstart",
        "data.folder=data/text",
        "--out",
        "run1",
        "base",
        "data",
        "train.lr=1e-4",
        "--data=glue",
        "a/b=c",
        "tasks=one.yaml,two.yaml",
    ]
    assert portable_command(["/opt/x/site-packages/monkeyjump/__main__.py", "bench"]) == ["monkeyjump", "bench"]
    assert portable_command([]) == []


def test_commit_is_of_our_source_only(tmp_path, monkeypatch):
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=x", "-c", "user.email=x@example.com"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    source_commit = records.source_commit.__wrapped__  # which asks every time
    git("init")
    file = tmp_path / "record.py"
    file.write_text("one")
    monkeypatch.setattr(records, "__file__", str(file))
    assert source_commit() is None  # inside a repository, but not part of it
    git("add", "record.py")
    git("commit", "-m", "x")
    commit = source_commit()
    assert commit is not None
    assert len(commit) == 40
    file.write_text("two")
    assert source_commit() == f"{commit}-dirty"


def test_the_file_is_plain_json(tmp_path):
    content = json.loads(write_record(RunRecord(kind="train", name="x"), tmp_path / "r.json").read_text("utf-8"))
    assert content["monkeyjump_record"] == 1
    assert content["kind"] == "train"
