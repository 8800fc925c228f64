"""`monkeyjump train` on several ranks: packed rows, learned routers, other numbers of ranks, and the launchers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from packaging.version import Version

from monkeyjump.errors import ConfigError
from monkeyjump.training.recipe import load_recipe
from monkeyjump.training.run import run
from tests.helpers import assert_same
from tests.processes import free_port, in_new_processes
from tests.tiny_folder import save_tiny_model, write_recipe
from tests.training.test_two_ranks import be_rank, logs, weights

# Centres that do not move: they are moved by forwards, and a step of more ranks has fewer of them on each.
STILL = ["adapter.dropout=0.0", "adapter.ema_stop=0", "data.cap=16", "train.log_steps=1"]
STILL += ["evaluate.validation_limit=2"]
RUNS = {
    "packed": ["data.packing=true", "data.max_length=128"],
    "hydralora-packed": ["method=hydralora", "adapter={}", "data.packing=true", "data.max_length=128"],
    "moelora": ["method=moelora", "adapter={}"],
}
RUNS = {
    name: [*changes, *STILL, "train.max_steps=3", "train.eval_steps=3", "train.save_steps=3"]
    for name, changes in RUNS.items()
}
RESUMED = [*STILL, "train.max_steps=none", "train.epochs=2", "train.eval_steps=4", "train.save_steps=1"]


def worker(rank: int, port: int, world: int, recipe: str, runs: dict[str, list[str]], resume: bool) -> None:
    be_rank(rank, port, world)
    for folder, changes in runs.items():
        result = run(load_recipe(recipe, [f"output={folder}", *changes]), test=False, resume=resume)
        if result.is_main:
            (Path(folder) / "measured").write_text(json.dumps(result.measurements))


def train(recipe: Path, world: int, runs: dict[str, list[str]], resume: bool = False) -> None:
    in_new_processes(worker, free_port(), world, str(recipe), runs, resume, count=world)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    return write_recipe(folder, save_tiny_model(folder / "tiny"))


@pytest.fixture(scope="module")
def two(recipe: Path) -> Path:
    """The folder of all runs of two ranks."""
    folder = recipe.parent / "two"
    runs = {f"{folder}/{name}": changes for name, changes in RUNS.items()}
    train(recipe, 2, runs | {f"{folder}/resumed": [*RESUMED, "train.accumulation=2"]})
    return folder


def test_two_ranks_train_as_one_process_does(recipe: Path, two: Path) -> None:
    one = recipe.parent / "one"
    train(recipe, 1, {f"{one}/{name}": [*changes, "train.accumulation=2"] for name, changes in RUNS.items()})
    for name in RUNS:
        assert logs(two / name, "loss") == logs(one / name, "loss")
        assert logs(two / name, "eval_mean") == logs(one / name, "eval_mean")
        assert_same(weights(two / name), weights(one / name), rtol=1e-3, atol=1e-5)
        measured = [json.loads((folder / name / "measured").read_text()) for folder in (one, two)]
        assert [found["ranks"] for found in measured] == [1, 2]
        assert measured[0]["steps"] == measured[1]["steps"]


@pytest.mark.parametrize(("world", "accumulation"), [(1, 4), (4, 1)])
def test_a_checkpoint_of_two_ranks_goes_on_on_others(recipe: Path, two: Path, world: int, accumulation: int) -> None:
    """The same batches make a step of 2 ranks x 2, 1 x 4 and 4 x 1, so the weights of all are the same."""
    if world > 1 and Version(torch.__version__) < Version("2.13"):
        pytest.skip(
            "older versions of torch load no optimiser onto cpu:0, where Transformers wants it on several ranks"
        )
    folder = recipe.parent / f"on-{world}"
    shutil.copytree(two / "resumed", folder)
    shutil.rmtree(folder / "checkpoints" / "checkpoint-4")
    shutil.rmtree(folder / "adapter")
    train(recipe, world, {str(folder): [*RESUMED, f"train.accumulation={accumulation}"]}, resume=True)
    assert list(logs(folder, "loss")) == [1, 2, 3, 4]
    assert logs(folder, "loss") == pytest.approx(logs(two / "resumed", "loss"), abs=2e-4)
    assert_same(weights(folder), weights(two / "resumed"), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["FSDP", "DEEPSPEED"])
def test_shards_are_refused(name: str, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"ACCELERATE_USE_{name}", "true")
    with pytest.raises(ConfigError, match=f"told to use {name}: `monkeyjump train` keeps the whole model"):
        run(load_recipe(str(recipe), []))


# `accelerate launch` for several processes calls the function behind `torchrun`, so this starts both.
LAUNCHER = (
    *("accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1"),
    *("--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0"),
)


def test_a_launcher(recipe: Path) -> None:
    folder = recipe.parent / "launched"
    few = ["train.max_steps=1", "train.eval_steps=1", "train.save_steps=1", "evaluate.test_limit=2", "data.cap=8"]
    command = [sys.executable, "-m", *LAUNCHER, "-m", "monkeyjump", "train", str(recipe), f"output={folder}"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    found = subprocess.run([*command, *few], env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert found.returncode == 0, found.stderr[-3000:]
    assert found.stdout.count("record      ") == 1  # one rank speaks
    assert "1 steps of 4 x 1 texts on 2 ranks" in found.stderr + found.stdout
    assert json.loads((folder / "record.json").read_text())["metrics"]["ranks"] == 2
    assert "unused parameters" not in found.stderr
