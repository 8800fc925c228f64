"""A report in all its forms: terminal, plain text, JSON, CSV, HTML and files."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from monkeyjump.evaluation import metrics
from monkeyjump.evaluation.report import NO_ANSWER, EvaluationReport, ReportRow, mean_rows, percent, span
from monkeyjump.tasks import expand


def test_json_csv_and_html_hold_the_same_numbers(report):
    data = json.loads(report.to_json())
    rows = {row["task"]: row for row in [*data["rows"], *data["families"], data["overall"]]}
    table = list(csv.DictReader(io.StringIO(report.to_csv())))
    assert len(table) == len(rows) == 6
    html = report.to_html()
    embedded = re.search(r'<script type="application/json" id="evaluation">(.*?)</script>', html, re.DOTALL)
    assert embedded is not None
    assert json.loads(embedded.group(1)) == data
    shown = html[: embedded.start()].replace("\u2212", "-")
    for line in table:
        row = rows[line["task"]]
        for side in ("base", "adapter", "difference"):
            assert float(line[side]) == row[side]
            assert float(line[f"{side}_low"]) == row[f"{side}_interval"]["low"]
            assert float(line[f"{side}_high"]) == row[f"{side}_interval"]["high"]
            assert f">{percent(row[side], signed=side == 'difference')}<" in shown
        assert f"{percent(row['adapter'])}" in str(report)
        for name in ("base_nll", "adapter_nll"):
            assert line[name] == ("" if row[name] is None else str(row[name]))
        for name in ("majority", "base_top", "adapter_top"):
            share, answer = row[name], row[f"{name}_answer"]
            assert line[name] == ("" if share is None else str(share))
            assert line[f"{name}_answer"] == (answer or "")
            if answer is not None:
                assert percent(share) in shown
                assert f">{answer}</span>" in shown or f"</b> % {answer}</span>" in shown


def test_html_is_self_contained_and_escaped(report):
    row = ReportRow("task", "<b>&x</b>", "f", "accuracy", 3, base=0.5, base_interval=metrics.wilson(1, 2))
    row = replace(row, majority=0.5, majority_answer='<i>"', base_top=1.0, base_top_answer="</script>")
    nasty = EvaluationReport([row], [row], row, {"model": "</script><script>alert(1)</script>"})
    for html in (report.to_html(), nasty.to_html()):
        assert not re.search("https?:", html)
        policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
        assert f'content="{policy}"' in html
        assert "<link" not in html
        assert html.count("<script") == 1
    assert "&lt;b&gt;" in nasty.to_html()
    assert nasty.to_html().count("&lt;i&gt;&quot;") == 2 * 2  # text and tooltip of the task and the mean


def test_names_are_neither_markup_nor_formulas():
    from rich.console import Console

    row = ReportRow("task", "=1+1 [/red] [x]", "-f", "accuracy", 3, base=-0.5, base_interval=metrics.Interval(-0.5, 1))
    nasty = EvaluationReport([row], [row], row, {"model": "[/m]"})
    out = io.StringIO()
    Console(file=out, width=80).print(nasty.table())
    assert "=1+1 [/red] [x]" in out.getvalue()
    assert "[/m]" in out.getvalue()
    cells = list(csv.reader(io.StringIO(nasty.to_csv())))[1]
    assert cells[1:3] == ["'=1+1 [/red] [x]", "'-f"]
    assert cells[6:8] == ["-0.5", "-0.5"]  # numbers stay numbers


def test_text_fits_eighty_columns(report):
    from rich.console import Console

    long = ReportRow("task", "a-task-with-a-very-long-name", "glue", "exact_match", 123456, "text")
    interval = metrics.Interval(-0.9999, 1.0)
    wide = replace(long, base=1.0, adapter=1.0, difference=-0.9999, majority=0.5, base_top=1.0, adapter_top=1.0)
    wide = replace(wide, base_interval=interval, adapter_interval=interval, difference_interval=interval)
    wide = replace(wide, base_top_answer="word " * 40, adapter_top_answer="x" * 200)
    family = ReportRow("family", "mean of a-very-long-family-name", "glue", "mean", 1, base=0.1, adapter=0.2)
    report = replace(report, rows=[*report.rows, wide], families=[*report.families, family])
    texts = [str(report)]
    for color in (True, False):
        out = io.StringIO()
        Console(file=out, width=80, force_terminal=color, no_color=not color).print(report.table())
        texts.append(re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue()))
    for text in texts:
        assert max(map(len, text.splitlines())) <= 80
        assert "… (rho)" in text  # beside numbers this wide a name has 9 characters; its metric stays
        assert "… (exact)" in text
        assert percent(report.overall.adapter) in text
        assert "-100..+100" in text
        assert "100/100" in text


def test_the_usual_names_are_not_cut():
    interval, difference = metrics.Interval(0.474, 0.763), metrics.Interval(0.444, 0.776)
    usual = ReportRow("task", "", "", "", 10042, "", 0.123, 0.612, 0.489, interval, interval, difference)
    usual = replace(usual, majority=0.5, base_top=1.0, adapter_top=0.337)
    rows = [replace(usual, task=task.name, family=task.family, metric=task.metric) for task in expand("text14")]
    families, overall = mean_rows(rows, {row.task: {side: np.zeros(2) for side in ("base", "adapter")} for row in rows})
    report = EvaluationReport(rows, families, overall, {"model": "a/model", "split": "test", "mode": "letter"})
    lines = str(report.table()).splitlines()
    assert lines[0] == "a/model, test, mode letter, accuracy x 100"
    assert max(map(len, lines)) <= 80
    assert len(rows) == 14
    for row in [*rows, *families, overall]:
        name = f"{row.task} (rho)" if row.task == "stsb" else row.task
        assert sum(line.startswith(f"{name}  ") for line in lines) == 1
    [line] = [line for line in lines if line.startswith("arc_challenge")]
    assert line.split()[1:] == ["10042", "12.3", "61.2", "47..76", "+48.9", "+44..+78", "50.0", "100/34"]
    alone = replace(report, rows=[replace(rows[0], adapter=None, difference=None, adapter_top=None)], families=[])
    alone.families, alone.overall = [alone.rows[0]], alone.rows[0]
    assert str(alone.table()).splitlines()[-1].split() == ["sst2", "10042", "12.3", "47..76", "50.0", "100"]


def test_intervals_in_whole_numbers():
    assert span(metrics.Interval(-0.004, 0.5)) == "0..50"
    assert span(metrics.Interval(-0.126, -0.001)) == "-13..0"
    # The sign of a bound that rounds to 0 tells whether 0 lies inside.
    assert span(metrics.Interval(-0.003, 0.02), signed=True) == "-0..+2"
    assert span(metrics.Interval(0.003, 0.02), signed=True) == "+0..+2"
    assert span(metrics.Interval(0.0, 0.02), signed=True) == "0..+2"
    assert span(None) == span(metrics.Interval(math.nan, math.nan)) == "-"


def constant_row(**changes: Any) -> ReportRow:
    row = ReportRow("task", "trec", "f", "accuracy", 40, "text", base=0.0, adapter=0.5, majority=0.3)
    return replace(
        row, base_top=1.0, base_top_answer="abbreviation", adapter_top=0.34, adapter_top_answer="x", **changes
    )


def notes_of(*rows: ReportRow) -> list[str]:
    return EvaluationReport([*rows], [], rows[0], {"mode": "text"}).notes()


def test_notes_say_which_side_gives_one_answer():
    assert notes_of(constant_row()) == ["trec: the base model answered 'abbreviation' in 40 of 40 rows."]
    both = replace(constant_row(), adapter_top=0.9, adapter_top_answer=NO_ANSWER)
    assert notes_of(both)[1] == "trec: the adapter gave no valid answer in 36 of 40 rows."
    assert notes_of(replace(both, majority=0.89)) == notes_of(replace(both, majority=None)) == notes_of(both)
    assert notes_of(replace(both, majority=0.9)) == []  # the right answers are as constant
    assert notes_of(replace(both, n=9)) == []
    assert notes_of(replace(constant_row(), base_top=0.89)) == []
    steering = notes_of(replace(constant_row(), base_top_answer="a\x1b[31m" + "b" * 100))[0]
    assert "\x1b" not in steering
    assert len(steering) < 100


def test_notes_name_what_was_not_scored_or_cut():
    rows = [replace(constant_row(), base_top=0.5, task=name) for name in ("one", "two", "three")]
    rows[0] = replace(rows[0], dropped=3, truncated=5)
    rows[1] = replace(rows[1], dropped=1, mode="generate")
    assert notes_of(*rows) == [
        "These rows do not fit max_length and were not scored: one 3 of 43, two 1 of 41.",
        "These rows lost a part of their context to fit max_length: one 5 of 40.",
        "These tasks have rows without options and were scored in mode generate: two.",
    ]


@pytest.mark.parametrize("width", [None, 40, 120])
def test_show_prints_the_table_and_wrapped_notes(capsys, monkeypatch, report, width):
    monkeypatch.setitem(sys.modules, "rich.console", None)  # plain text; a table is shown by rich where it is installed
    monkeypatch.delenv("COLUMNS", raising=False)
    if width is not None:
        monkeypatch.setenv("COLUMNS", str(width))
    report = replace(report, rows=[*report.rows, constant_row(dropped=3)])
    report.show()
    shown = capsys.readouterr().out
    table = f"{report.table()}\n\n"
    assert shown.startswith(table)
    below = shown.removeprefix(table).splitlines()
    assert max(map(len, below)) <= (width or 80)
    assert below[0].startswith("major: score of the best constant")
    words = " ".join(below).split()
    assert " ".join(words).endswith(" ".join(report.notes()))
    assert report.notes()


def test_saved_files(tmp_path, monkeypatch, report):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # a report needs no pictures
    paths = report.save(tmp_path / "out" / "evaluation")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "evaluation.csv",
        "evaluation.html",
        "evaluation.json",
        "evaluation.predictions.jsonl",
    ]
    lines = [json.loads(line) for line in paths["predictions.jsonl"].read_text("utf-8").splitlines()]
    assert len(lines) == 3 * 2 * 12
    assert {"task", "side", "index", "predicted", "gold", "correct", "scores"} <= set(lines[0])
