"""A page that stands by itself: one HTML file under a policy that lets in nothing from outside.

`document` is the one place that writes the policy. Scripts are given to it as text, and the policy then names the hash
of each, so that no other script runs.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from html import escape

from monkeyjump.analysis.style import Drawing

STYLE = """
:root { color-scheme: light; }
body { margin: 0; padding: 2rem 1.25rem 4rem; background: #f6f7f9; color: #1b2330;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 84rem; margin: 0 auto; }
h1 { font-size: 1.45rem; margin: 0 0 .25rem; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .3rem; }
p { max-width: 60rem; margin: .3rem 0; overflow-wrap: anywhere; } .soft { color: #5d6878; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(26rem, 100%), 1fr)); gap: 1rem; }
figure { margin: .6rem 0; padding: .8rem; background: #fff; border: 1px solid #e3e7ed; border-radius: 10px; }
img { max-width: 100%; height: auto; display: block; margin: 0 auto; }
pre { overflow-x: auto; font-size: .85rem; }
"""


def document(title: str, body: str, css: str = "", scripts: Sequence[str] = ()) -> str:
    """A whole page. `body` is HTML that the caller has escaped; `scripts` are the only ones that will run."""
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = "".join(f" 'sha256-{digest}'" for digest in hashes)
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    policy += f"; script-src{allowed}" if scripts else ""
    inline = "".join(f"<script>{script}</script>\n" for script in scripts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}{css}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n{inline}</body>\n</html>\n"
    )


def section(drawings: Mapping[str, Drawing]) -> str:
    """One figure of the report; the same figure of several adapters stands side by side, each under its name."""
    first, several = next(iter(drawings.values())), len(drawings) > 1
    shown = "".join(
        f"<figure>{f'<b>{escape(name)}</b>' if several else ''}"
        f'<img alt="{escape(drawing.title)}" src="{drawing.data_uri()}">'
        f"{''.join(f'<p>{escape(finding)}</p>' for finding in drawing.findings)}</figure>"
        for name, drawing in drawings.items()
    )
    return (
        f'<section id="{escape(first.name)}"><h2>{escape(first.title)}</h2>\n'
        f'<p class="soft">{escape(first.caption)}</p>\n<div class="{"pair" if several else ""}">{shown}</div></section>'
    )
