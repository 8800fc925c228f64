"""Who may talk to the server: requests of its own page, and, where others can reach it, those that know the token."""

from __future__ import annotations

import hmac
import ipaddress
import socket
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse

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


class Guard:
    """Around the application: the headers Host, Origin and Authorization are checked before anything else is read."""

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
