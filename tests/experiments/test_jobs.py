"""Runs of a comparison side by side: the same results as one after another, whatever fails on the way."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from filelock import FileLock

from monkeyjump.cli.main import main
from monkeyjump.errors import ConfigError
from monkeyjump.experiments import jobs as module
from monkeyjump.experiments.compare import grid_of_methods, make_cell
from monkeyjump.experiments.comparison import Comparison
from monkeyjump.experiments.worker import IN_USE, NO_MEMORY
from monkeyjump.models import load_tokenizer
from monkeyjump.record import read_record
from monkeyjump.tasks import expand
from monkeyjump.tasks.encode import Encoder
from monkeyjump.training.data import training_data
from monkeyjump.training.fast import FastSettings
from monkeyjump.training.recipe import Recipe, load_recipe
from monkeyjump.training.shared import Shared
from tests.experiments import orphan
from tests.experiments.test_compare import FakeRuns, assert_same_adapter, compare
from tests.tiny_folder import save_tiny_model, write_recipe


class FakeWorkers:
    """Stand in for processes: runs are made at once, and answered when the schedule asks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.alive: dict[int, FakeWorkers.One] = {}
        self.made: list[tuple[int, str]] = []
        self.failing: dict[str, tuple[str, str]] = {}  # a run's name -> its answer
        self.dying: set[str] = set()
        monkeypatch.setattr(module.Processes.__init__, "__defaults__", (lambda number, jobs: self.One(self, number),))
        monkeypatch.setattr(module, "load_tokenizer", lambda name: None)
        monkeypatch.setattr(module, "encode_ahead", lambda recipe, tokenizer: None)

    class One:
        def __init__(self, workers: FakeWorkers, number: int) -> None:
            self.workers, self.number = workers, number
            self.connection, self.theirs = Pipe()
            workers.alive[number] = self

        def make(self, recipe: Recipe, test: bool) -> None:
            self.workers.made.append((self.number, recipe.name))
            if recipe.name in self.workers.dying:
                self.theirs.close()
                return
            answer = self.workers.failing.get(recipe.name)
            if answer == ("too much", NO_MEMORY) and len(self.workers.alive) == 1:
                answer = None  # it fits alone
            if answer is not None and answer[1] == IN_USE:
                del self.workers.failing[recipe.name]  # the other has given up when it is asked again
            if answer is None:
                make_cell(recipe, test, Shared())
            self.theirs.send(answer or (None, ""))

        def interrupt(self) -> None: ...

        def end(self) -> int:
            self.connection.close()
            self.workers.alive.pop(self.number)
            return -9


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> FakeRuns:
    return FakeRuns(monkeypatch)


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> FakeWorkers:
    return FakeWorkers(monkeypatch)


def both(output: Path, jobs: int, **options: Any) -> Comparison:
    return compare(load_recipe("quickstart"), ["lora", "mjlora"], [0, 1], [1e-3, 2e-3], output, jobs=jobs, **options)


def test_side_by_side_is_one_after_another(fakes: FakeRuns, workers: FakeWorkers, tmp_path: Path) -> None:
    one, two = both(tmp_path / "one", jobs=1), both(tmp_path / "two", jobs=2)
    assert (one.searched, one.final) == (two.searched, two.final)
    assert len(workers.made) == one.total == 20
    assert fakes.gates == [0.25] * 6  # the control has waited for the gates of its method
    by_worker = {number: [name.split("-")[0] for at, name in workers.made if at == number] for number in (0, 1)}
    changes = [sum(a != b for a, b in pairwise(names)) for names in by_worker.values()]
    assert changes == [2, 2]  # a worker stays at its method: five of them, one is shared at the end
    assert not workers.alive
    both(tmp_path / "one", jobs=2)
    assert len(workers.made) == 20  # all of it was there


def test_what_fails_is_named_and_the_others_go_on(
    fakes: FakeRuns, workers: FakeWorkers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workers.failing["mjlora-0.002-0"] = ("disk full", "")
    workers.dying.add("lora-0.002-1")
    with pytest.raises(ConfigError) as caught:
        both(tmp_path, jobs=2)
    first, second, advice = sorted(caught.value.problems, key=lambda text: (text[0] == "A", text))
    assert first.startswith("lora, rate 0.002, seed 1: its process ended with exit code -9 (see ")
    assert second.startswith("mjlora, rate 0.002, seed 0: disk full (see ")
    assert advice == "All other runs are kept: the same command makes what is missing."
    record = read_record(tmp_path / "cells" / "lora" / "lr-0.002" / "seed-1" / "record.json")
    assert (record.status, record.extra["error"]) == (
        "failed",
        "ChildProcessError: its process ended with exit code -9",
    )
    names = [name for _, name in workers.made]
    assert "mjlora-0.001-0" in names
    assert "mjlora-0.002-1" not in names  # the search has not found its rate
    assert not any("uniform" in name for name in names)  # nor is its gate known
    assert sum("random" in name for name in names) == 4
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
    workers.failing.clear()
    workers.dying.clear()
    assert both(tmp_path, jobs=2).final == both(tmp_path / "other", jobs=1).final


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize("made", [True, False])
def test_what_another_process_makes_is_waited_for(
    made: bool,
    jobs: int,
    fakes: FakeRuns,
    workers: FakeWorkers,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two commands with one folder share its runs: what the other makes is taken over, and made here if it gives up."""
    whole = both(tmp_path / "whole", jobs=1, controls=False)
    cell = Path("cells", "mjlora", "lr-0.002", "seed-0")
    (tmp_path / "shared" / cell).mkdir(parents=True)
    lock = FileLock(tmp_path / "shared" / cell / ".lock", thread_local=False)
    lock.acquire()

    def other_ends() -> None:
        if made:
            record = (tmp_path / "whole" / cell / "record.json").read_text()
            (tmp_path / "shared" / cell / "record.json").write_text(record)
        lock.release()

    def look(connections: list[Any], timeout: float | None) -> list[Any]:
        if not connections:
            other_ends()
        return wait(connections, timeout and 0)

    monkeypatch.setattr(module, "wait", look)
    monkeypatch.setattr("monkeyjump.experiments.compare.time.sleep", lambda _: other_ends())
    before = len(fakes.asked)
    found = both(tmp_path / "shared", jobs=jobs, controls=False)
    assert sorted(map(repr, found.final)) == sorted(map(repr, whole.final))
    assert len(fakes.asked) - before == before - made
    assert not lock.is_locked
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("waiting ")]
    assert [line.partition(" mj")[2] for line in said] == ["lora, rate 0.002, seed 0: another process makes it"]


def test_a_folder_that_another_process_took_first_is_no_failure(
    fakes: FakeRuns, workers: FakeWorkers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workers.failing["mjlora-0.001-0"] = ("folder in use", IN_USE)
    assert len(both(tmp_path, jobs=2, controls=False).final) == 4
    assert [name for _, name in workers.made].count("mjlora-0.001-0") == 2
    assert "elsewhere   1/8 mjlora, rate 0.001, seed 0: another process makes it\n" in capsys.readouterr().out


def test_a_run_that_does_not_fit_beside_others_is_made_alone(
    fakes: FakeRuns, workers: FakeWorkers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workers.failing["mjlora-0.001-0"] = ("too much", NO_MEMORY)
    both(tmp_path, jobs=2, controls=False)
    assert "no memory   1/8 mjlora, rate 0.001, seed 0: again alone; 1 at a time" in capsys.readouterr().out
    assert [name for _, name in workers.made].count("mjlora-0.001-0") == 2
    assert {number for number, _ in workers.made[2:]} == {0}
    workers.failing["lora-0.004-0"] = ("too much, even alone", NO_MEMORY)
    with pytest.raises(ConfigError, match=r"lora, rate 0\.004, seed 0: too much, even alone"):
        compare(load_recipe("quickstart"), ["lora"], [0, 1], [4e-3], tmp_path, jobs=3)
    assert [name for _, name in workers.made].count("lora-0.004-0") == 2


def test_texts_of_all_seeds_are_encoded_before_their_runs_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe(str(write_recipe(tmp_path, save_tiny_model(tmp_path / "tiny"))))
    grid = grid_of_methods(recipe, ["lora", "mjlora"], [0, 1], [1e-2], controls=False)
    module.Processes(grid, tmp_path, 2)._encode_ahead(threading.Event())
    encoded, encode_all = list[Encoder](), Encoder.encode_all

    def watched(encoder: Encoder, rows: Any) -> Any:
        encoded.append(encoder)
        return encode_all(encoder, rows)

    monkeypatch.setattr(Encoder, "encode_all", watched)
    found = list[set[bytes]]()
    for seed in (0, 1, 2):
        own, tokenizer = recipe.model_copy(update={"seed": seed}), load_tokenizer(recipe.model)
        data = training_data(own, expand(recipe.tasks), tokenizer, FastSettings(compile=False, capture=False))
        found.append({item.input_ids.tobytes() for item in data.items})
        assert bool(encoded) == (seed == 2)  # of which nobody knew
    assert found[0] != found[1] != found[2]


# GPUs, their memory over the size of the model, runs to make, cores: runs at a time
AUTO = [(0, 0, 90, 8, 1), (1, 99, 9, 4, 2), (1, 9, 9, 4, 1), (1, 99, 6, 4, 1), (1, 99, 9, 3, 1), (4, 9, 90, 64, 4),
        (4, 99, 90, 64, 8)]  # fmt: skip


@pytest.mark.parametrize(("gpus", "times", "runs", "cores", "jobs"), AUTO)
def test_auto_jobs(
    gpus: int, times: int, runs: int, cores: int, jobs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"0" * 1000)
    memory = SimpleNamespace(total_memory=1000 * times)
    monkeypatch.setattr(module.torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(module.torch.cuda, "get_device_properties", lambda _: memory)
    monkeypatch.setattr(module.os, "cpu_count", lambda: cores)
    recipe = load_recipe("quickstart", [f"model={tmp_path}"])
    comparison = Comparison(recipe, {"lora": recipe}, [*range(runs)], {"lora": [1e-3]})
    assert module.auto_jobs(comparison) == jobs


def test_processes_give_the_same_as_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two processes, a run that fails in one of them, and the same command again."""
    recipe = str(write_recipe(tmp_path, save_tiny_model(tmp_path / "tiny")))
    words = [
        "compare",
        recipe,
        "train.max_steps=3",
        "train.save_steps=4",
        "train.bf16=false",
        "--methods",
        "lora,mjlora",
        "--seeds",
        "2",
    ]
    assert main([*words, "--no-controls", "--output", str(tmp_path / "one"), "--jobs", "1"]) == 0
    again = [*words, "--no-controls", "--output", str(tmp_path / "two"), "--jobs", "2"]
    lock = tmp_path / "two" / "cells" / "lora" / "lr-0.01" / "seed-1" / ".lock"
    lock.mkdir(parents=True)  # where a file is wanted
    assert main(again) == 2
    said = capsys.readouterr()
    assert "lora, rate 0.01, seed 1: IsADirectoryError" in said.err
    assert "finished    3/4 " in said.out
    assert "IsADirectoryError" in (lock.parent / "output.log").read_text()
    lock.rmdir()
    logs = [path.read_text() for path in (tmp_path / "two").glob("cells/*/*/*/output.log")]
    assert len(logs) == 4
    assert not any("is deprecated" in log for log in logs)  # what others say to each other
    assert main(again) == 0
    assert "run 4 of 4: lora, rate 0.01, seed 1" in capsys.readouterr().out  # one run needs no process
    cells = sorted(
        path.parent.relative_to(tmp_path / "one") for path in (tmp_path / "one").glob("cells/*/*/*/record.json")
    )
    assert len(cells) == 4
    timed = {
        "train_seconds",
        "validation_seconds",
        "steps_per_second",
        "compile_seconds",
        "graphs",
        "peak_memory_bytes",
    }
    for cell in cells:
        assert_same_adapter(tmp_path / "one" / cell, tmp_path / "two" / cell)
        one, two = (json.loads((tmp_path / side / cell / "record.json").read_text()) for side in ("one", "two"))
        assert (one["status"], two["status"]) == ("finished", "finished")
        assert {k: v for k, v in one["metrics"].items() if k not in timed} == {
            k: v for k, v in two["metrics"].items() if k not in timed
        }


def test_workers_stop_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    """As by Ctrl-C, also where the shell of the parent ignores that; one that waits for more work then ends, too."""
    log = tmp_path / "log"
    with subprocess.Popen([sys.executable, "-m", orphan.__name__, str(log)]) as parent:
        wait_for(lambda: log.exists() and log.read_text().startswith("busy "))
        worker = int(log.read_text().split()[1])
        parent.kill()
    wait_for(lambda: log.read_text() == "stopped")
    wait_for(lambda: ended(worker))


def ended(process: int) -> bool:
    """Gone, or a zombie that nobody has buried."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_for(condition: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_number_of_jobs_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "quickstart", "--methods", "lora", "--jobs", "0"]) == 2
    assert "--jobs 0 must be a number of runs from 1, or auto." in capsys.readouterr().err


def test_a_worker_sees_one_gpu_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(module.torch.cuda, "device_count", lambda: 2)
    assert [module._gpu(number) for number in range(3)] == ["0", "1", "0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert [module._gpu(number) for number in range(2)] == ["5", "7"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    assert module._gpu(1) is None
