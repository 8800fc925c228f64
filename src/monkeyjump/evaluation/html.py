"""The report as one HTML page: no scripts, no external files, light and dark; a policy in it forbids both."""

from __future__ import annotations

import math
from html import escape
from pathlib import Path

from monkeyjump.evaluation.metrics import Interval
from monkeyjump.evaluation.report import EvaluationReport, ReportRow, percent
from monkeyjump.evaluation.shown import section
from monkeyjump.pages import document, json_block

_READING = (
    "Scores are times 100. Every task counts the same in a mean. Intervals are 95 %: Wilson's for shares, bootstrap "
    "for correlations, means and differences. Majority is the score of the best constant answer, which is the most "
    "frequent right one. Given most often is the answer that a side gave in most rows, with its share in %."
)
_WAYS = {"letter": "likelihood of the letter", "text": "likelihood of the answer text", "generate": "greedy generation"}


def page(report: EvaluationReport) -> str:
    """The whole document. The exact numbers are in it too, as JSON."""
    notes = "".join(f"<p>{escape(note)}</p>" for note in [_READING, *report.notes()])
    body = (
        f'<h1>Evaluation</h1>\n<p class="about">{escape(_about(report))}</p>\n{_cards(report)}\n'
        f'<div class="panel">\n{_table(report)}\n</div>\n{_legend(report)}\n<div class="notes">{notes}</div>\n'
        f"{section(report.shown)}"
        f'<script type="application/json" id="evaluation">{json_block(report.to_dict())}</script>'
    )
    css = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
    return document(f"Evaluation: {report.title}", body, css)


def _about(report: EvaluationReport) -> str:
    settings = report.settings
    parts = [str(settings.get("model") or "model"), f"{settings.get('split', 'test')} split"]
    if settings.get("mode"):
        parts.append(_WAYS.get(settings["mode"], str(settings["mode"])))
    if settings.get("limit"):
        parts.append(f"at most {settings['limit']} examples a task")
    return " · ".join([*parts, f"{len(report.rows)} task{'s' if len(report.rows) != 1 else ''}"])


def _cards(report: EvaluationReport) -> str:
    row = report.overall
    numbers = (
        (row.base, f"base, mean of tasks, {_range(row.base_interval)}", ""),
        (row.adapter, f"adapter, mean of tasks, {_range(row.adapter_interval)}", ""),
        (row.difference, f"difference, {_range(row.difference_interval, signed=True)}", _tone(row)),
        (row.majority, "majority, mean of tasks: the best constant answers", ""),
    )
    cards = (
        f'<div class="card"><b class="{tone}">{_number(value, signed=value is row.difference)}</b>'
        f"<span>{label}</span></div>"
        for value, label, tone in numbers
        if value is not None
    )
    return f'<div class="cards">{"".join(cards)}</div>'


def _table(report: EvaluationReport) -> str:
    compared = report.overall.difference is not None
    columns = ["n", *(["base", "adapter", "difference"] if compared else ["score"]), "majority"]
    head = "".join(f"<th>{name}</th>" for name in columns)
    # bars go from 0 to 1, and further left where a correlation is below zero
    intervals = [interval for row in report.ordered() for interval in (row.base_interval, row.adapter_interval)]
    lows = [interval.low for interval in intervals if interval is not None and not math.isnan(interval.low)]
    low = math.floor(min([0.0, *lows]) * 5) / 5
    lines, family = [], None
    for row in report.ordered():
        if len(report.families) > 1 and row.kind == "task" and row.family != family:
            family = row.family
            lines.append(f'<tr class="family"><td colspan="{len(columns) + 3}">{escape(family)}</td></tr>')
        lines.append(_line(row, compared, low))
    return (
        f'<table>\n<thead><tr><th class="l">task</th>{head}<th class="l">given most often</th>'
        f'<th class="l plot">{_axis(low)}</th></tr></thead>\n<tbody>\n' + "\n".join(lines) + "\n</tbody>\n</table>"
    )


def _line(row: ReportRow, compared: bool, low: float) -> str:
    count = str(row.n) if row.kind == "task" else f"{row.n} tasks"
    metric = row.metric.replace("_", " ") if row.kind == "task" else ""
    cells = [f'<td class="l">{escape(row.task)}<span class="range">{escape(metric)}</span></td><td>{count}</td>']
    if compared:
        cells.append(_cell(row.base, row.base_interval))
    cells.append(_cell(row.score, row.interval))
    if compared:
        cells.append(_cell(row.difference, row.difference_interval, signed=True, tone=_tone(row)))
    majority = "" if row.majority is None else _number(row.majority)
    sides = (("base", row.base_top, row.base_top_answer), ("adapter", row.adapter_top, row.adapter_top_answer))
    given = "".join(
        _answer(answer, f'<i style="background:var(--{name})"></i><b>{_number(share)}</b> % ')
        for name, share, answer in sides
    )
    cells.append(f'<td class="majority">{majority}{_answer(row.majority_answer)}</td>')
    cells.append(f'<td class="l">{given}</td><td class="l plot">{_bars(row, low)}</td>')
    return f'<tr class="{"" if row.kind == "task" else "mean"}">{"".join(cells)}</tr>'


def _cell(value: float | None, interval: Interval | None, signed: bool = False, tone: str = "") -> str:
    return f'<td class="{tone}">{_number(value, signed)}<span class="range">{_range(interval, signed)}</span></td>'


def _answer(answer: str | None, before: str = "") -> str:
    """An answer on a line of its own; what is too long for the column is cut by the page and shown when pointed at."""
    if answer is None:
        return ""
    return f'<span class="range answer" title="{escape(answer)}">{before}{escape(answer) or "(empty)"}</span>'


def _tone(row: ReportRow) -> str:
    """Colour only where the interval excludes zero."""
    interval = row.difference_interval
    if interval is None or math.isnan(interval.low) or interval.low <= 0 <= interval.high:
        return ""
    return "up" if interval.low > 0 else "down"


def _number(value: float | None, signed: bool = False) -> str:
    return percent(value, signed).replace("-", "\u2212") if value is not None and not math.isnan(value) else "\u2013"


def _range(interval: Interval | None, signed: bool = False) -> str:
    if interval is None or math.isnan(interval.low):
        return "no interval"
    return f"{_number(interval.low, signed)} to {_number(interval.high, signed)}"


# -- bars ---------------------------------------------------------------------------------------


def _place(value: float, low: float) -> str:
    """Percent of the way from `low` to 1."""
    return f"{100 * (min(max(value, low), 1.0) - low) / (1.0 - low):.2f}"


def _axis(low: float) -> str:
    anchors = {low: "start", 1.0: "end"}
    texts = "".join(
        f'<text x="{_place(tick, low)}%" y="12" text-anchor="{anchors.get(tick, "middle")}" font-size="11" '
        f'fill="var(--soft)">{_number(tick).removesuffix(".0")}</text>'
        for tick in (-1.0, -0.5, 0.0, 0.25, 0.5, 0.75, 1.0)
        if tick >= low
    )
    return f'<svg role="presentation" style="height:16px">{texts}</svg>'


def _bars(row: ReportRow, low: float) -> str:
    both = (("base", row.base, row.base_interval), ("adapter", row.adapter, row.adapter_interval))
    sides = [(name, value, interval) for name, value, interval in both if value is not None and not math.isnan(value)]
    height, top = (9, 2) if len(sides) > 1 else (12, 7)
    parts = ['<rect x="0" y="0" width="100%" height="26" rx="4" fill="var(--track)"/>']
    for number, (name, value, interval) in enumerate(sides):
        y = top + number * (height + 4)
        left, right = sorted((float(_place(0.0, low)), float(_place(value, low))))
        parts.append(
            f'<rect x="{left:.2f}%" y="{y}" width="{right - left:.2f}%" height="{height}" rx="2" fill="var(--{name})"/>'
        )
        if interval is not None and not math.isnan(interval.low):
            a, b, middle = _place(interval.low, low), _place(interval.high, low), y + height / 2
            for x1, x2, half in ((a, b, 0), (a, a, 3), (b, b, 3)):  # the line and its two ends
                ys = f'y1="{middle - half}" y2="{middle + half}"'
                parts.append(f'<line x1="{x1}%" x2="{x2}%" {ys} stroke="var(--whisker)"/>')
    labels = [f"{name} {_number(value)} ({_range(interval)})" for name, value, interval in sides]
    if row.majority is not None:
        x = _place(row.majority, low)
        line = f'<line x1="{x}%" x2="{x}%" y1="0" y2="26" stroke="var(--majority)"'
        parts.append(f'{line} stroke-width="2" stroke-dasharray="3 2"/>')
        labels.append(f"majority {_number(row.majority)}")
    label = ", ".join(labels)
    return f'<svg role="img" aria-label="{escape(label)}"><title>{escape(label)}</title>{"".join(parts)}</svg>'


def _legend(report: EvaluationReport) -> str:
    shown = [name for name in ("base", "adapter") if getattr(report.overall, name) is not None]
    items = "".join(f'<span><i style="background:var(--{name})"></i>{name}</span>' for name in shown)
    known = any(row.majority is not None for row in report.rows)
    dashed = '<span><i class="dashed"></i>dashed line: majority</span>' if known else ""
    return f'<div class="legend">{items}<span>thin line: 95 % interval</span>{dashed}</div>'
