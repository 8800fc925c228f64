"""An evaluation as a table: in a terminal, as plain text, JSON, CSV and one HTML page. All show the same numbers.

Scores are fractions (accuracy, exact match) and correlations; the table and the page show them times 100.
"""

from __future__ import annotations

import json
import math
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from monkeyjump.evaluation.metrics import Floats, Interval, percentile_interval
from monkeyjump.evaluation.score import NO_ANSWER, Prediction
from monkeyjump.evaluation.shown import ShownAnswer
from monkeyjump.record import jsonable, write_atomic
from monkeyjump.tables import Bold, Table, csv_text, one_line, shortened

_WIDTH = 80  # of the table; names too long for it are cut there, nowhere else
# said after a task's name; accuracy is said once, in the title
_SHORT = {"spearman": "rho", "exact_match": "exact", "relaxed_accuracy": "relaxed", "vqa_accuracy": "VQA"}
_MEASURES = ("base", "adapter", "difference")
_ANSWERS = ("majority", "base_top", "adapter_top")  # shares; the answers are in fields of these names + "_answer"
_SIDES = {"base": "the base model", "adapter": "the adapter"}
_LEGEND = "major: score of the best constant answer; top: % of the answer given most often"
_CONSTANT, _CONSTANT_ROWS = 0.9, 10  # a side that gives one answer in this share of at least so many rows is named


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
    unreadable: int = 0  # examples whose pictures or clips cannot be used: not scored
    majority: float | None = None  # share of the most frequent right answer; in a mean, the mean of the tasks' shares
    majority_answer: str | None = None
    base_top: float | None = None  # share of the answer that the base model gave most often
    base_top_answer: str | None = None
    adapter_top: float | None = None
    adapter_top_answer: str | None = None
    base_nll: float | None = None  # of the right option among the options, in nats: the mean over rows that have both
    adapter_nll: float | None = None

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
    means = [
        _mean_row("family", f"{name} mean", name, [row for row in rows if row.family == name], replicates)
        for name in dict.fromkeys(row.family for row in rows)
    ]
    return means, _mean_row("overall", "overall mean", "", rows, replicates)


def _mean_row(
    kind: Literal["family", "overall"],
    name: str,
    family: str,
    rows: Sequence[ReportRow],
    replicates: Mapping[str, Mapping[str, Floats]],
) -> ReportRow:
    shares = [r.majority for r in rows if r.n]
    majority = None if not shares or None in shares else sum(share or 0.0 for share in shares) / len(shares)
    found: dict[str, Any] = {"majority": majority}
    drawn: dict[str, Floats] = {}
    for side in ("base", "adapter"):
        scores = {r.task: getattr(r, side) for r in rows}
        if all(score is None for score in scores.values()):
            continue
        good = [task for task, score in scores.items() if score is not None and not math.isnan(score)]
        drawn[side] = np.mean([replicates[task][side] for task in good], 0) if good else np.full(1, math.nan)
        nlls = [nll for r in rows if (nll := getattr(r, f"{side}_nll")) is not None]
        found |= {
            side: sum(scores[task] for task in good) / len(good) if good else math.nan,
            f"{side}_interval": percentile_interval(drawn[side]),
            f"{side}_nll": sum(nlls) / len(nlls) if nlls else None,
        }
    return ReportRow(kind, name, family, "mean", len(rows), **found).with_difference(drawn)


@dataclass
class EvaluationReport:
    """Per-task rows, family means, the overall mean, and every single prediction (task -> side -> predictions)."""

    rows: list[ReportRow]
    families: list[ReportRow]
    overall: ReportRow
    settings: dict[str, Any] = field(default_factory=dict)
    predictions: dict[str, dict[str, list[Prediction]]] = field(default_factory=dict)
    shown: dict[str, list[ShownAnswer]] = field(default_factory=dict)  # by task, of those with pictures: for the page

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
                "rows": self.rows,
                "families": self.families,
                "overall": self.overall,
            }
        )

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    def to_csv(self) -> str:
        plain = ["kind", "task", "family", "metric", "mode", "n"]
        names = [f"{m}{end}" for m in _MEASURES for end in ("", "_low", "_high")]
        last = [*(f"{name}{end}" for name in _ANSWERS for end in ("", "_answer")), "base_nll", "adapter_nll"]
        last += ["dropped", "truncated", "unreadable"]
        columns = [*plain, *names, *last]
        return csv_text([columns, *(jsonable([_value(row, name) for name in columns]) for row in self.ordered())])

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
        rows, compared = self.ordered(), self.overall.difference is not None
        header = ["task", "n", *(["base"] if compared else []), "score" if self.overall.adapter is None else "adapter"]
        header += ["95 %", *(["diff", "95 %"] if compared else []), "major", "top"]
        lines = []
        for row in rows:
            cells = [str(row.n), *([percent(row.base)] if compared else []), percent(row.score), span(row.interval)]
            if compared:
                cells += [percent(row.difference, signed=True), span(row.difference_interval, signed=True)]
            tops = [f"{100 * share:.0f}" for share in (row.base_top, row.adapter_top) if share is not None]
            lines.append([*cells, "" if row.majority is None else percent(row.majority), "/".join(tops)])
        room = max(8, _WIDTH - sum(max(map(len, column)) + 2 for column in zip(header[1:], *lines, strict=True)))
        for row, line in zip(rows, lines, strict=True):
            metric = f" ({_SHORT[row.metric]})" if row.metric in _SHORT else ""
            line.insert(0, shortened(row.task, room - len(metric)) + metric)
            line[:] = line if row.kind == "task" else map(Bold, line)
        ends = [index for index, row in enumerate(rows) if row.kind == "family"]
        score = "accuracy" if any(row.metric == "accuracy" for row in self.rows) else "score"
        return Table(f"{self.title}, {score} x 100", header, lines, section_ends=ends)

    @property
    def title(self) -> str:
        shown = [str(self.settings[name]) for name in ("model", "split") if self.settings.get(name)]
        mode = self.settings.get("mode")
        return ", ".join([*shown, f"mode {mode}"] if mode else shown) or "evaluation"

    def notes(self) -> list[str]:
        """What the numbers leave out, in sentences."""
        dropped = [f"{row.task} {row.dropped} of {row.n + row.dropped}" for row in self.rows if row.dropped]
        truncated = [f"{row.task} {row.truncated} of {row.n}" for row in self.rows if row.truncated]
        unreadable = [f"{row.task} {row.unreadable}" for row in self.rows if row.unreadable]
        generated = [row.task for row in self.rows if row.mode == "generate" != self.settings.get("mode", "generate")]
        sentences = {
            "These rows do not fit max_length and were not scored": dropped,
            "These rows were not scored because their pictures or clips cannot be used": unreadable,
            "These rows lost a part of their context to fit max_length": truncated,
            "These tasks have rows without options and were scored in mode generate": generated,
        }
        listed = [f"{sentence}: {', '.join(tasks)}." for sentence, tasks in sentences.items() if tasks]
        return [*listed, *(note for row in self.rows for note in _constant_sides(row))]

    def show(self) -> None:
        """Print the table, and below it what its columns mean and what it leaves out."""
        self.table().show()
        print(f"{self._below(shutil.get_terminal_size().columns)}\n")

    def __str__(self) -> str:
        """The table and its notes as plain text, for pipes and machines without rich."""
        return f"{self.table()}\n{self._below(_WIDTH)}"

    def _below(self, width: int) -> str:
        return "\n".join(textwrap.fill(one_line(note), width) for note in (_LEGEND, *self.notes()))


def _value(row: ReportRow, column: str) -> Any:
    """What a row has in a column of the CSV file; `base_low` is the lower end of `base_interval`."""
    measure, _, end = column.rpartition("_")
    if end in ("low", "high"):
        return getattr(getattr(row, f"{measure}_interval"), end, None)
    return getattr(row, column)


def _constant_sides(row: ReportRow) -> list[str]:
    """A sentence for each side that nearly always gives one answer, where the right answers are not so."""
    if row.n < _CONSTANT_ROWS or (row.majority or 0.0) >= _CONSTANT:
        return []
    found = []
    for side, words in _SIDES.items():
        share, answer = getattr(row, f"{side}_top"), getattr(row, f"{side}_top_answer")
        if share is not None and share >= _CONSTANT:
            said = "gave no valid answer" if answer == NO_ANSWER else f"answered {shortened(answer, 40)!r}"
            found.append(f"{row.task}: {words} {said} in {round(share * row.n)} of {row.n} rows.")
    return found


def percent(value: float | None, signed: bool = False) -> str:
    if value is None or math.isnan(value):
        return "-"
    text = f"{100 * value:+.1f}" if signed else f"{100 * value:.1f}"
    return text[1:] if text in ("+0.0", "-0.0") else text


def span(interval: Interval | None, signed: bool = False) -> str:
    """An interval in whole numbers. A signed bound keeps its sign at 0, so that the reader sees whether 0 is inside."""
    if interval is None or math.isnan(interval.low):
        return "-"
    form = "+.0f" if signed else "z.0f"  # z: no minus before 0
    return "..".join(format(100 * bound, form) if bound else "0" for bound in (interval.low, interval.high))
