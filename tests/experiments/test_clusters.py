"""Grids on a real Ray cluster of several nodes, with workers, nodes and drivers that die, and as jobs of submitit.

Most runs here only write a record, so that no worker waits for the imports of a model.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from monkeyjump.cli.main import main
from monkeyjump.errors import ConfigError
from monkeyjump.experiments.clusters import OnRay, OnSlurm, run_on
from monkeyjump.experiments.compare import grid_of_methods, run_grid
from monkeyjump.experiments.comparison import Comparison
from monkeyjump.training.recipe import load_recipe
from tests.processes import start_process
from tests.tiny_folder import save_tiny_model, write_recipe


def pretend(seconds: float = 0.0, spoil: str = "", until: str = "") -> Callable[[dict[str, Any], bool, str], None]:
    """A run that writes its record, once the file `until` is there. It is a closure, sent by value: no module of tests
    is imported by a worker."""

    def make(settings: dict[str, Any], test: bool, home: str) -> None:
        import os
        import signal
        import time
        from pathlib import Path

        from monkeyjump.record import RunRecord, write_record

        folder = Path(settings["output"])
        folder.mkdir(parents=True, exist_ok=True)
        with (folder.parents[3] / "made.txt").open("a") as file:
            file.write(f"{folder} {test}\n")
        time.sleep(seconds)
        while until and not Path(until).exists():
            time.sleep(0.02)
        if spoil == "kill" and settings["seed"] == 1 and not (folder / "died").exists():
            (folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if spoil == "raise" and settings["seed"] == 1:
            raise ValueError("a seed that fails")
        score = settings["train"]["lr"] + 0.1 * settings["seed"] + 0.01 * len(settings["method"])
        metrics = {"validation": score, "mean": score, "mean_nll": -score, "mean_gate": 0.3, "diverged_at": None}
        record = RunRecord(kind="compare-cell", name=settings["name"], config=settings, metrics=metrics)
        write_record(record, folder / "record.json")

    return make


class Inline:
    """The engine that the others are compared with: every run is made when it is submitted."""

    slots = 1

    def submit(self, *arguments: Any) -> tuple[Any, ...]:
        pretend()(*arguments)
        return (json.dumps(arguments),)

    def first(self, handles: Sequence[Any]) -> Any:
        return handles[0]

    def result(self, handle: Any) -> None: ...

    def close(self, handles: Sequence[Any]) -> None: ...


def grid() -> Comparison:
    """Two rates and two seeds: the final runs wait for the search. A control waits for the gates of its method."""
    methods = ["mjlora", "mjlora_uniform"]
    found = grid_of_methods(load_recipe("quickstart"), methods, [0, 1], [1e-2, 2e-2], controls=False)
    found.lrs["mjlora_uniform"] = [1e-2]
    return found


def made(output: Path) -> list[str]:
    return [line.removeprefix(str(output)) for line in (output / "made.txt").read_text().splitlines()]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    found = grid()
    run_on(Inline(), found, tmp_path_factory.mktemp("inline"))
    return found


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    pytest.importorskip("ray", reason="ray is not installed")
    from ray.cluster_utils import Cluster

    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "object_store_memory": 80 * 2**20})
    yield found
    found.shutdown()


def test_a_lost_worker_costs_its_run_alone(expected: Comparison, cluster: Any, tmp_path: Path) -> None:
    found = grid()
    run_on(OnRay(cluster.address, 1, pretend(spoil="kill")), found, tmp_path)
    assert (found.searched, found.final) == (expected.searched, expected.final)
    runs = made(tmp_path)
    assert len(runs) - len(set(runs)) == len(list(tmp_path.rglob("died"))) == 2
    assert len(set(runs)) == (2 + 1) + 2  # two rates, then a second seed with the better one; two seeds of the control


def test_a_lost_node_costs_its_runs_alone(cluster: Any, tmp_path: Path) -> None:
    """Four runs on two nodes of two cores; when all have begun, one of the nodes goes."""

    def four() -> Comparison:
        return grid_of_methods(load_recipe("quickstart"), ["lora"], list(range(4)), [1e-2], controls=False)

    def lose() -> None:
        patience = time.monotonic() + 300
        while time.monotonic() < patience and len(list((tmp_path / "there").rglob("seed-*"))) < 4:
            time.sleep(0.05)
        cluster.remove_node(node)
        (tmp_path / "lost").touch()

    node, here, there = cluster.add_node(num_cpus=2, object_store_memory=80 * 2**20), four(), four()
    run_on(Inline(), here, tmp_path / "here")
    losing = threading.Thread(target=lose)
    losing.start()
    run_on(OnRay(cluster.address, 1, pretend(until=str(tmp_path / "lost"))), there, tmp_path / "there")
    losing.join()
    assert there.final == here.final
    assert len(made(tmp_path / "there")) > 4  # what was running there was made again


def drive(address: str, output: str) -> None:
    run_on(OnRay(address, 1, pretend(seconds=0.7)), grid(), Path(output))


def test_a_lost_driver_loses_nothing_that_was_finished(expected: Comparison, cluster: Any, tmp_path: Path) -> None:
    driver = start_process(drive, cluster.address, str(tmp_path))
    try:
        patience = time.monotonic() + 300
        while len(finished := list(tmp_path.rglob("record.json"))) < 3:
            assert driver.is_alive()
            assert time.monotonic() < patience
            time.sleep(0.1)
    finally:
        driver.kill()
        driver.join()
    found, before = grid(), {path: path.stat().st_mtime_ns for path in finished}
    run_on(OnRay(cluster.address, 1, pretend()), found, tmp_path)
    assert (found.searched, found.final) == (expected.searched, expected.final)
    assert all(path.stat().st_mtime_ns == before[path] for path in finished)


def test_what_fails_is_named_and_the_others_go_on(cluster: Any, tmp_path: Path) -> None:
    found = grid()
    with pytest.raises(ConfigError, match=r"mjlora, rate 0.02, seed 1: ValueError: a seed that fails(.|\n)*are kept"):
        run_on(OnRay(cluster.address, 1, pretend(spoil="raise")), found, tmp_path)
    assert [cell.seed for cell in found.final] == [0]  # the control waits for all seeds of its method


def test_a_comparison_on_the_cluster_is_the_one_made_here(cluster: Any, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, save_tiny_model(tmp_path / "tiny"))
    settings = ["train.max_steps=2", "train.eval_steps=2", "train.save_steps=2", "evaluate.before=false"]
    words = ["compare", str(recipe), *settings, "--methods", "mjlora", "--no-controls", "--seeds", "1"]
    assert main([*words, "--output", str(tmp_path / "there"), "--on", f"ray:{cluster.address}"]) == 0
    small = load_recipe(str(recipe), settings)
    here = run_grid(grid_of_methods(small, ["mjlora"], [0], [1e-2], controls=False), tmp_path / "here")
    there = json.loads((tmp_path / "there" / "compare.json").read_text())["metrics"]
    assert there["nll"]["mjlora"] == pytest.approx(here.measured("mjlora", "mean_nll"), abs=1e-6)


def test_a_run_is_a_job_of_submitit(tmp_path: Path) -> None:
    pytest.importorskip("submitit", reason="submitit is not installed")
    here, there = (grid_of_methods(load_recipe("quickstart"), ["lora"], [0], [1e-2], controls=False) for _ in range(2))
    run_on(OnSlurm("local", tmp_path / "there", pretend()), there, tmp_path / "there")
    run_on(Inline(), here, tmp_path / "here")
    assert there.final == here.final


def test_mistakes_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compare", "quickstart", "--methods", "lora", "--output", str(tmp_path)]
    assert main([*words, "--on", "rya"]) == 2
    assert "--on rya is not known: use local, ray, ray:ADDRESS or submitit" in capsys.readouterr().err
    assert main([*words, "--dry-run", "--seeds", "2"]) == 0
    assert "lora, rate 0.004, seed 1\n2 runs can be made now, 0 more" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
