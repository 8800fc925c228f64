"""`monkeyjump train` on two ranks = one process that accumulates two batches."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from accelerate import PartialState
from safetensors.torch import load_file

from monkeyjump.cli.main import main
from monkeyjump.training.recipe import load_recipe
from monkeyjump.training.run import run
from tests.helpers import assert_same
from tests.processes import free_port, in_new_processes
from tests.tiny_folder import RECIPE, save_tiny_model, write_recipe
from tests.visual import save_visual_model

# Centres that do not move: they would be moved after every batch here, after every second one there.
SETTINGS = ["adapter.dropout=0.0", "adapter.ema_stop=0", "train.max_steps=none", "train.epochs=1", "data.cap=16"]
SETTINGS += ["train.eval_steps=none", "train.save_steps=none", "evaluate.validation_limit=2", "evaluate.test_limit=2"]


def be_rank(rank: int, port: int, world: int = 2) -> None:
    """Make this process a rank, of a group that gives up soon: a run that deadlocks fails within a minute."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # two ranks do not fit one GPU
    if world > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        PartialState(cpu=True, timeout=timedelta(seconds=60))


def worker(rank: int, port: int, command: list[str], folder: str) -> None:
    be_rank(rank, port)
    with (Path(folder) / f"said-{rank}").open("w") as file, contextlib.redirect_stdout(file):
        assert main(command) == 0


def by_itself(rank: int, recipe: str, overrides: list[str], folder: str) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    result = run(load_recipe(recipe, overrides), test=False)
    (Path(folder) / "validation").write_text(json.dumps(result.best_validation))


def with_moving_centres(rank: int, port: int, recipe: str, folder: str) -> None:
    be_rank(rank, port)
    for stop in (0, 100):
        changes = [f"output={folder}/{stop}", f"adapter.ema_stop={stop}", "adapter.ema_interval=1", "data.cap=8"]
        model = run(
            load_recipe(recipe, [*changes, "train.max_steps=2", "train.eval_steps=2", "train.save_steps=2"]), test=False
        ).model
        centres = {name: value for name, value in model.state_dict().items() if "monkeyjump_center" in name}
        torch.save(centres, f"{folder}/centres-{stop}-{rank}")


def logs(folder: Path, key: str) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return {line["step"]: round(line[key], 4) for line in lines if key in line}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Adapters and centres, without what counts forwards and their tokens: two ranks make two at a time."""
    found = load_file(folder / "adapter" / "adapter_model.safetensors")
    return {name: value for name, value in found.items() if not re.search("monkeyjump_(step|staged)", name)}


def recipe_of_pictures(folder: Path) -> Path:
    model = save_visual_model(folder / "tiny")
    text = RECIPE.format(model=model).replace("tasks: [opinion, tense]", "tasks: [opinion, paint]")
    (folder / "eyes.yaml").write_text(text, encoding="utf-8")
    return folder / "eyes.yaml"


def recipe_of_texts(folder: Path) -> Path:
    return write_recipe(folder, save_tiny_model(folder / "tiny"))


@pytest.mark.parametrize("write", [recipe_of_texts, recipe_of_pictures])
def test_two_ranks_train_as_one_process_does(write: Callable[[Path], Path], tmp_path: Path) -> None:
    recipe = str(write(tmp_path))
    one, two = tmp_path / "one", tmp_path / "two"
    in_new_processes(worker, free_port(), ["train", recipe, f"output={two}", *SETTINGS], str(tmp_path), count=2)
    in_new_processes(by_itself, recipe, [f"output={one}", "train.accumulation=2", *SETTINGS], str(tmp_path))
    assert logs(two, "loss") == logs(one, "loss")
    assert logs(two, "eval_mean") == logs(one, "eval_mean")
    assert list(logs(two, "eval_mean")) == [1, 2, 3, 4]  # four times in the run
    assert_same(weights(two), weights(one), rtol=1e-3, atol=1e-5)
    record = json.loads((two / "record.json").read_text())
    assert record["metrics"]["validation"] == json.loads((tmp_path / "validation").read_text())
    assert "adapter     " in (tmp_path / "said-0").read_text()
    assert (tmp_path / "said-1").read_text() == ""


def test_centres_follow_the_pictures_of_both_ranks(tmp_path: Path) -> None:
    """Each rank has pictures of its own; tokens of all kinds are counted over both."""
    in_new_processes(with_moving_centres, free_port(), str(recipe_of_pictures(tmp_path)), str(tmp_path), count=2)
    still, moved = ([torch.load(tmp_path / f"centres-{stop}-{rank}") for rank in (0, 1)] for stop in (0, 100))
    assert_same(*still)
    assert_same(*moved)
    assert all(not torch.equal(value, still[0][name]) for name, value in moved[0].items())
