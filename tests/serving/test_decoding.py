"""Recorded steps write what `generate` writes, for every adapter, and none meets what another has left."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from PIL import Image
from torch import Tensor

from monkeyjump.errors import MonkeyJumpWarning
from monkeyjump.models import load_model
from monkeyjump.serving import decoding
from monkeyjump.serving.answers import Answerer, Question, Sampling, load
from monkeyjump.tasks.media import Media
from tests.helpers import adapted, disturb
from tests.replay import RunAgain
from tests.serving.conftest import save_adapter
from tests.serving.test_answers import HOW, PROMPTS, asked
from tests.visual import save_visual_model

MADE: list[RunAgain] = []


class Counted(RunAgain):
    """Stands for a CUDA graph, and is counted."""

    replays = 0

    def record(self, work: Callable[[], list[Tensor]]) -> list[Tensor]:
        MADE.append(self)
        return super().record(work)

    def replay(self) -> None:
        self.replays += 1
        super().replay()


class Refuses(RunAgain):
    def record(self, work: Callable[[], list[Tensor]]) -> list[Tensor]:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[RunAgain]:
    monkeypatch.setattr(decoding, "new_graph", lambda reader: lambda: Counted(reader.model))
    MADE.clear()
    return MADE


def both(paths: list[Path], base: Path | None = None) -> tuple[Answerer, Answerer]:
    """The same adapters, one with recorded steps and one without."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "new_graph", lambda reader: None)
        plain = load(paths, None if base is None else str(base))
    return load(paths, None if base is None else str(base)), plain


def test_rows_of_any_length_in_any_order(folders: list[Path], graphs: list[Any]) -> None:
    """Routed by token, routed by sequence, and the base."""
    recorded, plain = both(folders)
    rows = [asked(text) for text in PROMPTS]
    for name in [*plain.names, plain.names[0], plain.names[1]]:
        for questions in (rows[:3], rows[3:], rows[1:]):
            assert recorded.answers(questions, name, HOW) == plain.answers(questions, name, HOW)
    assert len(graphs) == 6  # of three rows and of one, for each name
    assert min(graph.replays for graph in graphs) >= 11
    long = Sampling(300)
    assert recorded.answers(rows[:1], "first", long) == plain.answers(rows[:1], "first", long)
    assert len(graphs) == 7  # more slots


def test_a_server_that_is_warm_has_recorded_a_step_of_every_name(folders: list[Path], graphs: list[Any]) -> None:
    pytest.importorskip("fastapi")
    from monkeyjump.serving.batching import OneThread

    recorded, plain = both(folders)
    OneThread().warm_up(recorded)
    assert len(graphs) == 3
    for name in plain.names:
        assert recorded.answers([asked("Go")], name, HOW) == plain.answers([asked("Go")], name, HOW)
    assert len(graphs) == 3


def test_only_some_recordings_are_kept(folders: list[Path], graphs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "MOST", 2)
    recorded, plain = both(folders)
    for name in [*plain.names, *plain.names]:
        assert recorded.answers([asked("Go")], name, HOW) == plain.answers([asked("Go")], name, HOW)
    assert len(graphs) == 6
    assert len(recorded.decoding._recorded) == 2


def test_draws_are_those_of_generate(folders: list[Path], graphs: list[Any]) -> None:
    found = []
    for answerer in both(folders):
        torch.manual_seed(3)
        found.append(answerer.answers([asked("Go"), asked("Stay")], "first", Sampling(20, 0.8)))
    assert found[0] == found[1]
    assert graphs[0].replays == 19


def test_tokens_come_one_by_one(folders: list[Path], graphs: list[Any]) -> None:
    class Heard(list):
        ended = False

        def put(self, tokens: Tensor) -> None:
            self.append(tokens.flatten().tolist())

        def end(self) -> None:
            self.ended = True

    heard = []
    for answerer in both(folders):
        heard.append(Heard())
        answerer.answers([asked("Go")], "second", HOW, heard[-1])
    assert heard[0] == heard[1]
    assert len(heard[0]) == 13  # the prompt, as Transformers tells it, and twelve tokens
    assert heard[0].ended


def test_rows_end_by_themselves(folders: list[Path], graphs: list[Any]) -> None:
    recorded, plain = both(folders)
    questions = [asked(text) for text in PROMPTS]
    ids = plain.tokenizer(plain.answers(questions, "first", HOW), add_special_tokens=False)["input_ids"]
    for answerer in (recorded, plain):
        answerer.ends = [ids[0][2], ids[1][5]]
    found = recorded.answers(questions, "first", HOW)
    assert found == plain.answers(questions, "first", HOW)
    assert len({len(answer) for answer in found}) > 1


def test_tasks(base: Path, tmp_path: Path, graphs: list[Any]) -> None:
    tasked = save_adapter(base, tmp_path / "tasked", 3, granularity="task")
    (tasked / "recipe.json").write_text(json.dumps({"origin": {"task_ids": {"one": 0, "two": 1}}}), encoding="utf-8")
    recorded, plain = both([tasked], base)
    questions = [asked("Hello", task="one"), asked("Hello", task="two"), asked("Go", task="one")]
    for order in (questions, questions[::-1]):
        found = recorded.answers(order, "tasked", HOW)
        assert found == plain.answers(order, "tasked", HOW)
        assert len(set(found)) == 3


def test_layers_of_peft_are_not_recorded(base: Path, tmp_path: Path, graphs: list[Any]) -> None:
    """They index rows by lists, which a graph cannot hold."""
    lora = get_peft_model(load_model(str(base))[0], LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    lora.save_pretrained(str(tmp_path / "lora"))
    headed = save_adapter(base, tmp_path / "headed", 4, modules_to_save=["lm_head"])
    for folder in (tmp_path / "lora", headed):
        with pytest.warns(MonkeyJumpWarning, match="PEFT's own layers pick the rows"):
            asis, _ = both([folder])
        for name in asis.names:
            ids = asis.inputs([asked(text) for text in PROMPTS[:3]], name)
            names, how = [asis.peft_name(name)] * 3, asis.settings(HOW, 100)
            expected = asis.model.generate(**ids, generation_config=how, adapter_names=names)
            assert torch.equal(asis.generate(names, **ids, generation_config=how), expected)
    assert not graphs


def test_a_cache_is_kept_whatever_the_model_was_saved_with(base: Path, folders: list[Path], graphs: list[Any]) -> None:
    recorded, plain = both(folders)
    expected = plain.answers([asked("Go")], "first", HOW)
    for part in (recorded.model.config, recorded.model.generation_config):
        part.use_cache = False
    assert recorded.answers([asked("Go")], "first", HOW) == expected
    assert len(graphs) == 1


def test_stop_strings(folders: list[Path], graphs: list[Any]) -> None:
    pytest.importorskip("fastapi")
    from monkeyjump.serving.completions import ModelOfRequest, Stop
    from monkeyjump.serving.requests import ChatRequest

    found = []
    for answerer in both(folders):
        text = answerer.answers([asked("Go")], "first", HOW)[0]
        request = ChatRequest(model="first", messages=[{"role": "user", "content": "Go"}], stop=[text[4:6]])  # type: ignore[list-item]
        inputs, settings = answerer.inputs([asked("Go")], "first"), answerer.settings(HOW, 100)
        model = ModelOfRequest(answerer, request, Stop())
        made = model.generate(**inputs, generation_config=settings, tokenizer=answerer.tokenizer)
        found.append(answerer.tokenizer.decode(made[0, inputs["input_ids"].shape[1] :]))
        assert found[-1] == text[: text.index(text[4:6]) + 2]
    assert found[0] == found[1]


def test_a_recording_without_memory_costs_that_answer_alone(
    folders: list[Path], graphs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded, plain = both(folders)
    expected = plain.answers([asked("Go")], "first", HOW)

    def no_memory(self: Any, work: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with monkeypatch.context() as patch:
        patch.setattr(Counted, "record", no_memory)
        with pytest.warns(MonkeyJumpWarning, match="out of memory"):
            assert recorded.answers([asked("Go")], "first", HOW) == expected
    assert recorded.answers([asked("Go")], "first", HOW) == expected
    assert len(graphs) == 1


def test_pictures(tmp_path: Path, graphs: list[Any]) -> None:
    model, _ = load_model(str(save_visual_model(tmp_path / "model")))
    saved = adapted(model)
    disturb(saved, seed=4)
    saved.save_pretrained(str(tmp_path / "visual"))
    questions = []
    for color in ("red", "blue"):
        Image.new("RGB", (28, 28), color).save(tmp_path / f"{color}.png")
        questions.append(
            Question([{"role": "user", "content": "What?"}], (Media("image", str(tmp_path / f"{color}.png")),))
        )
    recorded, plain = both([tmp_path / "visual"])
    found = [recorded.answers([question], "visual", HOW) for question in questions]
    assert found == [plain.answers([question], "visual", HOW) for question in questions]
    assert found[0] != found[1]
    assert len(graphs) == 1


def test_what_cannot_be_recorded_goes_on_as_it_is(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "new_graph", lambda reader: lambda: Refuses(reader.model))
    recorded, plain = both(folders)
    questions = [asked(text) for text in PROMPTS]
    with pytest.warns(MonkeyJumpWarning, match="without CUDA graphs: operation not permitted when stream is capturing"):
        found = recorded.answers(questions, "second", HOW)
    assert found == plain.answers(questions, "second", HOW)
    assert recorded.answers(questions, "first", HOW) == plain.answers(questions, "first", HOW)
    assert recorded.decoding.arguments(["first"], None) == {}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu(folders: list[Path]) -> None:
    recorded, plain = both(folders)
    questions = [asked(text) for text in PROMPTS]
    for name in [*plain.names, *plain.names]:
        assert recorded.answers(questions, name, HOW) == plain.answers(questions, name, HOW)
    assert len(recorded.decoding._recorded) == 3
