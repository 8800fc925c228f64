"""What every server of this package does before it answers: its socket, the size of requests, who may ask."""

from __future__ import annotations

import hmac
import ipaddress
import json
import re
import socket
from collections.abc import Callable, Mapping
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from monkeyjump.errors import ConfigError

TEXT_BYTES = 256 * 1024  # of a request


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


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that is bound to `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def address(host: str, listening: socket.socket) -> str:
    """The URL at which a server is reached, as far as it can be known here."""
    shown = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return f"http://{shown}:{listening.getsockname()[1]}/"


def check_token(option: str, token: str | None) -> None:
    """A secret goes through headers and addresses as it is."""
    if token is not None and not re.fullmatch(r"[\w.~-]{8,}", token, re.ASCII):
        raise ConfigError(f"{option} {token!r} has to be 8 or more letters, digits and . _ ~ - alone.")


async def body_of(request: Request, most: int = TEXT_BYTES) -> bytes:
    """The body of a request; no more than `most` bytes of it are ever held."""
    held = bytearray()
    async for chunk in request.stream():
        held += chunk
        if len(held) > most:
            raise HTTPException(413, f"The request is larger than {most // 1024:,} KB. Send less.")
    return bytes(held)


async def json_of(request: Request) -> Any:
    """The JSON of a request, whatever it holds; lone surrogates, which no tokenizer takes, become question marks."""
    try:
        content = json.loads(await body_of(request))
        return json.loads(json.dumps(content, ensure_ascii=False).encode("utf-8", "replace"))
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"The request is not JSON ({error}).") from error


class Guard:
    """Around an application: requests of its own page, and, where there is a token, those that know it.

    The headers Host, Origin and Authorization are checked before anything else is read. `secret` says which paths need
    the token, `refuse` makes the answer to a request that is not let in.
    """

    def __init__(
        self,
        app: Any,
        host: str,
        token: str | None,
        secret: Callable[[str], bool],
        refuse: Callable[[int, str], Response],
        headers: Mapping[str, str],
    ) -> None:
        self.app, self.token, self.loopback = app, token, is_loopback(host)
        self.secret, self.refuse, self.headers = secret, refuse, headers
        self.names = {"localhost"} if self.loopback else {"localhost", host.lower(), socket.gethostname().lower()}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(self.headers)
            await send(message)

        refusal = self.refusal(scope["path"], Headers(scope=scope))
        if refusal is not None:
            return await self.refuse(*refusal)(scope, receive, send_with_headers)
        return await self.app(scope, receive, send_with_headers)

    def refusal(self, path: str, headers: Headers) -> tuple[int, str] | None:
        """Status and reason of a request that is not answered."""
        host = headers.get("host", "")
        if not self._known(host):
            return 403, f"Host {host!r} is not this server: open it by the address it printed."
        origin = headers.get("origin")
        if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
            return 403, f"Origin {origin!r} is another site: only a page of this server may ask."
        if self.token is None or not self.secret(path):
            return None
        given = headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self.token.encode()):
            return 401, "The token is missing or wrong: send the one that the server was started with."
        return None

    def _known(self, host: str) -> bool:
        """Whether a Host header names this server. A site that lets its own name point here is thereby kept out.

        The port is not compared, because a tunnel may have another.
        """
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        name = name.strip("[]").lower()
        try:
            found = ipaddress.ip_address(name)
        except ValueError:
            return name in self.names
        return found.is_loopback or not self.loopback
