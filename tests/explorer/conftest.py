"""One tiny model with two adapters, one server and one browser for all tests of the explorer."""

from __future__ import annotations

import base64
import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from monkeyjump.evaluation.load import NamedAdapter
from monkeyjump.explorer.engine import Explorer
from tests.helpers import adapted, disturb, mj_config, tiny_llama
from tests.tasks.conftest import make_tokenizer

CHROMIUM = Path("/usr/bin/chromium")
QUIET = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)
USAGE = {"opinion": {str(b): {"experts": ["q_proj", "k_proj", "v_proj"], "share": [0.5, 0.25, 0.25]} for b in range(3)}}


@pytest.fixture(scope="session")
def explorer() -> Explorer:
    tokenizer = make_tokenizer()
    size = max(tokenizer.get_vocab().values()) + 1
    base = tiny_llama(3, vocab_size=size, max_position_embeddings=8192, pad_token_id=tokenizer.pad_token_id)
    model = adapted(base, temperature=0.1)
    model.add_adapter("second", mj_config(temperature=0.1))
    disturb(model)
    adapters = {"first": NamedAdapter("default"), "other": NamedAdapter("second")}
    return Explorer(model, tokenizer, adapters, "tiny", {"first": USAGE})


@contextmanager
def serving(explorer: Explorer, host: str = "127.0.0.1", token: str | None = None) -> Iterator[Any]:
    """A server in a thread, on this machine whatever `host` it believes to have."""
    uvicorn = pytest.importorskip("uvicorn")
    from monkeyjump.explorer.server import application
    from monkeyjump.serving.http import bound

    with bound("127.0.0.1", 0) as listening:
        config = uvicorn.Config(application(explorer, host, token), log_level="warning", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        port = listening.getsockname()[1]
        try:
            yield SimpleNamespace(port=port, url=f"http://127.0.0.1:{port}/", server=server, thread=thread)
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="session")
def served(explorer: Explorer) -> Iterator[Any]:
    with serving(explorer) as served:
        yield served


def ask(port: int, path: str, asked: Any = None, **headers: str) -> tuple[int, Any, Any]:
    """Status, content and headers of an answer; `asked` is sent as JSON, or as it is if it is bytes."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    body = asked if asked is None or isinstance(asked, bytes) else json.dumps(asked).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request("GET" if asked is None else "POST", path, body, named)
    response = connection.getresponse()
    content = response.read().decode()
    connection.close()
    parsed = json.loads(content) if response.getheader("content-type") == "application/json" else content
    return response.status, parsed, response.headers


def unpacked(view: dict[str, Any], name: str = "gates") -> np.ndarray:
    """[T, C]"""
    values = np.frombuffer(base64.b64decode(view[name]), "<u2") / 65535 * view["scale"]
    return values.reshape(-1, sum(len(experts) for _, experts in view["blocks"]))


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not CHROMIUM.exists():
        pytest.skip(f"there is no {CHROMIUM}")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=str(CHROMIUM), args=list(QUIET))
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page in which nothing goes wrong: no error of a script, no breach of the policy."""
    page, wrong = browser.new_page(viewport={"width": 1200, "height": 900}), list[str]()
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda message: wrong.append(message.text) if "Policy" in message.text else None)
    page.on("dialog", lambda dialog: wrong.append(dialog.message))
    page.set_default_timeout(10_000)
    yield page
    page.close()
    assert wrong == []
