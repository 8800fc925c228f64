"""Variants in processes: failures stay their own, preparation overlaps, timing never does."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from monkeyjump.bench.jobs import Crew, Job, run_here
from monkeyjump.bench.session import Session

MODES = ("eager", "compile")


def jobs(folder: Path, *variants: str, together: int = 0) -> list[Job]:
    settings = {"folder": str(folder), "modes": list(MODES), "together": together}
    return [Job("tests.bench.fake_jobs", name, settings, MODES, {"label": name.upper()}) for name in variants]


def run(folder: Path, *variants: str, count: int = 8, hold: int = 8, **options: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    crew = Crew(count, hold, options.pop("timeout", 30), folder / "logs", options.pop("rounds", 1))
    crew.run(jobs(folder, *variants, **options), rows.append)
    return rows


def test_failing_variants_are_reported_and_the_others_go_on(tmp_path: Path) -> None:
    rows = run(tmp_path, "one", "raises", "dies", "dies late", "two")
    found = {(row["variant"], row["mode"]): row for row in rows}
    assert len(rows) == len(found) == 10
    for name in ("one", "two"):
        assert [found[name, mode]["status"] for mode in MODES] == ["ok", "ok"]
    for mode in MODES:
        assert found["raises", mode]["error"] == "ValueError: no such thing"
        assert found["raises", mode]["error_type"] == "ValueError"
        assert "exit code 3" in found["dies", mode]["error"]
        assert "last words" in found["dies", mode]["error"]
    assert found["dies late", "eager"]["status"] == "ok"
    assert "exit code 4" in found["dies late", "compile"]["error"]
    assert all(row["label"] == row["variant"].upper() for row in rows)


def test_timing_is_exclusive_and_preparation_is_not(tmp_path: Path) -> None:
    rows = run(tmp_path, "a", "b", "c", together=3)  # each is prepared only once all have begun
    assert len(rows) == 6
    timed = sorted((row["started"], row["ended"]) for row in rows)
    for (_, end), (start, _) in pairwise(timed):
        assert end <= start
    assert max(row["prepared"] for row in rows) <= timed[0][0]  # nothing is timed before all are prepared


def test_waves_hold_no_more_than_asked_for(tmp_path: Path) -> None:
    rows = run(tmp_path, "a", "b", "c", count=1, hold=2)
    by = {row["variant"]: row for row in rows if row["mode"] == "compile"}
    assert by["a"]["prepared"] <= by["b"]["began"]  # one at a time
    assert by["b"]["prepared"] <= by["a"]["started"]  # both ready before the first is timed
    assert by["b"]["ended"] <= by["c"]["began"]  # the third starts when the first wave is done


def test_variants_take_turns(tmp_path: Path) -> None:
    """A row is of the times of all turns; a variant that dies in a later one owes its rows."""
    rows = run(tmp_path, "a", "b", "dies later", rounds=3)
    whole = [row for row in rows if row["variant"] != "dies later"]
    assert sorted((row["variant"], row["mode"]) for row in whole) == [(n, mode) for n in "ab" for mode in sorted(MODES)]
    for row in whole:
        assert row["times_ms"] == [10.0, 100.0, 1000.0]
        assert (row["median_ms"], round(row["tokens_per_second"], 6), row["repeats"]) == (100.0, 10.0, 3)
    by = {row["variant"]: row for row in whole if row["mode"] == "eager"}
    assert by["b"]["started"] <= by["a"]["ended"]  # the first turn of each is before the other's last
    assert by["a"]["started"] <= by["b"]["ended"]
    lost = [row for row in rows if row not in whole]
    assert len(lost) == len(MODES)
    assert all("exit code 5" in row["error"] for row in lost)


def test_what_takes_too_long_is_ended(tmp_path: Path) -> None:
    rows = run(tmp_path, "hangs", "one", timeout=6)
    by = {(row["variant"], row["mode"]): row for row in rows}
    for mode in MODES:
        assert by["one", mode]["status"] == "ok"
        assert by["hangs", mode]["error"] == "TimeoutError: not ready within 6 s"


def test_memory_that_ran_out_beside_others_is_tried_alone(tmp_path: Path) -> None:
    rows = run(tmp_path, "greedy", "one")
    assert [row["status"] for row in rows] == ["ok"] * 4
    assert min(row["began"] for row in rows if row["variant"] == "greedy") >= max(
        row["ended"] for row in rows if row["variant"] == "one"
    )
    (tmp_path / "greedy").unlink()
    alone = run(tmp_path, "greedy")  # nothing was beside it: nothing to try again
    assert [row["error_type"] for row in alone] == ["OutOfMemoryError"] * 2


def test_in_one_process(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = []
    run_here(jobs(tmp_path, "raises", "one"), rows.append)
    assert [(row["variant"], row["status"]) for row in rows] == [("raises", "failed")] * 2 + [("one", "ok")] * 2


def test_a_run_that_is_cut_short_keeps_what_it_measured(tmp_path: Path) -> None:
    session = Session(tmp_path, "cut", {"seed": 5}, "cpu")
    seen: list[int] = []

    def tell(row: dict[str, Any]) -> None:
        content = json.loads(session.path.read_text())
        seen.append(len(content["metrics"]["rows"]))
        assert content["status"] == "cancelled"
        if len(seen) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.measure(jobs(tmp_path, "one", "two"), Crew(2, 2, 20, tmp_path / "logs"), tell)
    assert seen == [1, 2, 3]
    content = json.loads(session.path.read_text())
    assert content["status"] == "cancelled"
    assert content["seed"] == 5
    assert [row["mode"] for row in content["metrics"]["rows"]] == ["eager", "compile", "eager"]
