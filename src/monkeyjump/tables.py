"""The one table of the package: for a terminal, as plain text and as Markdown; and values as CSV.

Cells are plain text. A name that a user or a data set chose is never read as rich markup, as Markdown, as a terminal's
control sequence or as a spreadsheet's formula.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any


class Bold(str):
    """A cell that terminals and Markdown show in bold."""

    __slots__ = ()


@dataclass(frozen=True)
class Table:
    """The first `left` columns hold words and are aligned left; the others hold numbers and are aligned right."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 1
    section_ends: Collection[int] = ()  # indices of the rows that a terminal sets apart from the next row

    def show(self) -> None:
        """Print the table and an empty line, through rich where it is installed."""
        try:
            from rich.console import Console
        except ImportError:
            print(f"{self}\n")
            return
        Console(highlight=False).print(self, "")

    def __rich__(self) -> Any:
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        def text(cell: str) -> Text:
            return Text(one_line(cell), style="bold" if isinstance(cell, Bold) else "")

        table = RichTable(title=Text(one_line(self.title), "bold"), title_justify="left", box=box.SIMPLE_HEAD)
        table.show_edge, table.pad_edge, table.padding = False, False, (0, 0, 0, 1)  # columns are two characters apart
        for position, column in enumerate(self.columns):
            table.add_column(text(column), justify="left" if position < self.left else "right", overflow="fold")
        for index, row in enumerate(self.rows):
            table.add_row(*map(text, row), end_section=index in self.section_ends)
        return table

    def __str__(self) -> str:
        lines = [[one_line(cell) for cell in line] for line in (self.columns, *self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        aligned = [
            "  ".join(cell.ljust(w) if i < self.left else cell.rjust(w) for i, (cell, w) in enumerate(pairs)).rstrip()
            for pairs in (zip(line, widths, strict=True) for line in lines)
        ]
        rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
        return "\n".join([one_line(self.title), aligned[0], rule, *aligned[1:]])

    def markdown(self) -> str:
        marks = ["---" if position < self.left else "---:" for position in range(len(self.columns))]
        lines = [map(_markdown, self.columns), marks, *(map(_markdown, row) for row in self.rows)]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def csv_text(lines: Iterable[Iterable[Any]]) -> str:
    """Lines of values as CSV. None is an empty cell."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([_no_formula(value) for value in line] for line in lines)
    return out.getvalue()


def _no_formula(value: Any) -> Any:
    """A text that a spreadsheet would run as a formula gets an apostrophe, which makes it a text there, too."""
    if not isinstance(value, str) or not value.startswith(("=", "+", "-", "@", "\t", "\r", "\n")):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


def one_line(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in text)


def shortened(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"


def _markdown(cell: str) -> str:
    escaped = re.sub(r"[\\|*`\[<]|(?<!\w)_|_(?!\w)", r"\\\g<0>", one_line(cell))
    return f"**{escaped}**" if isinstance(cell, Bold) and escaped.strip() else escaped
