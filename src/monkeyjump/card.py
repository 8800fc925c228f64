"""The model card of an adapter: what it is, and how another machine loads it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from monkeyjump.record import write_atomic
from monkeyjump.tables import Table

if TYPE_CHECKING:
    from monkeyjump.config import MonkeyJumpConfig

MANIFEST = "monkeyjump.json"  # in the folder of a bundled model: what it is, with its id on the hub
LOADING = """
## Loading this adapter

This adapter was made with [monkeyjump](https://pypi.org/project/monkeyjump/). Import it before loading, so that PEFT
knows the method (without it, PEFT stops with `KeyError: 'MONKEYJUMP'`):

```python
import monkeyjump
from peft import PeftModel

{base}model = PeftModel.from_pretrained(base_model, "path/to/this/folder")
```

For a program you cannot edit: `python -m monkeyjump run -- PROGRAM ARGUMENTS`.
"""
TITLE = "# A routed adapter"
EMPTY = "[More Information Needed]"  # in the template that PEFT saves where there is no card


def settings_of(config: MonkeyJumpConfig) -> dict[str, str]:
    """The settings that a reader of a card asks for first."""
    return {
        "adapter": f"{config.adapter}, rank {config.r}, alpha {config.alpha:g}, dropout {config.dropout:g}",
        "adapted modules": listed(config.target_modules),
        "always on": listed(config.shared_modules),
        "routing": f"{config.router} by {config.granularity}, top-k {config.top_k}, "
        f"temperature {config.temperature:g}, placement {config.placement}",
    }


def settings_table(settings: dict[str, str]) -> str:
    return Table("", ["setting", "value"], [[name, value] for name, value in settings.items()], left=2).markdown()


def listed(names: list[str] | str | None) -> str:
    return names if isinstance(names, str) else ", ".join(Path(name).name for name in names or ()) or "none"


def complete_card(folder: Path, config: MonkeyJumpConfig) -> None:
    """Make PEFT's empty template a card of this adapter. What people have written stays, with the lines on loading.

    The card names no folder of this machine, which PEFT takes for the name of the base model.
    """
    path = folder / "README.md"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    if text and EMPTY not in text and TITLE not in text:
        if "import monkeyjump" not in text:
            write_atomic(path, text + LOADING.format(base=""))
        return
    base = published(config.base_model_name_or_path)
    metadata = ["library_name: peft", *([f"base_model: {json.dumps(base)}"] if base else [])]
    metadata += ["pipeline_tag: text-generation"] if config.task_type == "CAUSAL_LM" else []
    parts = [
        "\n".join(["---", *metadata, "tags: [monkeyjump, peft]", "---"]),
        TITLE,
        settings_table({**({"base model": base} if base else {}), **settings_of(config)}),
        LOADING.format(base="").strip() + "\n",
    ]
    write_atomic(path, "\n\n".join(parts))


def published(base: str | None) -> str | None:
    """The name of a base model on any machine, its id on the hub; None for a folder of this machine that says none."""
    folder = Path(base or "").expanduser()
    if not base or not os.path.exists(folder):  # of a name that is too long, this is false
        return base
    try:
        found = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return found["hub_id"] or found["name"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
