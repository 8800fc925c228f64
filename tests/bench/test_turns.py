"""Variants in processes: failures stay their own, preparation overlaps, timing never does."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from monkeyjump.bench.results import BenchRecord
from monkeyjump.bench.turns import Measurement, Turns
from tests.bench.fake_runs import FakeRun, FakeSettings

MODES = ("eager", "compile")


def measured(folder: Path, *variants: str, jobs: int = 8, hold: int = 8, **options: Any) -> list[dict[str, Any]]:
    settings = FakeSettings(folder, together=options.pop("together", 0))
    turns = Turns(jobs, hold, options.pop("timeout", 30), folder / "logs", **options)
    return list(turns.rows([Measurement(FakeRun, name, settings, {"label": name.upper()}) for name in variants]))


def test_failing_variants_are_reported_and_the_others_go_on(tmp_path: Path) -> None:
    rows = measured(tmp_path, "one", "raises", "dies", "dies late", "compiles not", "two")
    found = {(row["variant"], row["mode"]): row for row in rows}
    assert len(rows) == len(found) == 12
    for name in ("one", "two"):
        assert [found[name, mode]["status"] for mode in MODES] == ["ok", "ok"]
    for mode in MODES:
        assert found["raises", mode]["error"] == "ValueError: no such thing"
        assert found["raises", mode]["error_type"] == "ValueError"
        assert "exit code 3" in found["dies", mode]["error"]
        assert "last words" in found["dies", mode]["error"]
    for name, error in (("dies late", "exit code 4"), ("compiles not", "RuntimeError: no graph")):
        assert found[name, "eager"]["status"] == "ok"
        assert error in found[name, "compile"]["error"]
    assert all(row["label"] == row["variant"].upper() for row in rows)


def test_timing_is_exclusive_and_preparation_is_not(tmp_path: Path) -> None:
    rows = measured(tmp_path, "a", "b", "c", together=3)  # each is prepared only once all have begun
    assert len(rows) == 6
    timed = sorted((row["started"], row["ended"]) for row in rows)
    for (_, end), (start, _) in pairwise(timed):
        assert end <= start
    assert max(row["prepared"] for row in rows) <= timed[0][0]  # nothing is timed before all are prepared


def test_waves_hold_no_more_than_asked_for(tmp_path: Path) -> None:
    rows = measured(tmp_path, "a", "b", "c", jobs=1, hold=2)
    by = {row["variant"]: row for row in rows if row["mode"] == "compile"}
    assert by["a"]["prepared"] <= by["b"]["began"]  # one at a time
    assert by["b"]["prepared"] <= by["a"]["started"]  # both ready before the first is timed
    assert by["b"]["ended"] <= by["c"]["began"]  # the third starts when the first wave is done


def test_variants_take_turns(tmp_path: Path) -> None:
    """A row is of the times of all turns so far, and comes after every turn; one that failed is not tried again."""
    rows = measured(tmp_path, "a", "b", "dies later", rounds=3)
    order = [row["variant"] for row in rows if row["mode"] == "eager"]
    assert order == ["a", "b", "dies later", "a", "b", "dies later", "a", "b"]
    last = {(row["variant"], row["mode"]): row for row in rows}
    for name, mode in ((name, mode) for name in "ab" for mode in MODES):
        row = last[name, mode]
        assert (row["turns"], row["times_ms"]) == (3, [10.0, 100.0, 1000.0])
        assert (row["median_ms"], round(row["tokens_per_second"], 6), row["repeats"]) == (100.0, 10.0, 3)
    assert all("exit code 5" in last["dies later", mode]["error"] for mode in MODES)


def test_what_takes_too_long_is_ended(tmp_path: Path) -> None:
    rows = measured(tmp_path, "hangs", "one", timeout=3)
    by = {(row["variant"], row["mode"]): row for row in rows}
    for mode in MODES:
        assert by["one", mode]["status"] == "ok"
        assert by["hangs", mode]["error"] == "TimeoutError: no answer to 'prepare' within 3 s"


def test_memory_that_ran_out_beside_others_is_tried_alone(tmp_path: Path) -> None:
    rows = measured(tmp_path, "greedy", "one")
    assert [row["status"] for row in rows] == ["ok"] * 4
    assert min(row["began"] for row in rows if row["variant"] == "greedy") >= max(
        row["ended"] for row in rows if row["variant"] == "one"
    )
    (tmp_path / "greedy").unlink()
    alone = measured(tmp_path, "greedy")  # nothing was beside it: nothing to try again
    assert [row["error_type"] for row in alone] == ["OutOfMemoryError"] * 2


def test_in_one_process(tmp_path: Path) -> None:
    rows = measured(tmp_path, "raises", "one", jobs=0, hold=1)
    assert [(row["variant"], row["status"]) for row in rows] == [("raises", "failed")] * 2 + [("one", "ok")] * 2


def test_a_record_holds_what_was_measured_so_far(tmp_path: Path) -> None:
    record = BenchRecord(tmp_path, "cut", {"seed": 5, "device": "cpu"})
    row = {"variant": "floor", "mode": "eager", "status": "ok", "median_ms": 2.0}
    for new in (row, {**row, "variant": "mjlora", "median_ms": 3.0}, {**row, "variant": "mjlora", "median_ms": 5.0}):
        record.add(new)
    content = json.loads(record.path.read_text())
    assert (content["status"], content["seed"]) == ("cancelled", 5)
    # a later turn replaces the row of the one before
    assert [found["time_vs_floor"] for found in content["metrics"]["rows"]] == [1.0, 2.5]


@pytest.mark.parametrize("after", [1, 3])
def test_a_run_that_is_cut_short_ends_its_processes(tmp_path: Path, after: int) -> None:
    settings = FakeSettings(tmp_path)
    rows = Turns(2, 2, 20, tmp_path / "logs").rows([Measurement(FakeRun, name, settings) for name in ("one", "two")])
    found = [next(rows) for _ in range(after)]
    rows.close()
    assert [row["mode"] for row in found] == ["eager", "compile", "eager"][:after]
    assert not _children()


def _children() -> list[str]:
    mine = Path("/proc/self/task").glob("*/children")
    return [pid for path in mine for pid in path.read_text().split() if "monkeyjump.bench.turns" in _command(pid)]


def _command(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""
