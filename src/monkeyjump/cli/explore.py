"""`monkeyjump explore`: a page on this machine that shows where the tokens of a prompt go."""

from __future__ import annotations

import argparse

from monkeyjump.errors import require


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("adapter", help="folder of a saved adapter")
    parser.add_argument("other", nargs="?", metavar="adapter2", help="another one of the same base model, to compare")
    parser.add_argument("--port", type=int, default=8765, help="default: 8765; 0 takes any that is free")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine alone)")
    parser.add_argument("--token", help="what requests have to know (default: none here, a new one with --host)")
    parser.add_argument("--base", metavar="MODEL", help="base model, where the adapter does not say")


def run(options: argparse.Namespace) -> int:
    for package in ("starlette", "uvicorn"):
        require(package, f"this page needs {package}", "explore")

    from monkeyjump.explorer.engine import load
    from monkeyjump.explorer.server import serve
    from monkeyjump.serving.http import bound, check_token

    check_token("--token", options.token)
    with bound(options.host, options.port) as listening:
        paths = [path for path in (options.adapter, options.other) if path is not None]
        serve(load(paths, options.base), listening, options.host, options.token)
    return 0
