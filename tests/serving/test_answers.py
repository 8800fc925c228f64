"""Answers to prompts, files and conversations are those of plain greedy generation."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from PIL import Image

import monkeyjump as mj
from monkeyjump.cli.main import main
from monkeyjump.evaluation.load import load_adapter
from monkeyjump.models import load_model
from monkeyjump.serving.answers import Answerer, Question, Sampling, load
from monkeyjump.serving.chat import chat
from tests.helpers import adapted, disturb
from tests.serving.conftest import save_adapter
from tests.visual import save_visual_model

PROMPTS = ["Is the sky blue?", "Name a fish.", "Tell me about the paper, and then some more of it.", "1 + 1"]
HOW = Sampling(max_tokens=12)


def asked(text: str, **more: Any) -> Question:
    return Question([{"role": "user", "content": text}], **more)


@torch.no_grad()
def plain(folder: Path, messages: Any, tokens: int = 12, base: bool = False) -> str:
    """What the library says without any of this: one adapter on its base, one prompt, `generate`."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    model, tokenizer = load_adapter(folder)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    if base:
        model = model.unload()
    found = model.generate(ids, max_new_tokens=tokens, do_sample=False)
    return tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True)


def test_answers_of_every_name(answerer: Answerer, folders: list[Path], base: Path) -> None:
    assert answerer.names == ["first", "second", base.name]
    questions = [asked(text) for text in PROMPTS]
    found = {name: answerer.answers(questions, name, HOW) for name in answerer.names}
    for name, folder in zip(found, [*folders, folders[0]], strict=True):
        assert found[name] == [plain(folder, text, base=name == base.name) for text in PROMPTS]
    assert len({answers[0] for answers in found.values()}) == 3


def test_sampling_follows_the_seed(answerer: Answerer) -> None:
    torch.manual_seed(3)
    one, two = (answerer.answers([asked("Go")], "first", Sampling(20, 1.0))[0] for _ in range(2))
    torch.manual_seed(3)
    assert answerer.answers([asked("Go")], "first", Sampling(20, 1.0))[0] == one != two


def test_a_prompt_on_the_command_line(folders: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", str(folders[0]), PROMPTS[0], "--max-tokens", "12"]
    assert main(words) == 0
    expected = plain(folders[0], PROMPTS[0])
    assert capsys.readouterr().out == expected + "\n"
    assert main([*words, "--with-base"]) == 0
    both = capsys.readouterr().out
    assert both.startswith(f"[first]\n{expected}\n[")
    assert both.endswith(f"]\n{plain(folders[0], PROMPTS[0], base=True)}\n")


def test_a_file_is_answered_and_gone_on_with(
    folders: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows: list[Any] = [{"prompt": text} for text in PROMPTS]
    rows[1] = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}, *_user("Go")]}
    rows[3] = {"prompt": "1\u2028+\x85 1"}  # ends of lines for Python, not for JSON
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    source.write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    words = ["generate", str(folders[0]), "--file", str(source), "--out", str(out), "--max-tokens", "6", "--batch", "3"]
    words.append("--with-base")
    assert main(words) == 0
    whole = out.read_bytes()
    found = [json.loads(line) for line in whole.splitlines()]
    for row, line in zip(rows, found, strict=True):
        given = row.get("messages") or row["prompt"]
        answers = {"answer": plain(folders[0], given, 6), "base": plain(folders[0], given, 6, base=True)}
        assert line == {**row, **answers}
    out.write_bytes(whole[: whole.index(b"\n") + 20])  # killed while it wrote its second line
    assert main(words) == 0
    assert out.read_bytes() == whole
    assert "3 answers, 1 were there already" in capsys.readouterr().out
    monkeypatch.setattr("monkeyjump.serving.answers.load", lambda *_: pytest.fail("nothing is left to answer"))
    assert main(words) == 0
    assert out.read_bytes() == whole
    assert main(words[:-1]) == 2  # other columns
    source.write_text('{"prompt": "other"}\n', encoding="utf-8")
    assert main(words) == 2
    assert out.read_bytes() == whole


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_what_is_wrong_with_a_file_is_told_at_once(
    folders: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, words = tmp_path / "in.jsonl", ["generate", str(folders[0]), "--out", str(tmp_path / "out.jsonl"), "--file"]
    source.write_text('{"prompt": 1}\nno\n{"image": "x.png"}\n{"prompt": "a", "messages": []}\n{"q": "a"}\n')
    assert main([*words, str(source)]) == 2
    said = capsys.readouterr().err
    for number in range(1, 6):
        assert f"line {number}" in said
    long, good = {"prompt": "a" * 9000}, {"prompt": "a"}
    picture = {"prompt": "a", "image": "x.png"}
    source.write_text("\n".join(map(json.dumps, [good, long, picture])))
    assert main([*words, str(source)]) == 2
    said = capsys.readouterr().err
    assert "row 2" in said
    assert "row 3" in said
    assert not (tmp_path / "out.jsonl").exists()
    assert main([*words, str(tmp_path / "none.jsonl")]) == 2


@pytest.mark.parametrize(
    "words",
    [[], ["a", "--file", "x"], ["--file", "x"], ["a", "--out", "x"], ["a", "--max-tokens", "0"], ["a", "--batch", "0"]],
)
def test_options_that_do_not_fit(folders: list[Path], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(folders[0]), *words]) == 2
    assert "error:" in capsys.readouterr().err


def test_a_task_routed_adapter_asks_for_its_task(base: Path, tmp_path: Path) -> None:
    folder = save_adapter(base, tmp_path / "tasked", 3, granularity="task")
    (folder / "recipe.json").write_text(json.dumps({"origin": {"task_ids": {"one": 0, "two": 1}}}), encoding="utf-8")
    found = load([folder], str(base))
    with pytest.raises(mj.ConfigError, match="one, two"):
        found.answers([asked("Hello")], "tasked", HOW)
    by_task = [found.answers([asked("Hello", task=task)], "tasked", HOW) for task in ("one", "two")]
    assert by_task[0] != by_task[1]
    ids = found.inputs([asked("Hello", task="two")], "tasked")
    assert ids["task_ids"].tolist() == [1]
    assert found.answers([asked("Hello")], found.base_name, HOW) == [plain(folder, "Hello", base=True)]


@pytest.mark.filterwarnings("ignore:answers are generated without CUDA graphs")  # PEFT picks rows on the host
def test_lora_of_peft_itself(base: Path, tmp_path: Path) -> None:
    lora = get_peft_model(load_model(str(base))[0], LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    lora.save_pretrained(str(tmp_path / "lora"))
    found = load([tmp_path / "lora"])
    for name in found.names:
        expected = plain(tmp_path / "lora", "Hello", base=name == found.base_name)
        assert found.answers([asked("Hello")], name, HOW) == [expected]
    ia3 = get_peft_model(load_model(str(base))[0], IA3Config(target_modules=["q_proj"], feedforward_modules=[]))
    ia3.save_pretrained(str(tmp_path / "ia3"))
    with pytest.raises(mj.ConfigError, match="kind IA3"):
        load([tmp_path / "ia3"])


def test_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, _ = load_model(str(save_visual_model(tmp_path / "model")))
    saved = adapted(model)
    disturb(saved, seed=4)
    saved.save_pretrained(str(tmp_path / "visual"))
    for color in ("red", "blue"):
        Image.new("RGB", (28, 28), color).save(tmp_path / f"{color}.png")
    answers = []
    for color in ("red", "blue"):
        picture = ["--image", str(tmp_path / f"{color}.png")]
        assert main(["generate", str(tmp_path / "visual"), "What?", "--max-tokens", "8", *picture]) == 0
        answers.append(capsys.readouterr().out)
    rows = [{"prompt": "What?", "image": f"{color}.png"} for color in ("red", "blue")]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    files = ["--file", str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "out.jsonl")]
    assert main(["generate", str(tmp_path / "visual"), "--max-tokens", "8", *files]) == 0
    found = [json.loads(line)["answer"] for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [answer + "\n" for answer in found] == answers
    (tmp_path / "text.png").write_text("no picture")
    talk = ["What?", f"/image {tmp_path / 'text.png'}", f"/image {tmp_path / 'none.png'}"]
    talk += [f"/image {tmp_path / 'blue.png'}", "What?", "/reset", "What?"]
    capsys.readouterr()
    chat(load([tmp_path / "visual"]), ["visual"], Sampling(8), image=str(tmp_path / "red.png"), lines=talk)
    said = capsys.readouterr().out
    assert [f"{answer}\n" for answer in found] == [part.partition("(")[0] for part in _said(said)[:2]]
    assert _said(said)[2] not in answers  # without a picture
    assert said.count("error: ") == 2
    assert "(the conversation is about blue.png)" in said


def _said(text: str) -> list[str]:
    return [part.partition("error: ")[0] for part in text.split("[visual] ")[1:]]


def test_a_conversation_about_a_picture_needs_a_model_that_sees(
    answerer: Answerer, capsys: pytest.CaptureFixture[str]
) -> None:
    chat(answerer, ["first"], HOW, lines=["/image x.png"])
    said = capsys.readouterr().out
    assert "reads no pictures" in said
    assert "/image" not in said
    with pytest.raises(mj.ConfigError, match="reads no pictures"):
        chat(answerer, ["first"], HOW, image="x.png", lines=[])


def test_a_conversation(
    answerer: Answerer, folders: list[Path], base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["Hello", "", "And now?", "/reset", "And now?", "/exit", "never read"]
    chat(answerer, ["first", base.name], HOW, lines=lines)
    out = capsys.readouterr().out
    for name in ("first", base.name):
        own = [line.split("] ", 1)[1] for line in _answers(out, answerer) if line.startswith(f"[{name}]")]
        is_base = name == base.name
        first = plain(folders[0], "Hello", base=is_base)
        history = [*_user("Hello"), {"role": "assistant", "content": first}, *_user("And now?")]
        expected = [first, plain(folders[0], history, base=is_base), plain(folders[0], "And now?", base=is_base)]
        assert own == expected
    assert "never read" not in out


def _answers(text: str, answerer: Answerer) -> list[str]:
    """The answers with their names; an answer may have several lines."""
    marked = text
    for name in answerer.names:
        marked = marked.replace(f"[{name}] ", f"\0[{name}] ")
    parts = marked.replace("(the conversation", "\0(the conversation").split("\0")
    return [part.removesuffix("\n") for part in parts if part.startswith("[")]


def test_a_conversation_through_pipes(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n" + "a" * 9000 + "\nHello\n"))
    assert main(["chat", str(folders[1]), "--max-tokens", "12"]) == 0  # the end of the pipe ends it
    out = capsys.readouterr().out
    assert f"[second] {plain(folders[1], 'Hello')}\n" in out
    assert "at most 8,192 can be read" in out  # what cannot be read does not end it
    assert out.count("[second]") == 3
