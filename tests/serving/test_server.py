"""The server as clients see it: one process for all tests, asked by OpenAI's own client."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from monkeyjump.cli.main import main
from monkeyjump.models import load_model
from tests.processes import start_process
from tests.serving.conftest import LONGEST
from tests.serving.test_answers import PROMPTS, plain

openai = pytest.importorskip("openai")
uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("fastapi")

from monkeyjump.serving.answers import load  # noqa: E402 - these import them
from monkeyjump.serving.completions import Limits  # noqa: E402
from monkeyjump.serving.http import bound  # noqa: E402
from monkeyjump.serving.server import Api, Server, application  # noqa: E402

KEY = "a-key-of-tests"
START, WAIT = 120, 30  # seconds within which a server is there, and answers


@contextmanager
def served(*words: str, **environment: str) -> Iterator[Any]:
    """A server in a process of its own, on a port that is free."""
    command = [sys.executable, "-m", "monkeyjump", "serve", *words, "--port", "0"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env={**os.environ, **environment}, **pipes) as process:
        watch = threading.Timer(START, process.kill)
        watch.start()
        assert process.stdout is not None
        said = ""
        for line in process.stdout:
            said += line
            if line.startswith("stop it"):
                break
        watch.cancel()
        found = re.search(r"http://[^:]+:(\d+)/v1", said)
        if found is None:
            process.kill()
            pytest.fail(f"no server: {process.communicate()[1][-2000:]}")
        try:
            yield SimpleNamespace(port=int(found[1]), process=process)
            process.send_signal(signal.SIGINT)
            assert process.wait(WAIT) == 0
        finally:
            process.kill()  # does nothing to one that has ended


@pytest.fixture(scope="module")
def server(folders: list[Path]) -> Iterator[Any]:
    limits = ["--max-tokens", str(LONGEST), "--max-prompt", "4000"]
    with served(*map(str, folders), *limits, MONKEYJUMP_API_KEY=KEY) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Any) -> Any:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key=KEY, timeout=WAIT, max_retries=0)


def test_the_examples_of_the_page(server: Any, folders: list[Path], base: Path, capsys: Any) -> None:
    """What docs/serve.md says in Python, with the names and the address of this server."""
    page = (Path(__file__).parents[2] / "docs" / "serve.md").read_text(encoding="utf-8")
    over_http, by_row = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    for said, here in (("127.0.0.1:8000", f"127.0.0.1:{server.port}"), ('"none"', repr(KEY))):
        over_http = over_http.replace(said, here)
    exec(over_http.replace('"one"', '"first"').replace('"two"', '"second"'), {})
    answers = [plain(folder, "Is the sky blue?", 32) for folder in folders]
    assert capsys.readouterr().out == f"['first', 'second', 'tiny']\n{answers[0]}\n{answers[1]}"

    for name, folder in zip(("one", "two"), folders, strict=True):
        by_row = by_row.replace(f"runs/{name}/adapter", str(folder))
    batch = {"input_ids": torch.ones(3, 4, dtype=torch.long), "attention_mask": torch.ones(3, 4, dtype=torch.long)}
    exec(by_row, {"base_model": load_model(str(base))[0], "batch_of_three": batch})


def ask(client: Any, model: str, text: str, tokens: int = 12, **more: Any) -> Any:
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(model=model, messages=messages, max_tokens=tokens, **more)


def raw(server: Any, body: bytes | None, path: str = "/v1/chat/completions", **headers: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT)
    named = {"Authorization": f"Bearer {KEY}", **headers}
    connection.request("GET" if body is None else "POST", path, body, named)
    response = connection.getresponse()
    content = response.read().decode()
    connection.close()
    is_json = (response.getheader("content-type") or "").startswith("application/json")
    return response.status, json.loads(content) if is_json else content


def metric(server: Any, name: str) -> float:
    _, text = raw(server, None, "/metrics")
    return next((float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name)), 0)


def test_every_name_answers_as_plain_generation(client: Any, folders: list[Path], base: Path) -> None:
    names = [model.id for model in client.models.list().data]
    assert names == ["first", "second", base.name]
    for name, folder in zip(names, [*folders, folders[0]], strict=True):
        found = ask(client, name, PROMPTS[0])
        assert found.choices[0].message.content == plain(folder, PROMPTS[0], base=name == base.name)
        assert (found.model, found.choices[0].finish_reason, found.usage.completion_tokens) == (name, "length", 12)


def test_streaming_is_the_same_text(client: Any) -> None:
    for name in ("first", "second"):
        whole = ask(client, name, PROMPTS[1], 40).choices[0].message.content
        chunks = list(ask(client, name, PROMPTS[1], 40, stream=True))
        parts = [chunk.choices[0].delta.content or "" for chunk in chunks]
        assert "".join(parts) == whole
        assert sum(map(bool, parts)) > 5  # it comes in parts
        assert chunks[-1].choices[0].finish_reason == "length"
        assert chunks[-1].usage.completion_tokens == 40


def test_conversations_parts_and_stops(client: Any, folders: list[Path]) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "Go on"},
    ]
    found = client.chat.completions.create(model="first", messages=messages, max_completion_tokens=12)
    text = found.choices[0].message.content
    messages[1]["content"] = "Hello"
    assert text == plain(folders[0], messages)
    stopped = client.chat.completions.create(model="first", messages=messages, max_tokens=12, stop=[text[4:6]])
    assert stopped.choices[0].message.content == text[: text.index(text[4:6]) + 2]
    assert stopped.choices[0].finish_reason == "stop"


def test_sampling_follows_the_seed(client: Any) -> None:
    def drawn(seed: int, **more: Any) -> str:
        return ask(client, "first", "Go", 30, temperature=1.0, seed=seed, **more).choices[0].message.content

    assert drawn(1) == drawn(1) != drawn(2)
    assert drawn(1, top_p=1e-6) == ask(client, "first", "Go", 30).choices[0].message.content


def test_fifty_clients_at_once_get_their_own_adapters(client: Any, server: Any, base: Path) -> None:
    cases = [(name, text) for name in ("first", "second", base.name) for text in PROMPTS]
    expected = {case: ask(client, *case).choices[0].message.content for case in cases}
    assert len({expected[name, PROMPTS[0]] for name in ("first", "second", base.name)}) == 3
    asked = [cases[turn % len(cases)] for turn in range(50)]

    def run(turn: int) -> str:
        name, text = asked[turn]
        if turn % 3:
            return ask(client, name, text).choices[0].message.content
        return "".join(chunk.choices[0].delta.content or "" for chunk in ask(client, name, text, stream=True))

    with ThreadPoolExecutor(50) as pool:
        found = list(pool.map(run, range(50), timeout=60))
    assert found == [expected[case] for case in asked]
    assert metric(server, "monkeyjump_requests_in_flight") == 0
    assert metric(server, 'monkeyjump_requests_total{status="200"}') >= 50
    assert metric(server, 'monkeyjump_generated_tokens_total{model="second"}') >= 12


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_who_leaves_ends_its_generation(client: Any, server: Any, stream: bool) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT)
    body = {"model": "first", "messages": [{"role": "user", "content": "Go"}], "max_tokens": LONGEST, "stream": stream}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Authorization": f"Bearer {KEY}"})
    if stream:
        connection.getresponse().readline()
    else:
        _until(lambda: metric(server, "monkeyjump_requests_in_flight") == 1)
    connection.close()
    ask(client, "second", "Go")  # it waits for the thread, and not as long as the first would have taken
    _until(lambda: metric(server, "monkeyjump_requests_in_flight") == 0)
    assert metric(server, 'monkeyjump_generated_tokens_total{model="first"}') < LONGEST / 2


def _until(holds: Any) -> None:
    end = time.monotonic() + WAIT
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


MESSAGE: dict[str, Any] = {"messages": [{"role": "user", "content": "Go"}], "model": "first"}


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"{no", 400, "not JSON"),
        (b"[" * 100_000, 400, "not JSON"),
        (b"[]", 400, "must be a section"),
        (b"{}", 400, "'model' is missing"),
        ({**MESSAGE, "model": "firts"}, 404, "first, second"),
        ({**MESSAGE, "messages": []}, 400, "messages"),
        ({**MESSAGE, "messages": [{"role": "me", "content": "x"}]}, 400, "role"),
        ({**MESSAGE, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, 400, "type"),
        ({**MESSAGE, "max_tokens": 0}, 400, "max_tokens"),
        ({**MESSAGE, "temperature": -1}, 400, "temperature"),
        ({**MESSAGE, "stop": [""]}, 400, "stop"),
        ({**MESSAGE, "task": "opinion", "seed": -1}, 400, "seed"),
        ({**MESSAGE, "n": 2, "logprobs": True}, 400, "'logprobs' is not served"),
        ({**MESSAGE, "generation_config": "{}"}, 400, "'generation_config' is not served"),
        ({**MESSAGE, "messages": [{"role": "user", "content": "a" * 5000}]}, 400, "at most 4,000"),
        ({**MESSAGE, "messages": [{"role": "user", "content": "a" * 300_000}]}, 413, "256 KB"),
    ],
)
def test_requests_that_cannot_be_answered(server: Any, body: Any, status: int, said: str) -> None:
    found, content = raw(server, body if isinstance(body, bytes) else json.dumps(body).encode())
    assert (found, set(content)) == (status, {"error"})
    assert said in content["error"]["message"]
    assert set(content["error"]) == {"message", "type", "param", "code"}


def test_the_client_knows_the_errors(client: Any, server: Any) -> None:
    with pytest.raises(openai.NotFoundError, match="first, second"):
        ask(client, "third", "Go")
    with pytest.raises(openai.BadRequestError, match="at most 4,000"):
        ask(client, "first", "a" * 5000, stream=True)
    stranger = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        ask(stranger, "first", "Go")


def test_who_may_ask(server: Any) -> None:
    assert raw(server, None, "/health", Authorization="") == (200, {"status": "ok"})
    for path in ("/v1/models", "/metrics", "/nothing"):
        assert raw(server, None, path, Authorization="Bearer ä" if path == "/nothing" else "")[0] == 401
    assert raw(server, None, "/v1/models", Host="evil.example")[0] == 403
    assert raw(server, None, "/v1/models", Origin="http://evil.example")[0] == 403
    assert raw(server, None, "/nothing")[0] == 404
    assert raw(server, None, "/load_model")[0] == 404  # of Transformers' own server
    assert raw(server, None, "/v1/chat/completions")[0] == 405


def serve(words: list[str], said: Path) -> None:
    """A server in a copy of the process that has imported the library."""
    with said.open("w", buffering=1) as file, redirect_stdout(file), redirect_stderr(file):
        code = main(["serve", *words, "--port", "0"])
    sys.exit(code)


def test_above_the_limit_clients_are_sent_away_and_a_stop_is_graceful(folders: list[Path], tmp_path: Path) -> None:
    """A second server: one request at a time, and its end."""
    said = tmp_path / "said"
    process = start_process(serve, [str(folders[0]), "--concurrent", "1", "--max-tokens", str(LONGEST)], said)
    try:
        patience = time.monotonic() + START
        while not (said.exists() and (found := re.search(r"http://[^:]+:(\d+)/v1(.|\n)*stop it", said.read_text()))):
            assert process.is_alive()
            assert time.monotonic() < patience
            time.sleep(0.05)
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{found[1]}/v1", api_key="none", max_retries=0, timeout=WAIT)
        first = ask(client, "first", "Go", 400, stream=True)
        next(iter(first))
        with pytest.raises(openai.RateLimitError, match="1 requests"):
            ask(client, "first", "Go")
        process.terminate()
        rest = list(first)  # what runs comes to its end
        assert rest[-1].choices[0].finish_reason == "length"
        process.join(WAIT)
        assert process.exitcode == 0
        assert said.read_text().count("Traceback") == 0
        with pytest.raises(openai.APIConnectionError):
            ask(client, "first", "Go")
    finally:
        process.kill()  # does nothing to one that has ended


@contextmanager
def in_a_thread(api: Api) -> Iterator[Any]:
    """A server in this process."""
    with bound("127.0.0.1", 0) as listening:
        config = uvicorn.Config(application(api), log_level="warning", timeout_graceful_shutdown=WAIT)
        server = Server(config, api)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield SimpleNamespace(port=listening.getsockname()[1], server=server)
        finally:
            server.should_exit = True
            thread.join(WAIT)
            assert not thread.is_alive()


def test_continuous_batching(folders: list[Path]) -> None:
    """Eight at once, in one batch: each gets what it would get alone."""
    api = Api(load(folders[:1]), Limits(answer=4000), together="first")
    api.warm_up()
    with in_a_thread(api) as together:
        url = f"http://127.0.0.1:{together.port}/v1"
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=WAIT)
        assert [model.id for model in client.models.list().data] == ["first"]
        with ThreadPoolExecutor(8) as pool:
            texts = PROMPTS * 2
            found = list(pool.map(lambda text: ask(client, "first", text).choices[0].message.content, texts))
        assert found == [plain(folders[0], text) for text in texts]
        parts = [chunk.choices[0].delta.content or "" for chunk in ask(client, "first", PROMPTS[0], stream=True)]
        assert "".join(parts) == found[0]
        with pytest.raises(openai.BadRequestError, match="'temperature' is not served with continuous batching"):
            ask(client, "first", "Go", temperature=1.0)
        connection = http.client.HTTPConnection("127.0.0.1", together.port, timeout=WAIT)
        connection.request("POST", "/v1/chat/completions", json.dumps({**MESSAGE, "max_tokens": 4000}))
        _until(lambda: metric(together, "monkeyjump_requests_in_flight") == 1)
        connection.close()
        _until(lambda: metric(together, "monkeyjump_requests_in_flight") == 0)


def test_a_generation_that_fails_is_told_and_the_next_one_is_not_touched(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    api = Api(load(folders[:1]), Limits())
    with in_a_thread(api) as small:
        url = f"http://127.0.0.1:{small.port}/v1"
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=WAIT)
        with monkeypatch.context() as patch:
            patch.setattr(api.answerer.model, "generate", lambda **_: dict[str, str]()["no memory"])
            with pytest.raises(openai.InternalServerError, match="the log of the server says why"):
                ask(client, "first", "Go")
            with pytest.raises(openai.APIError, match="the log of the server says why"):
                list(ask(client, "first", "Go", stream=True))
        assert "no memory" in caplog.text
        assert ask(client, "first", "Go").choices[0].message.content == plain(folders[0], "Go")


@pytest.mark.parametrize("together", [None, "first"])
def test_what_does_not_end_in_time_is_ended(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch, together: str | None
) -> None:
    monkeypatch.setattr("monkeyjump.serving.server.GRACE", 0.5)
    with in_a_thread(Api(load(folders[:1]), Limits(answer=LONGEST), together)) as small:
        url = f"http://127.0.0.1:{small.port}/v1"
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=2 * WAIT)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(ask, client, "first", "Go", LONGEST)
            _until(lambda: metric(small, "monkeyjump_requests_in_flight") == 1)
            small.server.should_exit = True
            if together is None:
                found = answer.result(WAIT)
                assert found.choices[0].finish_reason == "length"
                assert found.usage.completion_tokens < LONGEST / 2
            else:
                with pytest.raises(openai.InternalServerError, match="being stopped"):
                    answer.result(WAIT)


def test_what_cannot_be_batched_is_not_served(folders: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--continuous-batching", "--port", "0"]
    assert main(["serve", str(folders[1]), *words]) == 2
    assert "granularity='sequence'" in capsys.readouterr().err
    assert main(["serve", *map(str, folders), *words]) == 2
    assert "one adapter" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--host", "0.0.0.0"], "MONKEYJUMP_API_KEY"),
        (["--api-key", "short"], "--api-key"),
        (["--port", "70000"], "--port"),
        (["--concurrent", "0"], "--concurrent"),
    ],
)
def test_options_that_do_not_fit(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "nowhere", *words]) == 2  # before anything is loaded
    assert said in capsys.readouterr().err
