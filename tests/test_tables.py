"""The table of the package: the same cells in every form, and no cell is read as anything but text."""

from __future__ import annotations

import csv
import io
import sys

import pytest
from rich.console import Console

from monkeyjump.tables import Bold, Table, csv_text

TABLE = Table("Scores", ["task", "score", "diff"], [["rte", "50.0", "-1.5"], ["mean", Bold("7.0"), ""]])


def in_terminal(table: Table, color: bool = False) -> str:
    out = io.StringIO()
    Console(file=out, width=80, force_terminal=color, color_system="standard" if color else None).print(table)
    return out.getvalue()


def test_words_are_left_and_numbers_right() -> None:
    lines = ["task  score  diff", "rte    50.0  -1.5", "mean    7.0"]
    assert str(TABLE).splitlines() == ["Scores", lines[0], "-" * 17, *lines[1:]]
    shown = [line.rstrip() for line in in_terminal(TABLE).splitlines()]
    assert [line for line in shown if not set(line) <= set(" ─")] == ["Scores", *lines]


def test_bold_cells() -> None:
    assert "\x1b[1m  7.0" in in_terminal(TABLE, color=True)
    assert TABLE.markdown().splitlines() == [
        "| task | score | diff |",
        "| --- | ---: | ---: |",
        "| rte | 50.0 | -1.5 |",
        "| mean | **7.0** |  |",
    ]


def test_sections_are_set_apart_in_a_terminal() -> None:
    apart = Table("t", ["name"], [["a"], ["b"]], section_ends=[0])
    assert len(in_terminal(apart).splitlines()) == len(in_terminal(Table("t", ["name"], apart.rows)).splitlines()) + 1


@pytest.mark.parametrize("name", ["[bold]x[/bold]", "[/nope]", "[link=file:///x]y", "50 % :smile:"])
def test_no_cell_is_markup(name: str) -> None:
    shown = in_terminal(Table(name, [name, "n"], [[name, Bold(name)]]))
    assert shown.count(name) == 4


def test_no_cell_breaks_its_line_or_steers_the_terminal() -> None:
    table = Table("a\nb", ["c\x1b[31m"], [["d\r\ne\x07"]])
    for text in (str(table), in_terminal(table), table.markdown()):
        assert not set(text) & set("\x1b\x07\r")
        assert "d  e" in text


def test_no_cell_is_markdown() -> None:
    [_, _, line] = Table("t", ["name"], [["a|b *c* <i> [d](e) f_g _h_ \\"]]).markdown().splitlines()
    assert line == r"| a\|b \*c\* \<i> \[d](e) f_g \_h\_ \\ |"


def test_no_text_is_a_formula_and_numbers_stay_numbers() -> None:
    values = ["=1+1", "+x", "-x", "@SUM(A1)", "\t=1", "a,b", 'say "x"', "-1.5", "+0.3", -2.5, None, 7]
    [line] = csv.reader(io.StringIO(csv_text([values])))
    expected = ["'=1+1", "'+x", "'-x", "'@SUM(A1)", "'\t=1", "a,b", 'say "x"', "-1.5", "+0.3", "-2.5", "", "7"]
    assert line == expected
    assert csv_text([TABLE.columns, *TABLE.rows]) == "task,score,diff\nrte,50.0,-1.5\nmean,7.0,\n"


def test_without_rich(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    TABLE.show()
    assert capsys.readouterr().out == f"{TABLE}\n\n"
