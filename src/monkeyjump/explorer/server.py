"""The explorer's server: four files, and four questions that the page asks in JSON."""

from __future__ import annotations

import hashlib
import json
import mimetypes
import secrets
import socket
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import uvicorn
from pydantic import Field
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from monkeyjump.checked import Section, validated
from monkeyjump.errors import ConfigError
from monkeyjump.explorer import FILES, content
from monkeyjump.explorer.engine import Explorer, Prompt, Side
from monkeyjump.serving.http import Guard, address, body_of, is_loopback, json_of

PICTURE_BYTES = 10 * 1024 * 1024
KEPT_PICTURES = 4
MOST_NEW_TOKENS = 1024
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src blob: data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Asked(Section):
    """What the page sends when it asks for a view, or for what comes after a prompt."""

    prompt: str
    adapter: str
    task: str | None = None
    off: dict[str, list[str]] = Field({})
    picture: str | None = None
    most: int = Field(64, ge=1, le=MOST_NEW_TOKENS)
    temperature: float = Field(0.0, ge=0, le=10)
    seed: int = Field(0, ge=0, le=2**31)


class Questions:
    """What the page can ask. A picture is sent once and then named by its hash."""

    def __init__(self, explorer: Explorer) -> None:
        self.explorer = explorer
        self.pictures: OrderedDict[str, bytes] = OrderedDict()

    async def file(self, request: Request) -> Response:
        name = request.url.path.lstrip("/") or "index.html"
        return Response(content(name), media_type=mimetypes.guess_type(name)[0])

    async def about(self, request: Request) -> Response:
        return JSONResponse(self.explorer.about())

    async def view(self, request: Request) -> Response:
        _, prompt, side = await self._asked(request)
        reading = await run_in_threadpool(self.explorer.read, prompt, side)
        return JSONResponse(reading.view)

    async def generate(self, request: Request) -> Response:
        asked, prompt, side = await self._asked(request)
        steps = self.explorer.generate(prompt, side, asked.most, asked.temperature, asked.seed)
        return StreamingResponse(_lines(steps), media_type="application/x-ndjson")

    async def picture(self, request: Request) -> Response:
        picture = await body_of(request, PICTURE_BYTES)
        name = hashlib.sha256(picture).hexdigest()
        self.pictures[name] = picture
        while len(self.pictures) > KEPT_PICTURES:
            self.pictures.popitem(last=False)
        return JSONResponse({"picture": name})

    async def _asked(self, request: Request) -> tuple[Asked, Prompt, Side]:
        """A request with its prompt and side, whatever it holds."""
        asked = validated(Asked, await json_of(request), "request")
        if asked.picture is not None and asked.picture not in self.pictures:
            raise HTTPException(400, "The picture is no longer here: drop it again.")
        picture = None if asked.picture is None else self.pictures[asked.picture]
        return asked, Prompt(asked.prompt, picture, asked.task), Side(asked.adapter, asked.off)


def _lines(steps: Iterator[dict[str, Any]]) -> Iterator[str]:
    """One JSON object a line; an error is the last of them."""
    try:
        for step in steps:
            yield json.dumps(step) + "\n"
    except Exception as error:  # the status is sent already
        yield json.dumps({"error": _words(error)}) + "\n"


def _words(error: Exception) -> str:
    known = error.detail if isinstance(error, HTTPException) else str(error)
    return known if isinstance(error, HTTPException | ConfigError) else f"{type(error).__name__}: {error}"


def _failed(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 400 if isinstance(error, ConfigError) else 500
    return JSONResponse({"error": _words(error)}, status)


def application(explorer: Explorer, host: str = "127.0.0.1", token: str | None = None) -> Starlette:
    """The server as an ASGI application."""
    questions, posted = Questions(explorer), ("view", "generate", "picture")
    return Starlette(
        routes=[
            *(Route(f"/{name}", questions.file) for name in ("", *FILES)),
            Route("/api/about", questions.about),
            *(Route(f"/api/{name}", getattr(questions, name), methods=["POST"]) for name in posted),
        ],
        middleware=[
            Middleware(
                Guard,
                host=host,
                token=token,
                secret=lambda path: path.startswith("/api/"),
                refuse=lambda status, reason: JSONResponse({"error": reason}, status),
                headers=HEADERS,
            )
        ],
        exception_handlers=dict.fromkeys((HTTPException, ConfigError, RuntimeError, Exception), _failed),
    )


def serve(explorer: Explorer, listening: socket.socket, host: str, token: str | None) -> None:
    """Answer until Ctrl-C."""
    if token is None and not is_loopback(host):
        token = secrets.token_urlsafe(24)
    opened = address(host, listening) + ("" if token is None else f"#token={token}")
    print(f"explorer    {opened}\nstop it with Ctrl-C", flush=True)
    app = application(explorer, host, token)
    config = uvicorn.Config(app, log_level="warning", server_header=False, timeout_graceful_shutdown=1)
    uvicorn.Server(config).run(sockets=[listening])
