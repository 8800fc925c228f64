"""`monkeyjump train` on two ranks = one process that accumulates two batches."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
from pathlib import Path

import torch
from safetensors.torch import load_file

from monkeyjump.cli.main import main
from monkeyjump.training.recipe import load_recipe
from monkeyjump.training.run import run
from tests.helpers import assert_same
from tests.processes import in_new_processes
from tests.tiny_folder import save_tiny_model, write_recipe

# Centres that do not move: they would be moved after every batch here, after every second one there.
SETTINGS = ["adapter.dropout=0.0", "adapter.ema_stop=0", "train.max_steps=none", "train.epochs=1", "data.cap=16"]
SETTINGS += ["train.eval_steps=none", "train.save_steps=none", "evaluate.validation_limit=2", "evaluate.test_limit=2"]


def worker(rank: int, port: int, command: list[str], folder: str) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # two ranks do not fit one GPU
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with (Path(folder) / f"said-{rank}").open("w") as file, contextlib.redirect_stdout(file):
        assert main(command) == 0


def by_itself(rank: int, recipe: str, overrides: list[str], folder: str) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    result = run(load_recipe(recipe, overrides), test=False)
    (Path(folder) / "validation").write_text(json.dumps(result.best_validation))


def logs(folder: Path, key: str) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return {line["step"]: round(line[key], 4) for line in lines if key in line}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Adapters and centres, without what counts forwards and their tokens: two ranks make two at a time."""
    found = load_file(folder / "adapter" / "adapter_model.safetensors")
    return {name: value for name, value in found.items() if not re.search("monkeyjump_(step|staged)", name)}


def test_two_ranks_train_as_one_process_does(tmp_path: Path) -> None:
    recipe = str(write_recipe(tmp_path, save_tiny_model(tmp_path / "tiny")))
    one, two = tmp_path / "one", tmp_path / "two"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    in_new_processes(worker, port, ["train", recipe, f"output={two}", *SETTINGS], str(tmp_path), count=2)
    in_new_processes(by_itself, recipe, [f"output={one}", "train.accumulation=2", *SETTINGS], str(tmp_path))
    assert logs(two, "loss") == logs(one, "loss")
    assert logs(two, "eval_mean") == logs(one, "eval_mean")
    assert list(logs(two, "eval_mean")) == [1, 2, 3, 4]  # four times in the run
    assert_same(weights(two), weights(one), rtol=1e-3, atol=1e-5)
    record = json.loads((two / "record.json").read_text())
    assert record["metrics"]["validation"] == json.loads((tmp_path / "validation").read_text())
    assert "adapter     " in (tmp_path / "said-0").read_text()
    assert (tmp_path / "said-1").read_text() == ""
