"""A page that shows where the tokens of a prompt go: live (`monkeyjump explore`), or recorded in a report."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from monkeyjump.explorer.engine import recorded
from monkeyjump.pages import json_block, script_hash

__all__ = ["fragment", "recorded", "script_hash"]

FILES = ("index.html", "explorer.css", "explorer.js", "sources.js")


def content(name: str) -> str:
    return resources.files(__name__).joinpath("page", name).read_text(encoding="utf-8")


def fragment(views: Sequence[Mapping[str, Any]]) -> tuple[str, str, str]:
    """HTML, CSS and JavaScript that show recorded views (`explorer.recorded`) inside any page.

    The script has to stand behind the HTML, once for any number of fragments. A page with a content security policy
    allows it by `script_hash`.
    """
    data = json_block(list(views))
    name = f"mj-explorer-{hashlib.sha256(data.encode()).hexdigest()[:12]}"
    html = (
        f'<div class="mj-explorer" data-recorded="{name}"></div>\n'
        f'<script type="application/json" id="{name}">{data}</script>'
    )
    return html, content("explorer.css"), f"(() => {{\n{content('explorer.js')}\n{content('sources.js')}}})();"
