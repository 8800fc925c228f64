from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from monkeyjump import tasks
from monkeyjump.errors import ConfigError
from monkeyjump.tasks.custom import simple_task

TICKETS = """\
name: tickets
prompt: "Ticket: {text}\\nWhich team?"
context: "{history}"
options: [billing, shipping]
answer: team
data:
  train: train.jsonl
  test: test.jsonl
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [{"text": f"no. {n}", "history": "long ago", "team": ["billing", "shipping"][n % 2]} for n in range(200)]
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tickets.yaml").write_text(TICKETS)
    return tmp_path


def test_a_task_in_eight_lines_of_yaml(folder: Path) -> None:
    task = tasks.get(str(folder / "tickets.yaml"))
    example = tasks.load_examples(task, "test")[1]
    assert example.prompt("letter").startswith("long ago\nTicket: no. 1\nWhich team?\nA. billing\nB. shipping\n")
    assert (example.answer, example.letter, example.task) == ("shipping", "B", "tickets")
    assert (task.metric, task.fields) == ("accuracy", ("text", "history", "team"))
    assert len(tasks.load_examples(task, "train")) + len(tasks.load_examples(task, "validation")) == 200


@pytest.mark.parametrize(
    ("options", "value", "answer"),
    [
        (["no", "yes"], "yes", "yes"),
        (["no", "yes"], 1, "yes"),
        (["no", "yes"], True, "yes"),
        (["no", "yes"], "B", "yes"),
        (["true", "false"], True, "true"),
        (["1", "2"], 1, "1"),  # a text before an index
        ({0: "no", 2: "yes"}, 2, "yes"),
        (["{x}!", "{y}!"], 1, "Y!"),
        ("choices", "q", "q"),
        (None, 7, "7"),
    ],
)
def test_ways_to_give_options_and_answers(folder: Path, options: Any, value: Any, answer: str) -> None:
    data = {"test": folder / "test.jsonl"}
    task = simple_task("mine", prompt="{x}?", answer="gold", options=options, data=data)
    assert task.example({"x": "X", "y": "Y", "choices": ["p", "q"], "gold": value}).answer == answer


def test_options_are_what_the_user_wrote(folder: Path) -> None:
    for options, answers in (("[no, yes]", ["no", True]), ("[1_000, 010]", ["1_000", 1]), ("{0: off, 1: ~}", [0, "1"])):
        (folder / "plain.yaml").write_text(TICKETS.replace("[billing, shipping]", options))
        task = tasks.get(str(folder / "plain.yaml"))
        rows = [{"text": "", "history": "", "team": answer} for answer in answers]
        written = options.strip("[]{}").replace("0: ", "").replace("1: ", "").split(", ")
        assert [task.example(row).answer for row in rows] == written == list(task.options or ())


def test_a_hub_task_keeps_the_names_of_its_splits(folder: Path) -> None:
    source = TICKETS.split("data:", maxsplit=1)[0] + "data: {hub: owner/name, config: ~, test: validation}\n"
    (folder / "hub.yaml").write_text(source)
    assert tasks.get(str(folder / "hub.yaml")).source == tasks.HubSource("owner/name", splits={"test": "validation"})


def test_templates_that_cannot_be_filled(folder: Path) -> None:
    (folder / "open.yaml").write_text(TICKETS.replace("{text}", "{text"))
    with pytest.raises(ConfigError, match=r"template 'Ticket: \{text.*expected '\}' before end of string"):
        tasks.get(str(folder / "open.yaml"))
    (folder / "part.yaml").write_text(TICKETS.replace("{text}", "{text.part}"))
    with pytest.raises(
        ConfigError, match=r"row 3: template 'Ticket: \{text.part\}.*cannot be filled \('text' holds no 'part'\)"
    ):
        tasks.get(str(folder / "part.yaml")).example({"text": "", "history": "", "team": "billing"}, 3)


def test_answers_outside_the_options(folder: Path) -> None:
    task = tasks.get(str(folder / "tickets.yaml"))
    with pytest.raises(
        ConfigError, match=r"'tickets', row 4: answer 'legal' is neither one of the options \(billing, ship"
    ):
        task.example({"text": "", "history": "", "team": "legal"}, 4)
    with pytest.raises(ConfigError, match=r"no column 'history'"):
        task.example({"text": "", "team": "billing"})


def test_every_problem_of_a_file_at_once(folder: Path) -> None:
    (folder / "bad.yaml").write_text("promt: x\noptions: [a]\nmetric: acuracy\ndata: {dev: x}\n")
    with pytest.raises(ConfigError) as error:
        tasks.get(str(folder / "bad.yaml"))
    text = str(error.value)
    for part in (
        "unknown key 'promt'. Did you mean 'prompt'?",
        "'name' is missing",
        "Did you mean 'accuracy'",
        "unknown key 'data.dev'",
    ):
        assert part in text
    (folder / "empty.yaml").write_text(
        TICKETS.replace("train: train.jsonl", "").replace("test: test.jsonl", "config: x")
    )
    with pytest.raises(ConfigError, match="data must name files"):
        tasks.get(str(folder / "empty.yaml"))
    with pytest.raises(ConfigError, match=r"cannot be read"):
        tasks.get(str(folder / "nowhere.yaml"))
    (folder / "gone.yaml").write_text(TICKETS.replace("train.jsonl", "gone.jsonl"))
    gone = tasks.get(str(folder / "gone.yaml"))
    with pytest.raises(
        ConfigError, match=r"no such data file: .*gone.jsonl \(train\).*holds tickets/train.jsonl with --d"
    ):
        tasks.load_examples(gone, "train")


def test_a_registered_name_must_be_free() -> None:
    with pytest.raises(ConfigError, match=r"'sst2' is taken"):
        tasks.register(tasks.get("sst2"))


def test_more_options_than_letters(folder: Path) -> None:
    classes = [f"class {n}" for n in range(40)]
    task = simple_task("many", prompt="{x}?", answer="gold", options=classes, data={"test": folder / "test.jsonl"})
    example = task.example({"x": "Which", "gold": "class 39"})
    assert (example.label, example.letter, example.target("letter")) == (39, "", "class 39")
    assert example.targets("letter") == classes
    assert example.prompt("letter") == example.prompt("text") == "Which?\nAnswer with the name alone."
    with pytest.raises(ConfigError, match=r"answer 'B' is neither one of the options .*, nor an index from 0 to 39\."):
        task.example({"x": "Which", "gold": "B"})


def test_answers_of_several_people(folder: Path) -> None:
    task = simple_task(
        "asked", prompt="{x}?", answer="gold", metric="vqa_accuracy", data={"test": folder / "test.jsonl"}
    )
    for cell in (["red", "dark", "red"], '["red", "dark", "red"]'):
        example = task.example({"x": "Which", "gold": cell})
        assert (example.free_answer, example.answers) == ("red", ("red", "dark", "red"))
    assert task.example({"x": "Which", "gold": "[red"}).free_answer == "[red"
