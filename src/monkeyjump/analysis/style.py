"""The one plot style of the package: colours that colour-blind readers tell apart, labels that fit, files of a figure.

A figure is drawn without pyplot's global state, so that drawing leaves nothing behind in the process that asks for it.
"""

from __future__ import annotations

import base64
import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from monkeyjump.errors import require
from monkeyjump.record import jsonable, write_atomic
from monkeyjump.tables import csv_text, shortened

# Okabe and Ito's colours, the darkest ones first; the yellow is left out because it is invisible on white.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F")
SEQUENTIAL, DIVERGING = "viridis", "PuOr"
GREY = "#8a8a8a"
PANEL_LIMIT = 8  # panels side by side; more go into further rows


@dataclass
class Drawing:
    """One figure of a report, with the numbers behind it. `captions.toml` has its title and how to read it."""

    name: str  # of its files
    figure: Any
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    findings: list[str] = field(default_factory=list)  # what these numbers say, one sentence each
    data: dict[str, Any] = field(default_factory=dict)
    words: dict[str, Any] = field(default_factory=dict)  # that the caption leaves open
    data_uri: str = ""  # the picture as it is embedded in a page, once it is saved

    @property
    def title(self) -> str:
        return _captions()[self.name]["title"]

    @property
    def caption(self) -> str:
        return _captions()[self.name]["caption"].format(**self.words)

    def saved(self, folder: Path) -> Drawing:
        """Write PNG, SVG, CSV and JSON under the figure's name; returns the figure itself."""
        folder.mkdir(parents=True, exist_ok=True)
        stem = folder / self.name
        content = {"title": self.title, "caption": self.caption, "findings": self.findings, **self.data}
        for ending in ("png", "svg"):
            self.figure.savefig(f"{stem}.{ending}", dpi=150)
        self.data_uri = f"data:image/png;base64,{base64.b64encode(Path(f'{stem}.png').read_bytes()).decode()}"
        write_atomic(f"{stem}.csv", csv_text([self.columns, *self.rows]))
        write_atomic(f"{stem}.json", json.dumps(jsonable(content), indent=1, ensure_ascii=False) + "\n")
        return self


@cache
def _captions() -> dict[str, dict[str, str]]:
    return tomllib.loads((Path(__file__).parent / "captions.toml").read_text(encoding="utf-8"))


def new_figure(width: float, height: float, title: str = "") -> Any:
    """An empty figure in inches, whose parts are placed so that no label is cut off."""
    require("matplotlib", "pictures need matplotlib", "cli")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    if title:
        figure.suptitle(title, fontsize=11, parse_math=False)  # a name may hold dollar signs
    return figure


def grid(panels: int, width: float, height: float, title: str = "", most: int = PANEL_LIMIT) -> tuple[Any, list[Any]]:
    """A figure with so many panels of a size in inches, in rows that are as full as possible; the rest stays empty."""
    columns = panels if panels <= most else min(range(most, most // 2, -1), key=lambda count: -panels % count)
    rows = -(-panels // columns)
    figure = new_figure(max(columns * width, 4.5), rows * height + 0.5, title)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis in axes[panels:]:
        axis.axis("off")
    return figure, axes[:panels]


def label(axis: Any, title: str = "", x: str = "", y: str = "", legend: bool = False) -> None:
    """Titles and labels in the sizes of the package."""
    axis.set_title(title, fontsize=9, parse_math=False)
    axis.set_xlabel(x, fontsize=8)
    axis.set_ylabel(y, fontsize=8)
    axis.tick_params(labelsize=7)
    if legend:
        for text in axis.legend(fontsize=7, frameon=False).get_texts():
            text.set_parse_math(False)


def name_ticks(axis: Any, which: str, names: Sequence[str], most: int = 12, letters: int = 24) -> None:
    """Name the places 0, 1, ... of an axis; of many names every second, third, ... is written, in so many letters."""
    step = -(-len(names) // most)
    places = list(range(0, len(names), step))
    shown = [shortened(names[place].removesuffix("_proj").removeprefix("expert "), letters) for place in places]
    rotation = 90 if which == "x" and max(map(len, shown)) > 4 and len(shown) > 2 else 0
    texts = (axis.set_xticks if which == "x" else axis.set_yticks)(places, shown, fontsize=7, rotation=rotation)
    for tick in texts:
        for text in (tick.label1, tick.label2):
            text.set_parse_math(False)


def few_ticks(axis: Any, which: str, whole: bool = False) -> None:
    """Four numbers at most, so that long ones do not run into each other."""
    from matplotlib.ticker import MaxNLocator

    getattr(axis, f"{which}axis").set_major_locator(MaxNLocator(3, integer=whole))


def heatmap(axis: Any, values: Any, rows: Sequence[str], columns: Sequence[str], limits: tuple[float, float]) -> Any:
    """Values [rows, columns] as colours; limits around zero are shown as deviations."""
    colors = DIVERGING if limits[0] < 0 else SEQUENTIAL
    image = axis.imshow(np.asarray(values), aspect="auto", vmin=limits[0], vmax=limits[1], cmap=colors)
    name_ticks(axis, "x", columns)
    name_ticks(axis, "y", rows)
    return image


def color_bar(figure: Any, axes: Any, image: Any, words: str) -> None:
    length = min(0.8, 3.5 / figure.get_figheight())  # a bar beside many rows of panels is not longer than 3.5 inches
    bar = figure.colorbar(image, ax=axes, shrink=length, aspect=25, pad=0.01)
    bar.set_label(words, fontsize=8)
    bar.ax.tick_params(labelsize=7)


def expert_colors(experts: Sequence[str]) -> dict[str, str]:
    return {name: COLORS[place % len(COLORS)] for place, name in enumerate(experts)}
