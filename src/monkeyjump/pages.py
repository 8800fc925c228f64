"""HTML files that stand by themselves: what the reports of an evaluation and of an inspection have in common."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from html import escape
from typing import Any


def document(title: str, body: str, css: str = "", scripts: Sequence[str] = ()) -> str:
    """One file under a policy that lets in nothing from outside.

    `body` is HTML that the caller has escaped. The policy names the hash of each of the `scripts`: no other one runs.
    """
    allowed = "".join(f" {script_hash(script)}" for script in scripts)
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    policy += f"; script-src{allowed}" if scripts else ""
    inline = "".join(f"<script>{script}</script>\n" for script in scripts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{css}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n{inline}</body>\n</html>\n"
    )


def json_block(content: Any) -> str:
    """Data for a block of JSON inside a page; "<" is the only character that could end the block early."""
    return json.dumps(content, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")


def script_hash(script: str) -> str:
    """The source by which a policy allows exactly this script: `script-src 'sha256-...'`."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
