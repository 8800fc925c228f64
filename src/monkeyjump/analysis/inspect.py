"""`inspect`: what an adapter routes, as a folder of figures, numbers and one page; two adapters stand side by side."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from monkeyjump.analysis import changed_models as changed
from monkeyjump.analysis import plots
from monkeyjump.analysis.collect import Collection, collect
from monkeyjump.analysis.probes import draw_probes, probe_all
from monkeyjump.analysis.rows import Rows, read_text, routes, rows_of_tasks, rows_of_user
from monkeyjump.analysis.style import Drawing
from monkeyjump.analysis.theory import check_ranks, draw_theory, groups
from monkeyjump.analysis.tokens import centers_by_block, draw_centers, draw_states
from monkeyjump.analysis.usage import ExpertUsage
from monkeyjump.errors import ConfigError, require
from monkeyjump.evaluation.load import TASK_IDS, load_adapter
from monkeyjump.explorer import fragment, recorded
from monkeyjump.pages import document
from monkeyjump.record import write_atomic
from monkeyjump.tables import Table
from monkeyjump.tasks import Task, load_examples
from monkeyjump.tasks.encode import Encoder
from monkeyjump.training.data import encoding
from monkeyjump.training.recipe import Recipe
from monkeyjump.training.shared import dtype_of

SAMPLE = 2_000  # tokens whose states are kept
SHOWN = 6  # prompts whose every token is on the page
PROBED = (3, 120)  # blocks, and rows of each task, that probes look at


@dataclass
class InspectSettings:
    """What is looked at; where a field is None, what the adapter's recipe says."""

    tasks: Sequence[Task] = ()
    text: str | None = None
    image: str | None = None
    data: str | None = None
    rows: int = 32
    base: str | None = None


@dataclass
class Inspected:
    """One adapter with what was seen of it."""

    name: str
    path: Path
    model: Any
    tokenizer: Any
    recipe: Recipe | None
    rows: dict[str, Rows]
    collection: Collection


def inspect(
    adapters: Sequence[tuple[Path, Recipe | None]], settings: InspectSettings, folder: Path
) -> tuple[Path, list[Table]]:
    """Write the report on one adapter or two into a folder. Returns the page and the tables for a terminal."""
    require("matplotlib", "figures need matplotlib", "cli")
    require("sklearn", "t-SNE, probes and clusterings need scikit-learn", "analysis")
    names = [path.name if path.name != "adapter" else f"{path.parent.name}/adapter" for path, _ in adapters]
    drawn: list[list[Drawing]] = []
    tables, usages, views = [], [], list[dict[str, Any]]()
    for name, (path, recipe) in zip(names, adapters, strict=True):
        seen = look(name, path, recipe, settings)
        place = folder if len(adapters) == 1 else folder / f"adapter-{len(drawn) + 1}"
        bar = tqdm(figures(seen), desc=f"drawing {name}", unit="figure")
        drawn.append([drawing.saved(place) for drawing in bar])
        usages.append(seen.collection.usage)
        tables.append(summary(seen))
        views += recorded(seen.model, seen.tokenizer, prompts(seen, settings), name)
        del seen
        gc.collect()
    if len(usages) == 2 and usages[0].blocks == usages[1].blocks and usages[0].experts == usages[1].experts:
        means = ExpertUsage({name: usage.mean() for name, usage in zip(names, usages, strict=True)})
        compared = plots.draw_usage(means, of="adapter")  # adapters in the place of tasks
        compared.name = "comparison"
        drawn[0].insert(0, compared.saved(folder))
    return write_atomic(folder / "report.html", report(names, drawn, tables, views)), tables


def prompts(seen: Inspected, settings: InspectSettings) -> list[str]:
    """What the page shows token by token: the first words of the user, or a row of each task, where there are words."""
    if settings.image:
        return []
    if settings.text:
        return [words for words in read_text(settings.text).splitlines() if words.strip()][:SHOWN]
    form, seed = (seen.recipe.data.answer, seen.recipe.seed) if seen.recipe else ("letter", 0)
    tasks = [task for task in settings.tasks if task.name in seen.rows]
    found = [load_examples(task, "test", settings.data, limit=1, seed=seed) for task in tasks[:SHOWN]]
    return [example.prompt(form) for examples in found for example in examples if not example.media]


def look(name: str, path: Path, recipe: Recipe | None, settings: InspectSettings) -> Inspected:
    """Load an adapter and run the rows through it."""
    device = "cuda" if torch.cuda.is_available() else None
    dtype = None if recipe is None else dtype_of(recipe)
    model, tokenizer = load_adapter(path, base=settings.base, dtype=dtype, device=device)
    if not routes(model):
        raise ConfigError(
            f"{str(path)!r} does not route: none of its blocks chooses among experts. Name an adapter of a method with "
            "a router (monkeyjump methods).",
            title="cannot inspect",
        )
    known = getattr(model, TASK_IDS, None) or {task.name: place for place, task in enumerate(settings.tasks)}
    encoder = Encoder(tokenizer, known, **(encoding(recipe) if recipe else {}))
    if settings.text or settings.image:
        rows = rows_of_user(encoder, settings.text, settings.image, settings.rows)
    else:
        seed = recipe.seed if recipe else 0
        rows = rows_of_tasks(encoder, settings.tasks, settings.rows, settings.data, seed)
    with tqdm(total=sum(map(len, rows.values())), desc=f"reading rows with {name}", unit="row") as bar:
        collection = collect(model, rows, sample=SAMPLE, probed=PROBED, progress=bar.update)
    return Inspected(name, path, model, tokenizer, recipe, rows, collection)


def figures(seen: Inspected) -> Iterator[Drawing]:
    """The figures that this adapter allows, each when its turn comes; the last ones take longest."""
    collection, model = seen.collection, seen.model
    usage = collection.usage
    yield plots.draw_usage(usage, f"Where tokens jump ({seen.name})")
    yield plots.draw_health(usage)
    if len(usage.tasks) > 2:
        yield plots.draw_similarity(usage)
    found = [(block, name, check_ranks(outputs, gates)) for block, name, outputs, gates in groups(model, collection)]
    if found:
        yield draw_theory(found)
    probed = probe_all(collection)
    if probed:
        yield draw_probes(collection, probed)
    yield draw_states(collection, model)
    if all(router.configs[name].uses_centers for router, name in changed.active_routers(model)):
        with changed.before_training(model, seen.tokenizer, seen.recipe, seen.rows) as words:
            first, by_block = changed.centers_of(model), centers_by_block(model)
            before = collect(model, seen.rows).usage
        yield plots.draw_before_after(before, usage, words)
        yield plots.draw_drift(first, changed.centers_of(model), changed.checkpoint_centers(seen.path), words)
        yield draw_centers(collection, model, by_block, words)
    if changed.can_permute(model) and any(seen.rows[task].answered for task in usage.tasks):
        yield changed.draw_permutation(model, seen.rows)


def summary(seen: Inspected) -> Table:
    """A table that fits 80 columns: what each task does to the routing."""
    usage, rows = seen.collection.usage, []
    for task, deviations in zip(usage.tasks, usage.deviations, strict=True):
        block, expert = np.unravel_index(np.nanargmax(np.abs(deviations)), deviations.shape)
        gate = ExpertUsage({task: usage.loads[task]}).mean_gate
        entropy = np.mean(list(usage.gate_entropy[task].values()))
        where = f"{deviations[block, expert]:+.1f} points, {usage.experts[expert]} in {usage.blocks[block]}"
        rows.append([task, str(len(seen.rows[task])), f"{gate:.3f}", f"{entropy:.2f}", where])
    shown = 5 if len(rows) > 1 else 4  # a single task deviates from nothing
    columns = ["task", "rows", "mean gate", "gate bits", "largest deviation"][:shown]
    title = f"{seen.name}: {seen.collection.tokens:,} tokens, {usage.dead} dead experts"
    return Table(title, columns, [row[:shown] for row in rows])


def report(
    names: Sequence[str],
    drawn: Sequence[Sequence[Drawing]],
    tables: Sequence[Table],
    views: Sequence[Mapping[str, Any]],
) -> str:
    """The page: the tables, prompts token by token where there are `views`, then every figure."""
    view, css, script = fragment(views) if views else ("", "", "")
    title = f"Routing of {' and '.join(names)}"
    parts = [f"<h1>{escape(title)}</h1>", *(f"<pre>{escape(str(table))}</pre>" for table in tables), view]
    for name in dict.fromkeys(drawing.name for drawings in drawn for drawing in drawings):
        pairs = [(who, each) for who, drawings in zip(names, drawn, strict=True) for each in drawings]
        parts.append(section({who: each for who, each in pairs if each.name == name}))
    style = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
    return document(title, "\n".join(parts), style + css, [script] if views else [])


def section(drawings: Mapping[str, Drawing]) -> str:
    """One figure of the report; the same figure of several adapters stands side by side, each under its name."""
    first, several = next(iter(drawings.values())), len(drawings) > 1
    shown = "".join(
        f"<figure>{f'<b>{escape(name)}</b>' if several else ''}"
        f'<img alt="{escape(drawing.title)}" src="{drawing.data_uri}">'
        f"{''.join(f'<p>{escape(finding)}</p>' for finding in drawing.findings)}</figure>"
        for name, drawing in drawings.items()
    )
    return (
        f'<section id="{escape(first.name)}"><h2>{escape(first.title)}</h2>\n'
        f'<p class="soft">{escape(first.caption)}</p>\n<div class="{"pair" if several else ""}">{shown}</div></section>'
    )
