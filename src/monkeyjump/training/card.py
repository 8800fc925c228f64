"""The model card of a trained adapter: what it was made of, what it scores, and how another machine loads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from monkeyjump.config import MonkeyJumpConfig
from monkeyjump.evaluation.report import EvaluationReport, percent, span
from monkeyjump.models import published_name
from monkeyjump.tables import Table
from monkeyjump.training.recipe import Recipe
from monkeyjump.tuner.count import ParameterCount

_LOADING = """\
## Loading

PEFT knows the method once `monkeyjump` is imported; without it, PEFT stops with `KeyError: 'MONKEYJUMP'`.

```python
import monkeyjump
from monkeyjump.models import load_model
from peft import PeftModel
base, tokenizer = load_model({base})
model = PeftModel.from_pretrained(base, "path/to/this/folder")
```

For a program that you cannot edit: `monkeyjump run -- PROGRAM ARGUMENTS`.
Scores on tasks: `monkeyjump evaluate path/to/this/folder --tasks NAMES`.
"""


def model_card(
    recipe: Recipe,
    config: MonkeyJumpConfig,
    parameters: ParameterCount,
    report: EvaluationReport | None,
    origin: dict[str, Any],
) -> str:
    """The card in Markdown, with the metadata that model hubs read. It names no folder of this machine."""
    local = Path(recipe.model).expanduser().exists()
    given = Path(recipe.model).name if local else recipe.model
    base = given if local else published_name(recipe.model)
    metadata = ["library_name: peft", *([] if local else [f"base_model: {json.dumps(base)}"])]
    settings = {
        "base model": _base(base, origin["base"]),
        "method": f"{recipe.method} (preset {recipe.preset})",
        "adapter": f"{config.adapter}, rank {config.r}, alpha {config.alpha:g}, dropout {config.dropout:g}",
        "adapted modules": _listed(config.target_modules),
        "always on": _listed(config.shared_modules),
        "routing": f"{config.router} by {config.granularity}, top-k {config.top_k}, "
        f"temperature {config.temperature:g}, placement {config.placement}",
        "parameters": str(parameters),
        "tasks": _listed(recipe.tasks),
        "training": f"learning rate {recipe.train.lr:g}, "
        f"{recipe.train.batch_size} x {recipe.train.accumulation} texts a step, seed {recipe.seed}",
    }
    parts = [
        "\n".join(["---", *metadata, f"tags: [monkeyjump, peft, {recipe.method}]", "---"]),
        f"# {recipe.name}",
        f"An adapter for {base}, trained with [monkeyjump](https://pypi.org/project/monkeyjump/).",
        Table("", ["setting", "value"], [[name, value] for name, value in settings.items()], left=2).markdown(),
        *([] if report is None else ["## Results", f"Test scores x 100: {report.title}.", _results(report)]),
        "## Training data",
        Table("", ["task", "split", "rows", "from", "sha256"], [_source(e) for e in origin["data"]], left=5).markdown(),
        _LOADING.format(base=json.dumps(given)),
    ]
    return "\n\n".join(parts)


def _source(entry: dict[str, Any]) -> list[str]:
    return [*(str(entry[key]) for key in ("task", "split", "rows", "source")), entry.get("sha256", "")[:16]]


def _results(report: EvaluationReport) -> str:
    rows = [
        [row.task, row.metric, str(row.n), percent(row.base), percent(row.adapter), span(row.adapter_interval)]
        for row in report.ordered()
    ]
    return Table("", ["task", "metric", "n", "base model", "adapter", "95 %"], rows, left=2).markdown()


def _base(name: str, origin: dict[str, Any]) -> str:
    revision = f", revision {origin['revision']}" if origin["revision"] else ""
    return f"{name} ({origin['architecture']}, {origin['parameters']:,} parameters{revision})"


def _listed(names: list[str] | str | None) -> str:
    return names if isinstance(names, str) else ", ".join(Path(name).name for name in names or ()) or "none"
