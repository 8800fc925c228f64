"""The explorer's server: four files, and four questions that the page asks in JSON."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
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
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from monkeyjump.checked import Section, validated
from monkeyjump.errors import ConfigError
from monkeyjump.explorer import FILES, content
from monkeyjump.explorer.engine import Explorer, Prompt, Side

TEXT_BYTES = 256 * 1024  # of a request
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
        picture = await _body(request, PICTURE_BYTES)
        name = hashlib.sha256(picture).hexdigest()
        self.pictures[name] = picture
        while len(self.pictures) > KEPT_PICTURES:
            self.pictures.popitem(last=False)
        return JSONResponse({"picture": name})

    async def _asked(self, request: Request) -> tuple[Asked, Prompt, Side]:
        """A request with its prompt and side, whatever it holds."""
        try:
            content = json.loads(await _body(request, TEXT_BYTES))
            content = json.loads(json.dumps(content, ensure_ascii=False).encode("utf-8", "replace"))
        except (ValueError, RecursionError) as error:
            raise HTTPException(400, f"The request is not JSON ({error}).") from error
        asked = validated(Asked, content, "request")
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


async def _body(request: Request, most: int) -> bytes:
    """The body of a request; no more than `most` bytes of it are ever held."""
    held = bytearray()
    async for chunk in request.stream():
        held += chunk
        if len(held) > most:
            raise HTTPException(413, f"The request is larger than {most // 1024:,} KB. Send less.")
    return bytes(held)


def _words(error: Exception) -> str:
    known = error.detail if isinstance(error, HTTPException) else str(error)
    return known if isinstance(error, HTTPException | ConfigError) else f"{type(error).__name__}: {error}"


def _failed(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 400 if isinstance(error, ConfigError) else 500
    return JSONResponse({"error": _words(error)}, status)


class Guard:
    """Around the application: requests of its own page, and, where others can reach it, those that know the token.

    The headers Host, Origin and Authorization are checked before anything else is read.
    """

    def __init__(self, app: Any, host: str, token: str | None) -> None:
        self.app, self.token, self.loopback = app, token, is_loopback(host)
        self.names = {"localhost"} if self.loopback else {"localhost", host.lower(), socket.gethostname().lower()}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        refusal = self.refusal(scope["path"], Headers(scope=scope))
        if refusal is not None:
            status, reason = refusal
            return await JSONResponse({"error": reason}, status)(scope, receive, send_with_headers)
        return await self.app(scope, receive, send_with_headers)

    def refusal(self, path: str, headers: Headers) -> tuple[int, str] | None:
        """Status and reason of a request that is not answered."""
        host = headers.get("host", "")
        if not self._known(host):
            return 403, f"Host {host!r} is not this server: open it by the address it printed."
        origin = headers.get("origin")
        if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
            return 403, f"Origin {origin!r} is another site: only the explorer's own page may ask."
        if self.token is None or not path.startswith("/api/"):
            return None
        given = headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self.token.encode()):
            return 401, "The token is missing or wrong: open the address that the server printed, with its #token=."
        return None

    def _known(self, host: str) -> bool:
        """Whether a Host header names this server. A site that lets its own name point here is thereby kept out.

        The port is not compared, because a tunnel may have another.
        """
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        name = name.strip("[]").lower()
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return name in self.names
        return address.is_loopback or not self.loopback


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that is bound to `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


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
