"""The explorer's server: four files, and four questions that the page asks in JSON."""

from __future__ import annotations

import hashlib
import json
import secrets
import socket
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from monkeyjump.errors import ConfigError
from monkeyjump.explorer.engine import Explorer, Prompt, Side
from monkeyjump.explorer.guard import Guard, is_loopback
from monkeyjump.explorer.page import FILES, content

TEXT_BYTES = 256 * 1024  # of a request
PICTURE_BYTES = 10 * 1024 * 1024
KEPT_PICTURES = 4
MOST_NEW_TOKENS = 1024


class Questions:
    """What the page can ask. A picture is sent once and then named by its hash."""

    def __init__(self, explorer: Explorer) -> None:
        self.explorer = explorer
        self.pictures: OrderedDict[str, bytes] = OrderedDict()

    async def file(self, request: Request) -> Response:
        name = request.url.path.lstrip("/") or "index.html"
        return Response(content(name), headers={"Content-Type": FILES[name]})

    async def about(self, request: Request) -> Response:
        return JSONResponse(self.explorer.about())

    async def view(self, request: Request) -> Response:
        prompt, side = self._asked(await _json(request))
        reading = await run_in_threadpool(self.explorer.read, prompt, side)
        return JSONResponse(reading.view)

    async def generate(self, request: Request) -> Response:
        asked = await _json(request)
        prompt, side = self._asked(asked)
        most = _number(asked, "most", 64, 1, MOST_NEW_TOKENS)
        temperature = _number(asked, "temperature", 0.0, 0.0, 10.0)
        seed = _number(asked, "seed", 0, 0, 2**31)
        steps = self.explorer.generate(prompt, side, int(most), temperature, int(seed))
        return StreamingResponse(_lines(steps), media_type="application/x-ndjson")

    async def picture(self, request: Request) -> Response:
        picture = await _body(request, PICTURE_BYTES)
        name = hashlib.sha256(picture).hexdigest()
        self.pictures[name] = picture
        while len(self.pictures) > KEPT_PICTURES:
            self.pictures.popitem(last=False)
        return JSONResponse({"picture": name})

    def _asked(self, asked: dict[str, Any]) -> tuple[Prompt, Side]:
        """Prompt and side of a request, whatever it holds."""
        text, task, adapter = asked.get("prompt"), asked.get("task"), asked.get("adapter")
        off, picture = asked.get("off", {}), asked.get("picture")
        listed = isinstance(off, dict) and all(isinstance(names, list) for names in off.values())
        if not listed or not all(isinstance(name, str) for names in off.values() for name in names):
            raise HTTPException(400, '"off" has to be an object such as {"0": ["q_proj"]}.')
        if not isinstance(text, str) or not isinstance(adapter, str):
            raise HTTPException(400, '"prompt" and "adapter" have to be texts.')
        if picture is not None and picture not in self.pictures:
            raise HTTPException(400, "The picture is no longer here: drop it again.")
        picture = None if picture is None else self.pictures[picture]
        return Prompt(text, picture, task if isinstance(task, str) else None), Side(adapter, off)


def _lines(steps: Iterator[dict[str, Any]]) -> Iterator[str]:
    """One JSON object a line; an error is the last of them."""
    try:
        for step in steps:
            yield json.dumps(step) + "\n"
    except Exception as error:  # the status is sent already
        yield json.dumps({"error": _words(error)}) + "\n"


async def _body(request: Request, most: int) -> bytes:
    """The body of a request; no more than `most` bytes of it are ever held."""
    held = bytearray()
    async for chunk in request.stream():
        held += chunk
        if len(held) > most:
            raise HTTPException(413, f"The request is larger than {most // 1024:,} KB. Send less.")
    return bytes(held)


async def _json(request: Request) -> dict[str, Any]:
    try:
        asked = json.loads(await _body(request, TEXT_BYTES))
        asked = json.loads(json.dumps(asked, ensure_ascii=False).encode("utf-8", "replace"))  # without half characters
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"The request is not JSON ({error}).") from error
    if not isinstance(asked, dict):
        raise HTTPException(400, "The request is not a JSON object.")
    return asked


def _number(asked: dict[str, Any], name: str, default: float, low: float, high: float) -> float:
    value = asked.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise HTTPException(400, f'"{name}" has to be a number from {low:g} to {high:g}.')
    return value


def _words(error: Exception) -> str:
    if isinstance(error, HTTPException):
        return error.detail
    return str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"


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
        middleware=[Middleware(Guard, host=host, token=token)],
        exception_handlers=dict.fromkeys((HTTPException, ConfigError, RuntimeError, Exception), _failed),
    )


def bound(host: str, port: int) -> socket.socket:
    """A socket for the server, before the model is loaded: a port that is taken is found out at once."""
    try:
        if not 0 <= port <= 65535:
            raise OSError("a port is a number from 0 to 65535")
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise ConfigError(
            f"--host {host} --port {port} cannot be used ({error}). Name another port, or --port 0 for any.",
            title="no address for the server",
        ) from error


def serve(explorer: Explorer, listening: socket.socket, host: str, token: str | None) -> None:
    """Answer until Ctrl-C."""
    if token is None and not is_loopback(host):
        token = secrets.token_urlsafe(24)
    shown = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{listening.getsockname()[1]}/" + ("" if token is None else f"#token={token}")
    print(f"explorer    {address}\nstop it with Ctrl-C", flush=True)
    app = application(explorer, host, token)
    config = uvicorn.Config(app, log_level="warning", server_header=False, timeout_graceful_shutdown=1)
    uvicorn.Server(config).run(sockets=[listening])
