"""A page that shows where the tokens of a prompt go: live (`monkeyjump explore`), or recorded in a report."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from monkeyjump.explorer.engine import recorded

__all__ = ["fragment", "recorded", "script_hash"]

FILES = ("index.html", "explorer.css", "explorer.js", "sources.js")


def content(name: str) -> str:
    return resources.files(__name__).joinpath("page", name).read_text(encoding="utf-8")


def fragment(views: Sequence[Mapping[str, Any]]) -> tuple[str, str, str]:
    """HTML, CSS and JavaScript that show recorded views (`explorer.recorded`) inside any page.

    The script has to stand behind the HTML, once for any number of fragments. A page with a content security policy
    allows it by `script_hash`.
    """
    # "<" is the only character that could end the block early
    data = json.dumps(list(views), ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    name = f"mj-explorer-{hashlib.sha256(data.encode()).hexdigest()[:12]}"
    html = (
        f'<div class="mj-explorer" data-recorded="{name}"></div>\n'
        f'<script type="application/json" id="{name}">{data}</script>'
    )
    return html, content("explorer.css"), f"(() => {{\n{content('explorer.js')}\n{content('sources.js')}}})();"


def script_hash(script: str) -> str:
    """The source by which a policy allows exactly this script: `script-src 'sha256-...'`."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
