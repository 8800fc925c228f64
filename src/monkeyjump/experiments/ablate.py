"""A study as a table and a picture, from the grid of its runs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from monkeyjump.analysis.inspect import InspectSettings, inspect
from monkeyjump.analysis.style import COLORS, GREY, label, name_ticks, new_figure
from monkeyjump.evaluation.metrics import least_squares, paired_difference
from monkeyjump.experiments.compare import cell_recipe
from monkeyjump.experiments.comparison import Comparison, Wanted
from monkeyjump.experiments.study import PLAIN, Study, combined, expected, variants_of
from monkeyjump.experiments.tables import costs, digest, in_seeds, percent, spread, stem_of
from monkeyjump.record import write_atomic, write_record
from monkeyjump.tables import Table, csv_text
from monkeyjump.tasks import expand


def study_rows(comparison: Comparison) -> list[dict[str, Any]]:
    """For each variant: the mean metric over seeds, its spread, the NLL, differences to the reference, failures."""
    reference, found = comparison.methods[0], []
    points, nlls = comparison.differences(reference), comparison.differences(reference, "mean_nll")
    for variant in comparison.methods:
        values, nll = (
            comparison.values(variant, "mean"),
            [v for v in comparison.measured(variant, "mean_nll") if v is not None],
        )
        found.append(
            {
                "variant": variant,
                "mean": fmean(values),
                "values": values,
                "sd": spread(values),
                "nll": fmean(nll) if nll else None,
                "nlls": nll,
                "difference": asdict(points[variant]) if variant in points else None,
                "nll_difference": asdict(nlls[variant]) if variant in nlls else None,
                **costs(comparison, variant),
                "by_task": {task: fmean(comparison.values(variant, task)) for task in comparison.tasks()},
            }
        )
    return found


def study_table(study: Study, comparison: Comparison) -> Table:
    rows = []
    for row in study_rows(comparison):
        nll = "" if row["nll"] is None else f"{row['nll']:.3f}"
        points, nats = _signed(row["difference"], 100), _signed(row["nll_difference"], 1000)
        failed = str(row["failed"] or "")
        rows.append([row["variant"], f"{row['lr']:g}", percent(row["values"]), points, nll, nats, failed])
    title = f"{study.title} ({in_seeds(len(comparison.seeds))}; differences to {comparison.methods[0]}"
    error = ", ± s.e." if len(comparison.seeds) > 1 else ""
    return Table(f"{title}{error})", ["variant", "lr", "mean", "diff", "NLL", "x 1000", "failed"], rows)


SIDE_BY_SIDE = 12  # variants up to which both panels of a picture stand beside each other
EQUAL = 0.005  # a difference that counts as none: half a point


def verdicts(study: Study, rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """What became of each expectation: `holds`, `does not` or `undecided`, with the difference and its interval.

    Intervals are widened for the number of expectations, so that a verdict is not a matter of how many there are.
    """
    values, found = {row["variant"]: row["values"] for row in rows}, []
    for left, sign, right in filter(None, map(expected, study.expect)):
        difference = paired_difference(values[left], values[right], len(study.expect))
        low, high = difference.interval.low, difference.interval.high
        if sign == ">":
            holds, fails = low > 0, high < 0
        else:
            holds, fails = low > -EQUAL and high < EQUAL, low > EQUAL or high < -EQUAL
        verdict = "holds" if holds else "does not hold" if fails else "undecided"
        interval = f" [{100 * low:+.1f}, {100 * high:+.1f}]" if difference.n > 1 else ""
        found.append((f"{left} {sign} {right}: {100 * difference.mean:+.1f}{interval}", verdict))
    return found


def choice_effects(study: Study, rows: list[dict[str, Any]]) -> Table | None:
    """What each name of a study of combinations adds where it is chosen, by least squares over all variants.

    Every combination tells something of each name in it, so many variants with a seed each say more than any pair.
    """
    if study.choose is None:
        return None
    chosen = combined(study.choose)
    measured = [(chosen[row["variant"]], row) for row in rows if row["variant"] in chosen]
    design = [[name in names for name in study.choose.of] for names, _ in measured]
    lines = [[name] for name in study.choose.of]
    for measure, scale, form in (("values", 100.0, "+z.2f"), ("nlls", 1000.0, "+z.1f")):
        if not all(row[measure] for _, row in measured):
            continue
        found = least_squares(design, [scale * fmean(row[measure]) for _, row in measured])
        if not found:
            return None
        for line, (effect, interval) in zip(lines, found, strict=True):
            line.append(f"{effect:{form}} [{interval.low:{form}}, {interval.high:{form}}]")
    columns = ["chosen", "points", "NLL x 1000"][: len(lines[0])]
    return Table(f"What choosing a name adds (least squares over {len(design)} variants)", columns, lines)


def _signed(difference: dict[str, Any] | None, scale: float) -> str:
    if difference is None:
        return ""
    error = f" ±{scale * difference['standard_error']:.1f}" if difference["n"] > 1 else ""
    return f"{scale * difference['mean']:+.1f}{error}"


def save_study(name: str, study: Study, comparison: Comparison, output: Path) -> list[Path]:
    """The record, the table and the picture, beside those of the same study with other settings."""
    rows = study_rows(comparison)
    metrics = {"study": study.model_dump(), "seeds": comparison.seeds, "rates": comparison.lrs, "rows": rows}
    record = comparison.record("study", name, metrics)
    columns = ["variant", "lr", "mean", "sd", "nll", "failed"]
    columns += ["trainable", "router", "peak_memory_bytes", "steps_per_second"]
    tasks = comparison.tasks()
    lines = [[*columns, *tasks]]
    lines += [[*(row[column] for column in columns), *(row["by_task"][task] for task in tasks)] for row in rows]
    stem = stem_of(output / name, record, ("study", "seeds", "rates"))
    return [
        write_record(record, Path(f"{stem}.json")),
        write_atomic(f"{stem}.csv", csv_text(lines)),
        plot_study(study, rows, Path(f"{stem}.png")),
    ]


def draw_figures(study: Study, comparison: Comparison, output: Path) -> list[Path]:
    """The figures that a study names, of the adapter of its reference; studies of one adapter share its report."""
    if not study.figures:
        return []
    first = comparison.methods[0]
    recipe = cell_recipe(comparison, output, Wanted(first, comparison.best_lr(first), comparison.seeds[0], test=True))
    folder = recipe.folder / "inspection"
    if not (folder / "report.html").is_file():
        settings = InspectSettings(expand(recipe.tasks, recipe.data.bad_media), data=recipe.data.folder)
        inspect([(recipe.folder / "adapter", recipe)], settings, folder)
    return [folder / "report.html", *(path for name in study.figures if (path := folder / f"{name}.png").is_file())]


def plot_study(study: Study, rows: list[dict[str, Any]], path: Path) -> Path:
    """The mean and every seed of each variant, in the order in which the study names them: the metric, and the NLL.

    The reference has a colour of its own, and the constant gate is a line across.
    """
    reference, order = rows[0]["variant"], list(variants_of(study.model_copy(update={"reference": ""})))
    shown = sorted((row for row in rows if row["variant"] != PLAIN), key=lambda row: order.index(row["variant"]))
    control = next((row for row in rows if row["variant"] == PLAIN), None)
    panels = [("values", 100.0, "mean test metric x 100")]
    if all(row["nlls"] for row in rows):
        panels.append(("nlls", 1.0, "NLL of the right option"))
    beside, width = len(shown) <= SIDE_BY_SIDE, min(20.0, max(4.5, 0.42 * len(shown) + 2.2))
    seeds = len(rows[0]["values"])
    size = (width * (len(panels) if beside else 1), 4.0 * (1 if beside else len(panels)))
    figure = new_figure(*size, f"{study.title} ({in_seeds(seeds)})")
    axes = figure.subplots(*((1, len(panels)) if beside else (len(panels), 1)), squeeze=False)
    for axis, (measure, scale, what) in zip(axes.flat, panels, strict=True):
        if control is not None:
            axis.axhline(scale * fmean(control[measure]), color=GREY, linewidth=1, linestyle="--", label=PLAIN)
        dash = "; a dash for each seed" if seeds > 1 else ""
        for color, name in ((COLORS[0], f"mean{dash}" if dash else "variant"), (COLORS[1], "reference")):
            own = {
                n: row[measure] for n, row in enumerate(shown) if (row["variant"] == reference) == (color != COLORS[0])
            }
            if not own:
                continue
            axis.plot(list(own), [scale * fmean(values) for values in own.values()], "o", color=color, label=name)
            if seeds > 1:
                dots = [(place, scale * value) for place, values in own.items() for value in values]
                axis.plot(*zip(*dots, strict=True), "_", color=color, alpha=0.45, markersize=9, zorder=1)
        name_ticks(axis, "x", [row["variant"] for row in shown], most=len(shown), letters=36)
        label(axis, "", study.vary.rpartition(".")[2] if study.values else "variant", what)
        axis.grid(axis="y", alpha=0.3)
    axes.flat[0].legend(fontsize=7, frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=3, borderaxespad=0.2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Description": digest(rows)})
    return path
