"""The explorer's server: it tells what the library would, and refuses whom it does not know."""

from __future__ import annotations

import http.client
import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from PIL import Image

import monkeyjump as mj
from monkeyjump.cli.main import main
from monkeyjump.evaluation.load import NamedAdapter, load_adapter
from monkeyjump.explorer import recorded
from monkeyjump.explorer.engine import Explorer, Prompt, Side, load
from monkeyjump.models import load_model
from tests.explorer.conftest import ask, serving, unpacked
from tests.helpers import adapted, disturb, wrap
from tests.tasks.conftest import make_tokenizer
from tests.tiny_folder import save_tiny_model
from tests.visual import IMAGE, batch, qwen2_5_vl, save_visual_model

TEXT = "Is the sky blue?"


@torch.no_grad()
def routing_of(explorer: Explorer, adapter: str, text: str = TEXT, off: Any = None) -> tuple[Any, torch.Tensor]:
    """What the library says by itself: the trace of one forward of the templated prompt, and its last logits."""
    messages = [{"role": "user", "content": text}]
    ids = explorer.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    explorer.model.set_adapter(adapter)
    with mj.knock_out(explorer.model, off or {}), mj.record_routing(explorer.model, probabilities=True) as trace:
        logits = explorer.model(torch.tensor([ids])).logits[0, -1]
    return trace, logits


@pytest.mark.parametrize(("name", "adapter"), [("first", "default"), ("other", "second")])
@pytest.mark.parametrize("off", [{}, {"1": ["q_proj"]}])
def test_gates_are_those_of_record_routing(explorer: Explorer, served: Any, name: str, adapter: str, off: Any) -> None:
    status, view, _ = ask(served.port, "/api/view", {"prompt": TEXT, "adapter": name, "off": off})
    assert status == 200
    trace, logits = routing_of(explorer, adapter, off=off)
    assert [key for key, _ in view["blocks"]] == trace.blocks() == ["0", "1", "2"]
    for get, field in ((trace.gates, "gates"), (trace.probabilities, "probabilities")):
        expected = torch.cat([get(block)[0] for block in trace.blocks()], -1).numpy()
        np.testing.assert_allclose(unpacked(view, field), expected, atol=1e-5)
    if off:
        assert not unpacked(view)[:, 3].any()
    p, ids = logits.softmax(-1).topk(8)
    assert [text for text, _ in view["next"]] == explorer._texts(ids.tolist())
    np.testing.assert_allclose([value for _, value in view["next"]], p.numpy(), atol=1e-4)
    assert "".join(view["tokens"]) == f"<s>user:{TEXT}</s><s>assistant:"


def test_the_base_model_has_no_gates(explorer: Explorer, served: Any) -> None:
    _, view, _ = ask(served.port, "/api/view", {"prompt": TEXT, "adapter": "base"})
    assert view["blocks"] == []
    with explorer.model.disable_adapter():
        _, logits = routing_of(explorer, "default")
    expected = explorer._next(logits[None])
    assert [text for text, _ in view["next"]] == [text for text, _ in expected]
    np.testing.assert_allclose([p for _, p in view["next"]], [p for _, p in expected], atol=1e-4)


def test_generation_is_greedy_generation(explorer: Explorer, served: Any) -> None:
    asked = {"prompt": TEXT, "adapter": "first", "most": 6}
    _, lines, _ = ask(served.port, "/api/generate", asked)
    events = [json.loads(line) for line in lines.splitlines()]
    assert "end" in events.pop()
    explorer.model.set_adapter("default")
    ids = torch.tensor([explorer.prompts.ids([{"role": "user", "content": TEXT}])])
    greedy: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": explorer.tokenizer.eos_token_id}
    with mj.record_routing(explorer.model) as trace:
        made = explorer.model.generate(ids, attention_mask=torch.ones_like(ids), **greedy)[0, ids.shape[1] :]
    assert events[-1]["text"] == explorer.tokenizer.decode(made, skip_special_tokens=True)
    blocks = [[key, trace.experts(key)] for key in trace.blocks()]
    gates = torch.cat([trace.gates(block)[0] for block in trace.blocks()], -1).numpy()  # of the last but one token
    np.testing.assert_allclose(unpacked({**events[len(made) - 2], "blocks": blocks}), gates, atol=1e-4)


def test_tokens_as_people_read_them(explorer: Explorer) -> None:
    """A vocabulary is often larger than its tokenizer, and a token may be a part of a character."""
    tokenizer = explorer.tokenizer
    ids = [*tokenizer("é a\n", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id, 100_000]
    assert explorer._texts(ids) == ["Ã", "©", " ", "a", "\n", "</s>", "<100000>"]


def test_sides_that_agree_draw_the_same(explorer: Explorer) -> None:
    """The noise belongs to the place, not to the side; another seed is other noise."""
    texts = [
        [event.get("text") for event in explorer.generate(Prompt(TEXT), Side(name), 8, 1.0, seed)]
        for name, seed in (("first", 1), ("first", 1), ("first", 2))
    ]
    assert texts[0] == texts[1] != texts[2]


def test_two_generations_in_turns_do_not_mix(explorer: Explorer) -> None:
    sides = [Side("first"), Side("other", {"0": ["q_proj"]}), Side("base")]
    alone = [list(explorer.generate(Prompt(TEXT), side, 5, 0, 0)) for side in sides]
    in_turns = zip(*(explorer.generate(Prompt(TEXT), side, 5, 0, 0) for side in sides), strict=False)
    for step, events in enumerate(in_turns):
        assert list(events) == [each[step] for each in alone]


REFUSED: list[tuple[str, Any, dict[str, str], int, str]] = [
    ("view", {"prompt": TEXT, "adapter": "frist"}, {}, 400, "Did you mean 'first'"),
    ("view", {"prompt": " ", "adapter": "first"}, {}, 400, "nothing to read"),
    ("view", {"prompt": "a" * 5000, "adapter": "first"}, {}, 400, "at most 4,096 can be read"),
    ("view", {"prompt": "a" * 300_000, "adapter": "first"}, {}, 413, "larger than 256 KB"),
    ("view", {"prompt": TEXT, "adapter": "first", "off": {"9": ["q_proj"]}}, {}, 400, "block '9' routes nothing"),
    ("view", {"prompt": TEXT, "adapter": "first", "off": [1]}, {}, 400, "off=[1] must be a section of names"),
    ("view", {"prompt": TEXT, "adapter": "base", "off": {"0": ["q_proj"]}}, {}, 400, "has no experts"),
    ("view", {"prompt": 3, "adapter": "first"}, {}, 400, "prompt=3 must be text"),
    ("view", {"prompt": TEXT, "adapter": "first", "picture": "x"}, {}, 400, "drop it again"),
    ("view", b"{", {}, 400, "not JSON"),
    ("view", b"[]", {}, 400, "must be a section of keys and values"),
    ("view", b"[" * 100_000, {}, 400, "not JSON"),
    ("view", b"\xff", {}, 400, "not JSON"),
    ("generate", {"prompt": TEXT, "adapter": "first", "most": 10**9}, {}, 400, "must be at most 1024"),
    (
        "generate",
        {"prompt": TEXT, "adapter": "first", "temperature": "hot"},
        {},
        400,
        "'hot' must be a number",
    ),
    ("picture", b"0" * (10 * 2**20 + 1), {}, 413, "larger than 10,240 KB"),
    ("view", {"prompt": TEXT, "adapter": "first"}, {"Host": "evil.example"}, 403, "is not this server"),
    ("view", {"prompt": TEXT, "adapter": "first"}, {"Host": "192.168.1.7:80"}, 403, "is not this server"),
    ("view", {"prompt": TEXT, "adapter": "first"}, {"Origin": "http://evil.example"}, 403, "another site"),
    ("view", {"prompt": TEXT, "adapter": "first"}, {"Origin": "null"}, 403, "another site"),
]


@pytest.mark.parametrize(("path", "asked", "headers", "status", "said"), REFUSED)
def test_refusals(served: Any, path: str, asked: Any, headers: dict[str, str], status: int, said: str) -> None:
    found, content, _ = ask(served.port, f"/api/{path}", asked, **headers)
    assert (found, said in content["error"]) == (status, True), content


def test_half_a_character_is_none(served: Any) -> None:
    asked = b'{"prompt": "a\\ud800b", "adapter": "first", "off": {}}'
    status, view, _ = ask(served.port, "/api/view", asked)
    assert (status, view["prompt"]) == (200, "a?b")
    assert ask(served.port, "/api/view", asked.replace(b"first", b"\\udfff"))[0] == 400


def test_a_fault_of_the_server_is_told(explorer: Explorer, served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explorer, "about", lambda: dict[str, str]()["nothing"])
    status, content, _ = ask(served.port, "/api/about")
    assert (status, content["error"]) == (500, "KeyError: 'nothing'")


def test_an_error_while_generating_is_the_last_line(served: Any) -> None:
    _, lines, _ = ask(served.port, "/api/generate", {"prompt": "a" * 5000, "adapter": "first"})
    assert "at most 4,096" in json.loads(lines)["error"]


def test_a_reader_who_leaves_ends_the_work(explorer: Explorer, served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, advance = list[int](), explorer._advance

    def counted(reading: Any, token: int) -> Any:
        steps.append(token)
        return advance(reading, token)

    monkeypatch.setattr(explorer, "_advance", counted)
    monkeypatch.setattr(explorer, "ends", set())
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=20)
    connection.request("POST", "/api/generate", json.dumps({"prompt": TEXT, "adapter": "first", "most": 1000}))
    connection.getresponse().readline()
    connection.close()
    time.sleep(0.3)
    count = len(steps)
    time.sleep(0.2)
    assert 0 < count == len(steps) < 500


def test_files_and_their_policy(served: Any) -> None:
    for path in ("/", "/explorer.js", "/sources.js", "/explorer.css"):
        status, _, headers = ask(served.port, path, Host=f"localhost:{served.port}")
        assert status == 200
        assert "script-src 'self'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
    assert ask(served.port, "/../server.py")[0] == ask(served.port, "/guard.py")[0] == 404


def test_elsewhere_than_here_a_token_is_needed(explorer: Explorer) -> None:
    with serving(explorer, "0.0.0.0", "secret-token") as served:
        assert ask(served.port, "/")[0] == 200
        assert ask(served.port, "/api/about")[0] == 401
        assert ask(served.port, "/api/about", Authorization="Bearer wrong")[0] == 401
        assert ask(served.port, "/api/about", Authorization="Bearer secret-tökén")[0] == 401
        assert ask(served.port, "/api/about", Authorization="Bearer secret-token")[0] == 200
        assert ask(served.port, "/api/about", Host="evil.example", Authorization="Bearer secret-token")[0] == 403


def test_recorded_views_are_small(explorer: Explorer) -> None:
    """512 tokens of 30 blocks would be ten times these three blocks."""
    explorer.model.set_adapter("default")
    views = recorded(explorer.model, explorer.tokenizer, ["a" * 480])
    assert [view["adapter"] for view in views] == ["adapter", "base"]
    assert len(json.dumps(views[0]["gates"] + views[0]["probabilities"])) * 10 < 0.5 * 2**20
    assert views[0]["gates"] == explorer.read(Prompt("a" * 480), Side("first")).view["gates"]


def test_a_router_by_task_asks_for_the_task(explorer: Explorer) -> None:
    model = adapted(explorer.model.get_base_model().__class__(explorer.model.config), granularity="task")
    by_task = Explorer(model, explorer.tokenizer, {"tasks": NamedAdapter("default", {"one": 0, "two": 1})})
    assert by_task.about()["adapters"][0]["tasks"] == ["one", "two"]
    with pytest.raises(mj.ConfigError, match="choose one of one, two"):
        by_task.read(Prompt(TEXT), Side("tasks"))
    assert unpacked(by_task.read(Prompt(TEXT, task="two"), Side("tasks")).view)[:, 1].all()


def test_folders_are_loaded_beside_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base = save_tiny_model(tmp_path / "model")
    for number, name in enumerate(("one", "two")):
        model = wrap(load_model(str(base))[0])
        disturb(model, seed=number)
        model.save_pretrained(str(tmp_path / name / "adapter"))
    found = load([tmp_path / "one" / "adapter", tmp_path / "two" / "adapter"])
    assert list(found.adapters) == ["one", "two"]
    for name in found.adapters:
        model, tokenizer = load_adapter(tmp_path / name / "adapter")
        alone = Explorer(model, tokenizer, {name: NamedAdapter("default")})
        assert found.read(Prompt(TEXT), Side(name)).view == alone.read(Prompt(TEXT), Side(name)).view
    pytest.importorskip("uvicorn")
    monkeypatch.setattr("uvicorn.Server.run", lambda self, sockets: None)
    for words, said in (
        ([], r"http://127\.0\.0\.1:\d+/\n"),
        (["--host", "0.0.0.0"], r"http://[\w.-]+:\d+/#token=\S{32}\n"),
    ):
        assert main(["explore", str(tmp_path / "one" / "adapter"), "--port", "0", *words]) == 0
        assert re.search(said, capsys.readouterr().out)


def test_adapters_that_cannot_be_explored_together_or_at_all(tmp_path: Path) -> None:
    for name in ("one", "two"):
        model = wrap(load_model(str(save_tiny_model(tmp_path / f"{name}-model")))[0])
        model.save_pretrained(str(tmp_path / name))
    with pytest.raises(mj.ConfigError, match="different base models"):
        load([tmp_path / "one", tmp_path / "two"])
    assert list(load([tmp_path / "one", tmp_path / "two"], base=str(tmp_path / "one-model")).adapters) == ["one", "two"]
    lora = get_peft_model(load_model(str(tmp_path / "one-model"))[0], LoraConfig(target_modules=["q_proj"]))
    lora.save_pretrained(str(tmp_path / "lora"))
    with pytest.raises(mj.ConfigError, match="carries no Monkey Jump adapter"):
        load([tmp_path / "lora"])


def test_a_picture_is_sent_once_and_then_named(tmp_path: Path) -> None:
    model, processor = load_model(str(save_visual_model(tmp_path / "model")))
    found = Explorer(adapted(model), processor, {"visual": NamedAdapter("default")})
    path = tmp_path / "red.png"
    Image.new("RGB", (28, 28), "red").save(path)
    with serving(found) as served:
        _, named, _ = ask(served.port, "/api/picture", path.read_bytes())
        asked = {"prompt": "What?", "adapter": "visual", **named}
        status, view, _ = ask(served.port, "/api/view", asked)
        assert status == 200, view
        assert len(unpacked(view)) == len(view["tokens"])
        assert view["tokens"].count("<image>") > 1
        _, lines, _ = ask(served.port, "/api/generate", {**asked, "most": 2})
        assert "end" in json.loads(lines.splitlines()[-1])
        _, named, _ = ask(served.port, "/api/picture", b"no picture")
        status, content, _ = ask(served.port, "/api/view", {**asked, **named})
        assert (status, "of 10 bytes" in content["error"]) == (400, True), content


def test_positions_after_a_picture_stay_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a model notes how far a picture has moved the positions; what another prompt notes must not count."""
    found = Explorer(adapted(qwen2_5_vl()), make_tokenizer(), {"visual": NamedAdapter("default")})
    given, prepare = batch("qwen2_5_vl"), found._inputs
    shown = {name: given[name].chunk(2)[1] for name in ("pixel_values", "image_grid_thw", "mm_token_type_ids")}
    known = {"a picture": given["input_ids"][1].tolist(), "a text": list(range(3, 12))}

    def inputs(ids: list[int], *rest: Any) -> Any:
        made = prepare(ids, *rest)
        made.shown = shown if IMAGE in ids else {}
        return made

    monkeypatch.setattr(found.prompts, "ids", lambda messages, media: known[messages[0]["content"]])
    monkeypatch.setattr(found, "_inputs", inputs)
    alone = [list(found.generate(Prompt(text), Side("visual"), 4, 0, 0)) for text in known]
    in_turns = zip(*(found.generate(Prompt(text), Side("visual"), 4, 0, 0) for text in known), strict=True)
    for step, events in enumerate(in_turns):
        assert list(events) == [each[step] for each in alone]


def test_wrong_options_are_told_before_the_model_is_loaded(served: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for option, value in (("--token", "x/y"), ("--port", "70000"), ("--port", str(served.port)), ("--host", "1.2.3.4")):
        assert main(["explore", "nowhere", option, value]) == 2
        assert f"{option} {value}" in capsys.readouterr().err.replace("'", "")


def test_without_the_extra_it_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(__import__("sys").modules, "starlette", None)
    assert main(["explore", "nowhere"]) == 2
    assert 'pip install "monkeyjump[explore]"' in capsys.readouterr().err
