"""`monkeyjump serve`: adapters behind the HTTP interface that OpenAI's clients speak."""

from __future__ import annotations

import argparse
import os

from monkeyjump.errors import ConfigError, require


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("adapters", nargs="+", metavar="adapter", help="folders of saved adapters of one base model")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine alone)")
    parser.add_argument("--port", type=int, default=8000, help="default: 8000; 0 takes any that is free")
    parser.add_argument("--api-key", metavar="KEY", help="what requests have to know (default: $MONKEYJUMP_API_KEY)")
    parser.add_argument(
        "--max-prompt", type=int, metavar="N", help="tokens of a prompt (default: what the model reads)"
    )
    parser.add_argument("--max-tokens", type=int, default=1024, metavar="N", help="of an answer (default: 1024)")
    parser.add_argument("--concurrent", type=int, default=64, metavar="N", help="requests at once (default: 64)")
    parser.add_argument(
        "--continuous-batching", action="store_true", help="one token-routed adapter, its requests in one batch"
    )
    parser.add_argument("--base", metavar="MODEL", help="base model, where the adapters do not say")


def run(options: argparse.Namespace) -> int:
    for package in ("starlette", "uvicorn", "fastapi", "openai"):
        require(package, f"the server needs {package}", "serve")

    from monkeyjump.serving.answers import load
    from monkeyjump.serving.completions import Limits
    from monkeyjump.serving.http import bound, check_token
    from monkeyjump.serving.server import Api, check_key, serve

    key = options.api_key or os.environ.get("MONKEYJUMP_API_KEY") or None
    check_token("--api-key", key)
    check_key(options.host, key)
    limits = Limits(options.max_prompt, options.max_tokens, options.concurrent)
    if options.continuous_batching and len(options.adapters) > 1:
        raise ConfigError(
            f"--continuous-batching serves one adapter, not {len(options.adapters)}: start a server for each.",
            title="adapters cannot be served",
        )
    with bound(options.host, options.port) as listening:
        answerer = load(options.adapters, options.base)
        together = answerer.names[0] if options.continuous_batching else None
        serve(Api(answerer, limits, together), listening, options.host, key)
    return 0
