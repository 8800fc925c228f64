"""An evaluation as a table: in a terminal, as plain text, JSON, CSV and one HTML page. All show the same numbers.

Scores are fractions (accuracy, exact match) and correlations; the table and the page show them times 100.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from monkeyjump.evaluation.metrics import Floats, Interval, percentile_interval
from monkeyjump.evaluation.score import Prediction
from monkeyjump.record import jsonable, write_atomic
from monkeyjump.tables import Bold, Table, csv_text

_WIDTH = 80  # of the table; names too long for it are cut there, nowhere else
_SHORT = {"accuracy": "acc", "spearman": "rho", "exact_match": "exact"}
_MEASURES = ("base", "adapter", "difference")


@dataclass(frozen=True)
class ReportRow:
    """One task, the mean of a family, or the mean of all tasks. Intervals are 95 %; what was not measured is None."""

    kind: Literal["task", "family", "overall"]
    task: str
    family: str
    metric: str
    n: int  # examples scored; in a mean, tasks
    mode: str = ""
    base: float | None = None
    adapter: float | None = None
    difference: float | None = None  # adapter - base, on the same examples
    base_interval: Interval | None = None
    adapter_interval: Interval | None = None
    difference_interval: Interval | None = None
    dropped: int = 0  # examples that did not fit even without context: not scored
    truncated: int = 0  # examples whose context was cut

    @property
    def score(self) -> float | None:
        """What was evaluated: the adapter, or the base model where there is none."""
        return self.base if self.adapter is None else self.adapter

    @property
    def interval(self) -> Interval | None:
        return self.base_interval if self.adapter is None else self.adapter_interval

    def with_difference(self, replicates: Mapping[str, Floats]) -> ReportRow:
        if self.base is None or self.adapter is None:
            return self
        interval = percentile_interval(replicates["adapter"] - replicates["base"])
        return replace(self, difference=self.adapter - self.base, difference_interval=interval)


def mean_rows(
    rows: Sequence[ReportRow], replicates: Mapping[str, Mapping[str, Floats]]
) -> tuple[list[ReportRow], ReportRow]:
    """The mean of every family and of all tasks. Every task counts the same, whatever its size.

    A task without a score (NaN) is left out. Intervals redraw the examples within each task; the tasks are given.
    """
    families = {row.family: [other for other in rows if other.family == row.family] for row in rows}
    means = [_mean_row("family", f"{name} mean", name, members, replicates) for name, members in families.items()]
    return means, _mean_row("overall", "overall mean", "", rows, replicates)


def _mean_row(
    kind: Literal["family", "overall"],
    name: str,
    family: str,
    rows: Sequence[ReportRow],
    replicates: Mapping[str, Mapping[str, Floats]],
) -> ReportRow:
    row = ReportRow(kind=kind, task=name, family=family, metric="mean", n=len(rows))
    drawn: dict[str, Floats] = {}
    for side in ("base", "adapter"):
        scores = {r.task: getattr(r, side) for r in rows}
        good = [task for task, score in scores.items() if score is not None and not math.isnan(score)]
        if all(score is None for score in scores.values()):
            continue
        value = sum(scores[task] for task in good) / len(good) if good else math.nan
        stacked = np.stack([replicates[task][side] for task in good]) if good else np.full((1, 1), math.nan)
        drawn[side] = stacked.mean(0)
        changes: dict[str, Any] = {side: value, f"{side}_interval": percentile_interval(drawn[side])}
        row = replace(row, **changes)
    return row.with_difference(drawn)


@dataclass
class EvaluationReport:
    """Per-task rows, family means, the overall mean, and every single prediction (task -> side -> predictions)."""

    rows: list[ReportRow]
    families: list[ReportRow]
    overall: ReportRow
    settings: dict[str, Any] = field(default_factory=dict)
    predictions: dict[str, dict[str, list[Prediction]]] = field(default_factory=dict)

    @property
    def mean(self) -> float:
        """The mean task score of what was evaluated (the adapter, if there is one)."""
        score = self.overall.score
        return math.nan if score is None else score

    def ordered(self) -> list[ReportRow]:
        """Tasks by family, each family's mean after it (where there are several families), the overall mean last."""
        found: list[ReportRow] = []
        for family in self.families:
            found += [row for row in self.rows if row.family == family.family]
            if len(self.families) > 1:
                found.append(family)
        return [*found, self.overall]

    def to_dict(self) -> dict[str, Any]:
        return jsonable(
            {
                "monkeyjump_evaluation": 1,
                "settings": self.settings,
                "rows": [asdict(row) for row in self.rows],
                "families": [asdict(row) for row in self.families],
                "overall": asdict(self.overall),
            }
        )

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    def to_csv(self) -> str:
        plain = ["kind", "task", "family", "metric", "mode", "n"]
        names = [f"{m}{end}" for m in _MEASURES for end in ("", "_low", "_high")]
        lines: list[Any] = [[*plain, *names, "dropped", "truncated"]]
        for row in self.ordered():
            values: list[Any] = [getattr(row, name) for name in plain]
            for measure in _MEASURES:
                interval = getattr(row, f"{measure}_interval")
                values += [getattr(row, measure), *((interval.low, interval.high) if interval else (None, None))]
            lines.append(jsonable([*values, row.dropped, row.truncated]))
        return csv_text(lines)

    def to_html(self) -> str:
        """One self-contained page."""
        from monkeyjump.evaluation.html import page

        return page(self)

    def save(self, stem: str | Path) -> dict[str, Path]:
        """`stem.json`, `.csv`, `.html` and `.predictions.jsonl`; returns their paths."""
        stem = Path(stem)
        lines = [
            json.dumps(jsonable({"task": task, "side": side, **asdict(prediction)}), ensure_ascii=False)
            for task, sides in self.predictions.items()
            for side, found in sides.items()
            for prediction in found
        ]
        texts = {"json": self.to_json(), "csv": self.to_csv(), "html": self.to_html()}
        texts["predictions.jsonl"] = "".join(f"{line}\n" for line in lines)
        return {ending: write_atomic(stem.parent / f"{stem.name}.{ending}", text) for ending, text in texts.items()}

    def table(self) -> Table:
        """The table that fits 80 columns, its means in bold."""
        header, lines = table_cells(self)
        rows = self.ordered()
        shown = [
            line if row.kind == "task" else [Bold(cell) for cell in line] for row, line in zip(rows, lines, strict=True)
        ]
        ends = [index for index, row in enumerate(rows) if row.kind == "family"]
        return Table(self.title, header, shown, left=2, section_ends=ends)

    @property
    def title(self) -> str:
        shown = [str(self.settings[name]) for name in ("model", "split") if self.settings.get(name)]
        mode = self.settings.get("mode")
        return ", ".join([*shown, f"mode {mode}"] if mode else shown) or "evaluation"

    def notes(self) -> list[str]:
        """What the numbers leave out."""
        found = []
        for row in self.rows:
            if row.dropped:
                found.append(f"{row.task}: {row.dropped} examples do not fit max_length and were not scored.")
            if row.truncated:
                found.append(f"{row.task}: the context of {row.truncated} examples was cut to fit max_length.")
            if row.mode == "generate" and self.settings.get("mode") in ("letter", "text"):
                found.append(f"{row.task}: has no options and was scored in mode generate.")
        return found

    def __str__(self) -> str:
        """The table as plain text, for pipes and machines without rich."""
        return "\n".join([str(self.table()), *self.notes()])


def table_cells(report: EvaluationReport) -> tuple[list[str], list[list[str]]]:
    """Header and lines of the 80-column table."""
    rows = report.ordered()
    compared = report.overall.difference is not None
    score = "score" if report.overall.adapter is None else "adapter"
    header = ["task", "metric", "n", *(["base"] if compared else []), score, "95 %"]
    if compared:
        header += ["diff", "95 %"]
    lines = []
    for row in rows:
        cells = [row.task, _SHORT.get(row.metric, row.metric), str(row.n)]
        cells += [percent(row.base)] if compared else []
        cells += [percent(row.score), span(row.interval)]
        if compared:
            cells += [percent(row.difference, signed=True), span(row.difference_interval, signed=True)]
        lines.append(cells)
    others = [max(map(len, column)) + 2 for column in zip(header, *lines, strict=True)][1:]
    for line in lines:
        line[0] = shortened(line[0], max(8, _WIDTH - sum(others)))
    return header, lines


def percent(value: float | None, signed: bool = False) -> str:
    if value is None or math.isnan(value):
        return "-"
    text = f"{100 * value:+.1f}" if signed else f"{100 * value:.1f}"
    return text[1:] if text in ("+0.0", "-0.0") else text


def span(interval: Interval | None, signed: bool = False) -> str:
    if interval is None or math.isnan(interval.low):
        return "-"
    return f"{percent(interval.low, signed)}..{percent(interval.high, signed)}"


def shortened(name: str, width: int) -> str:
    return name if len(name) <= width else f"{name[: width - 1]}…"
