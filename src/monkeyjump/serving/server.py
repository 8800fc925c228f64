"""`monkeyjump serve`: adapters behind the HTTP interface that OpenAI's clients speak."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from transformers.utils import logging as transformers_logging

from monkeyjump.checked import validated
from monkeyjump.errors import ConfigError
from monkeyjump.registry import did_you_mean
from monkeyjump.serving.answers import Answerer
from monkeyjump.serving.batching import OneThread, RaggedBatch
from monkeyjump.serving.completions import FAILED, Completion, Counts, Limits, Stop
from monkeyjump.serving.http import Guard, address, is_loopback, json_of
from monkeyjump.serving.requests import ChatRequest, unserved, unserved_together

log = logging.getLogger(__name__)
CHAT = "/v1/chat/completions"
GRACE = 10  # seconds that requests have to end when the server is stopped
HEADERS = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}
KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}  # as OpenAI names errors
CODES = {401: "invalid_api_key", 429: "too_many_requests"}


class UnknownModelError(HTTPException):
    """A request for a model that is not served."""

    def __init__(self, name: str, known: list[str]) -> None:
        super().__init__(404, f"There is no model {name!r}.{did_you_mean(name, known)} Known: {', '.join(known)}.")


class Api:
    """What can be asked of the server. `together`: one name, whose requests are one ragged batch."""

    def __init__(self, answerer: Answerer, limits: Limits, together: str | None = None) -> None:
        if answerer.prompts.pictures is not None:
            raise ConfigError(
                f"{answerer.base_name!r} reads pictures, and the server takes text alone: ask about pictures with "
                "`monkeyjump generate --image`.",
                title="model cannot be served",
            )
        self.answerer, self.limits, self.counts = answerer, limits, Counts()
        self.closing, self.started = threading.Event(), int(time.time())
        self.names = answerer.names if together is None else [together]
        self.state = OneThread() if together is None else RaggedBatch(answerer, together)

    async def chat(self, request: Request) -> Response:
        content = await json_of(request)
        if problems := unserved(content):
            raise ConfigError(problems, title="request")
        asked = validated(ChatRequest, content, "request")
        if asked.model not in self.names:
            raise UnknownModelError(asked.model, self.names)
        ragged = self.state if isinstance(self.state, RaggedBatch) else None
        if ragged is not None and (problems := unserved_together(asked)):
            raise ConfigError(problems, title="request")
        gone, request_id = threading.Event(), f"chatcmpl-{uuid.uuid4().hex}"
        stop = Stop(gone, self.closing)
        completion = Completion(self.answerer, self.state, self.limits, self.counts, asked, stop)
        answer = asyncio.ensure_future(completion.answer(request_id))
        try:
            while not answer.done():
                await asyncio.wait({answer}, timeout=0.2)
                if not gone.is_set() and await request.is_disconnected():
                    gone.set()
                    if ragged is not None:
                        ragged.cancel(request_id)
                        answer.cancel()  # its result will never come
                        return refusal(499, "The client has gone.")
            return await answer
        except asyncio.CancelledError:  # the server is stopped and waits no longer
            gone.set()
            raise
        except RuntimeError as error:
            if self.closing.is_set():
                raise HTTPException(503, "The server is being stopped.") from error
            raise

    async def models(self, request: Request) -> Response:
        data = [
            {"id": name, "object": "model", "created": self.started, "owned_by": "monkeyjump"} for name in self.names
        ]
        return JSONResponse({"object": "list", "data": data})

    async def health(self, request: Request) -> Response:
        alive = self.state.is_cb_alive()
        return JSONResponse({"status": "ok" if alive else "the worker has died"}, 200 if alive else 503)

    async def metrics(self, request: Request) -> Response:
        return PlainTextResponse(self.counts.text())

    def warm_up(self) -> None:
        """Compile and record what clients would wait for."""
        try:
            self.state.warm_up(self.answerer)
        except BaseException:
            self.state.shutdown()  # its thread would keep the process alive
            raise

    def close(self) -> None:
        """End every request that runs."""
        self.closing.set()
        self.state.end()

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        yield
        self.closing.set()
        with suppress(TimeoutError):  # then the thread is a daemon, and ends with the process
            await asyncio.to_thread(self.state.shutdown)


class Turnstile:
    """Lets so many requests in at once, refuses those above, and counts all by their status."""

    def __init__(self, app: Any, api: Api) -> None:
        self.app, self.api, self.counts = app, api, api.counts

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] != CHAT:
            return await self.app(scope, receive, send)

        async def counted(message: Any) -> None:
            if message["type"] == "http.response.start":
                self.counts.requests[message["status"]] += 1
            await send(message)

        most = self.api.limits.concurrent
        if self.counts.in_flight >= most:
            response = refusal(429, f"{most} requests are being answered, which is the most. Try again in a moment.")
            response.headers["Retry-After"] = "1"
            return await response(scope, receive, counted)
        self.counts.in_flight += 1
        try:
            await self.app(scope, receive, counted)
        finally:
            self.counts.in_flight -= 1


def refusal(status: int, reason: str, code: str | None = None) -> JSONResponse:
    """An error in the form that OpenAI's clients understand."""
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    error = {"message": reason, "type": kind, "param": None, "code": code or CODES.get(status)}
    return JSONResponse({"error": error}, status_code=status)


def _failed(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        code = "model_not_found" if isinstance(error, UnknownModelError) else None
        return refusal(error.status_code, error.detail, code)
    if isinstance(error, ConfigError):
        return refusal(400, str(error))
    if str(error) != FAILED:  # else it is in the log
        log.error("a request failed", exc_info=error)
    return refusal(500, FAILED)


def application(api: Api, host: str = "127.0.0.1", key: str | None = None) -> Starlette:
    """The server as an ASGI application."""
    guard = Middleware(
        Guard, host=host, token=key, secret=lambda path: path != "/health", refuse=refusal, headers=HEADERS
    )
    return Starlette(
        routes=[
            Route(CHAT, api.chat, methods=["POST"]),
            Route("/v1/models", api.models),
            Route("/health", api.health),
            Route("/metrics", api.metrics),
        ],
        middleware=[guard, Middleware(Turnstile, api=api)],
        exception_handlers=dict.fromkeys((HTTPException, ConfigError, RuntimeError, Exception), _failed),
        lifespan=api.lifespan,
    )


class Server(uvicorn.Server):
    """Ends the requests that still run some seconds after it was stopped, before uvicorn would tear them down."""

    def __init__(self, config: uvicorn.Config, api: Api) -> None:
        super().__init__(config)
        self.api = api

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        timer = asyncio.get_running_loop().call_later(GRACE, self.api.close)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()


def check_key(host: str, key: str | None) -> None:
    """Whoever reaches the machine could ask, so a server that others reach has a key."""
    if key is None and not is_loopback(host):
        raise ConfigError(
            f"--host {host} lets other machines ask: name a key with --api-key KEY or in MONKEYJUMP_API_KEY.",
            title="no key",
        )


def serve(api: Api, listening: socket.socket, host: str, key: str | None) -> None:
    """Answer until SIGINT or SIGTERM; requests that run have some seconds to end."""
    transformers_logging.set_verbosity_error()  # it would tell of every request
    names = ", ".join(api.names)
    if api.answerer.device.type == "cuda":
        print("warming up: kernels are compiled and forwards recorded", flush=True)
        api.warm_up()
    print(f"serving     {names}\nat          {address(host, listening)}v1\nstop it with Ctrl-C", flush=True)
    config = uvicorn.Config(
        application(api, host, key), log_level="warning", server_header=False, timeout_graceful_shutdown=GRACE + 5
    )
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # uvicorn raises it again when it has ended
    try:
        with suppress(KeyboardInterrupt):
            Server(config, api).run(sockets=[listening])
    finally:
        signal.signal(signal.SIGTERM, before)
