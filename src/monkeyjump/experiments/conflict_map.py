"""The map of conflict as a table, as files and as a picture."""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from monkeyjump.analysis.style import color_bar, heatmap, label, new_figure
from monkeyjump.experiments.conflict import CERTAIN, CONSTANT, Gain, Map
from monkeyjump.experiments.conflict_tasks import Setting
from monkeyjump.experiments.tables import digest, in_seeds, stem_of
from monkeyjump.record import write_atomic, write_record
from monkeyjump.tables import Bold, Table, csv_text


def map_table(found: Map) -> Table:
    """The best routed method of every place, against the constant gate and against LoRA of its size."""
    gains, rows = found.gains(), []
    for setting in found.settings:
        here = [gain for gain in gains if gain.setting == setting]
        best = max((g for g in here if g.reference == CONSTANT), key=lambda gain: gain.points["mean"])
        other = next(gain for gain in here if gain.method == best.method and gain.reference != CONSTANT)
        said = found.forecasts[setting.data]
        before = [f"{said['agreement_of_known'][0]:+.2f}", f"{said['prompt_bits']:.3f}"]
        reached = f"{100 * found.accuracy(setting, CONSTANT):.1f}"
        rows.append([str(setting), reached, best.method, *(_shown(gain) for gain in (best, other)), *before])
    seeds = in_seeds(len(found.grid.seeds), f", ± s.e.; bold: corrected p < {CERTAIN:g}")
    adds = f"what the best of {len(found.methods)} methods adds" if len(found.methods) > 1 else "what is added"
    columns = ["place", "constant", "best", "over it", "over LoRA", "agreement", "bits"]
    return Table(f"Accuracy of the constant gate, and {adds} ({seeds})", columns, rows)


def _shown(gain: Gain) -> str:
    error = f" ±{100 * gain.points['standard_error']:.1f}" if gain.points["n"] > 1 else ""
    text = f"{100 * gain.points['mean']:+.1f}{error}"
    return Bold(text) if gain.certain else text


def save_map(found: Map, output: Path) -> list[Path]:
    """The record, the numbers and the picture."""
    gains = [asdict(gain) for gain in found.gains()]
    metrics = {"places": [asdict(setting) for setting in found.settings], "methods": found.methods}
    metrics |= {
        "forecasts": found.forecasts,
        "seeds": found.grid.seeds,
        "rates": found.grid.lrs,
        "rows": found.rows(),
        "gains": gains,
    }
    record = found.grid.record("study", "conflict", metrics)
    stem = stem_of(output / "conflict", record, ("places", "methods", "seeds", "rates"))
    columns = ["cue", "conflict", "rules", "rank", "method", "reference"]
    lines: list[list[Any]] = [[*columns, "points", "low", "high", "p", "corrected p", "NLL", "NLL p"]]
    for gain in gains:
        point, numbers = {**gain["setting"], **gain}, gain["points"]
        ends = [100 * numbers["interval"][end] for end in ("low", "high")]
        row = [100 * numbers["mean"], *ends, numbers["p_value"], gain["corrected"]]
        lines.append([*(point[name] for name in columns), *row, gain["nll"]["mean"], gain["nll"]["p_value"]])
    return [
        write_record(record, Path(f"{stem}.json")),
        write_atomic(f"{stem}.csv", csv_text(lines)),
        plot_map(metrics, Path(f"{stem}.png")),
    ]


def plot_map(metrics: dict[str, Any], path: Path) -> Path:
    """A column for each method, a row for each rank and cue: gains over the constant gate, by conflict and rules.

    Below a gain stand half its 95 % interval and the accuracy of the method: where that is guessing, or all there is,
    no gain can be. `metrics` are those of the record.
    """
    gains = {(Setting(**g["setting"]), g["method"]): g for g in metrics["gains"] if g["reference"] == CONSTANT}
    reached = {(*(row[field.name] for field in fields(Setting)), row["method"]): row["mean"] for row in metrics["rows"]}
    methods, lines = metrics["methods"], sorted({(setting.cue, setting.rank) for setting, _ in gains})
    figure = new_figure(1.4 + 1.5 * len(methods), 0.8 + 1.5 * len(lines))
    axes = figure.subplots(len(lines), len(methods), squeeze=False)
    most = max(2.0, *(abs(100 * gain["points"]["mean"]) for gain in gains.values()))
    for row, (cue, rank) in enumerate(lines):
        here = [setting for setting, _ in gains if (setting.cue, setting.rank) == (cue, rank)]
        conflicts = sorted({setting.conflict for setting in here}, reverse=True)
        rules = sorted({setting.rules for setting in here})
        for column, method in enumerate(methods):
            axis = axes[row, column]
            values = [[gains.get((Setting(c, r, rank, cue), method)) for r in rules] for c in conflicts]
            table = [[float("nan") if g is None else 100 * g["points"]["mean"] for g in line] for line in values]
            image = heatmap(axis, table, [f"{c:g}" for c in conflicts], [str(r) for r in rules], (-most, most))
            for y, line in enumerate(values):
                for x, gain in enumerate(line):
                    if gain is not None:
                        accuracy = reached[*(gain["setting"][field.name] for field in fields(Setting)), method]
                        _write_gain(axis, (x, y), gain, accuracy, most)
            side = f"rank {rank}, {cue}\nconflict" if column == 0 else ""
            label(axis, method if row == 0 else "", "rules" if row == len(lines) - 1 else "", side)
    color_bar(figure, axes, image, f"points over the constant gate\n(* corrected p < {CERTAIN:g})")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Description": digest(metrics["rows"])})
    return path


def _write_gain(axis: Any, place: tuple[int, int], gain: dict[str, Any], accuracy: float, most: float) -> None:
    points, certain = gain["points"], gain["corrected"] is not None and gain["corrected"] < CERTAIN
    below = [f"{100 * accuracy:.0f} %"]
    if points["n"] > 1:
        below.insert(0, f"± {100 * (points['interval']['high'] - points['mean']):.0f}")
    style = {"ha": "center", "color": "white" if abs(100 * points["mean"]) > 0.6 * most else "black"}
    axis.text(*place, f"{100 * points['mean']:+.1f}{'*' if certain else ''}", va="bottom", fontsize=7, **style)
    axis.text(place[0], place[1] + 0.08, "\n".join(below), va="top", fontsize=5.5, **style)
