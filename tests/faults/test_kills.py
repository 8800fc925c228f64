"""A run that is killed at any moment, and resumed each time, ends as one that never was.

`MONKEYJUMP_KILLS=50` kills as often, and `MONKEYJUMP_PAUSE=60` stops a run for as many seconds; less is enough in
between.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from monkeyjump.cli.main import main
from tests.processes import start_process
from tests.tiny_folder import save_tiny_model, write_recipe
from tests.training.test_run import same, weights

KILLS = int(os.environ.get("MONKEYJUMP_KILLS", "2"))
PAUSE = float(os.environ.get("MONKEYJUMP_PAUSE", "0"))
SETTINGS = ["train.save_steps=1", "train.keep_checkpoints=2", "train.eval_steps=4", "train.max_steps=8"]


def run(arguments: list[str]) -> None:
    sys.exit(main(arguments))


def command(recipe: Path, output: Path) -> list[str]:
    return ["train", str(recipe), *SETTINGS, f"output={output}"]


def test_a_run_that_is_killed_at_any_moment_ends_as_one_that_never_was(tmp_path: Path) -> None:
    """The kill comes anywhere between the start of the process and its end: encoding, k-means, steps, saves, tests."""
    recipe, rng, kills, finished = write_recipe(tmp_path, save_tiny_model(tmp_path / "tiny")), random.Random(0), 0, 0
    began = time.monotonic()
    process = start_process(run, command(recipe, tmp_path / "whole"))
    process.join()
    whole = time.monotonic() - began
    assert process.exitcode == 0
    while kills < KILLS:
        output = tmp_path / f"killed-{finished}"
        resume: list[str] = []
        while not (output / "record.json").is_file():
            process = start_process(run, [*command(recipe, output), *resume])
            process.join(rng.uniform(0.05, 1.0) * whole if kills < KILLS else 300)
            if process.exitcode is None:
                process.kill()
                process.join()
                kills += 1
            else:
                assert process.exitcode == 0
            resume = ["--resume"] if list(output.glob("checkpoints/*/complete")) else ["--overwrite"]
        check(tmp_path / "whole", output)
        finished += 1


def check(whole: Path, output: Path) -> None:
    assert same(weights(whole), weights(output))
    reports = [json.loads((folder / "evaluation.json").read_text())["rows"] for folder in (whole, output)]
    assert reports[0] == reports[1]
    steps = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps if "loss" in line] == list(range(1, 9))
    assert not list(output.rglob(".*.tmp"))


def test_a_run_that_was_stopped_for_a_while_goes_on(tmp_path: Path) -> None:
    """A machine that sleeps, or a scheduler that takes the processor away: the folder stays the stopped run's."""
    recipe = write_recipe(tmp_path, save_tiny_model(tmp_path / "tiny"))
    whole, output = tmp_path / "whole", tmp_path / "stopped"
    process = start_process(run, command(recipe, output))
    while not (output / "log.jsonl").is_file():  # it trains
        assert process.exitcode is None
        time.sleep(0.01)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    try:
        started = start_process(run, command(recipe, whole))
        second = start_process(run, [*command(recipe, output), "--overwrite"])
        second.join(300)
        started.join(300)
        assert (second.exitcode, started.exitcode) == (2, 0)
        time.sleep(PAUSE)
        assert process.exitcode is None
    finally:
        os.kill(process.pid, signal.SIGCONT)
    process.join(300)
    assert process.exitcode == 0
    check(whole, output)
