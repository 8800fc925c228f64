"""Tables and the console they go to: plain in a pipe, coloured in a terminal, never wider than it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from monkeyjump.errors import ConfigError


def console() -> Any:
    try:
        from rich.console import Console
    except ImportError:
        raise ConfigError(
            'the command line needs rich: pip install "monkeyjump[cli]".', title="missing package"
        ) from None
    return Console(highlight=False, soft_wrap=False)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> Any:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    built = Table(title=Text(title, style="bold"), box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for position, column in enumerate(columns):
        built.add_column(column, justify="right" if position in right else "left", overflow="fold")
    for row in rows:
        built.add_row(*map(Text, row))  # not str, whose square brackets would be markup
    return built
