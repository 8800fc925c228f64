"""All 14 rows on hand-made data: the right option is the right one, and all that the answer needs is in the prompt."""

from __future__ import annotations

from typing import Any

import pytest

from monkeyjump import tasks
from monkeyjump.errors import ConfigError

_ARC = {"question": "What is hot?", "choices": {"text": ["ice", "fire"], "label": ["A", "B"]}, "answerKey": "B"}
ROWS: list[tuple[str, dict[str, Any], str]] = [
    ("sst2", {"sentence": "a fine day", "label": 1}, "positive"),
    ("qnli", {"question": "Who sang?", "sentence": "Mia sang.", "label": 0}, "yes"),
    ("qnli", {"question": "Who sang?", "sentence": "It rained.", "label": 1}, "no"),
    ("qqp", {"question1": "Why?", "question2": "How come?", "label": 1}, "yes"),
    ("cola", {"sentence": "cup the fell", "label": 0}, "no"),
    ("mrpc", {"sentence1": "It fell.", "sentence2": "It dropped.", "label": 1}, "yes"),
    ("stsb", {"sentence1": "It fell.", "sentence2": "It dropped.", "score": 3.8}, "4"),
    ("stsb", {"sentence1": "It fell.", "sentence2": "It sang.", "label": 0.0}, "0"),  # the hub's column name
    ("boolq", {"question": "is ice cold", "passage": "Ice is cold.", "answer": True}, "yes"),
    ("piqa", {"goal": "dry a cup", "sol1": "use rain", "sol2": "use a towel", "label": 1}, "use a towel"),
    (
        "social_iqa",
        {
            "context": "Mia won.",
            "question": "How is she?",
            "answerA": "sad",
            "answerB": "glad",
            "answerC": "ill",
            "label": "2",
        },
        "glad",
    ),
    ("hellaswag", {"ctx": "He [title] runs", "endings": ["a.", "b.", "c.", "d."], "label": "3"}, "d."),
    ("winogrande", {"sentence": "The _ is big.", "option1": "cup", "option2": "box", "answer": "1"}, "cup"),
    ("arc_easy", _ARC, "fire"),
    ("arc_challenge", {**_ARC, "choices": {"text": ["ice", "fire"], "label": ["1", "2"]}, "answerKey": "2"}, "fire"),
    ("arc_easy", {**_ARC, "answerKey": "1"}, "ice"),  # a numeric key with letters: seen in copies of ARC
    ("openbookqa", {"question_stem": "Hot is", "choices": _ARC["choices"], "answerKey": "A"}, "ice"),
]


@pytest.mark.parametrize(("name", "row", "answer"), ROWS)
def test_row_renders(name: str, row: dict[str, Any], answer: str) -> None:
    example = tasks.get(name).example(row)
    assert example.answer == answer
    assert example.options["ABCDEF".index(example.letter)] == answer
    prompt = example.prompt("letter")
    for letter, option in zip("ABCDEF", example.options, strict=False):
        assert f"\n{letter}. {option}\n" in prompt
    assert example.prompt("text") != prompt  # the prompt says which form of answer is wanted
    for column in ("sentence", "sentence1", "sentence2", "question1", "question2", "passage", "goal", "context"):
        assert str(row.get(column, "")) in prompt


def test_every_task_has_a_row() -> None:
    assert {name for name, _, _ in ROWS} == set(tasks.groups()["text14"])
    assert len(tasks.groups()["text14"]) == 14


def test_families_and_metrics_are_the_papers() -> None:
    groups = tasks.groups()
    assert groups["glue"] == ["sst2", "qnli", "qqp", "cola", "mrpc", "stsb"]
    assert len(groups["commonsense"]) == 8
    assert {name for name in groups["text14"] if tasks.get(name).metric == "spearman"} == {"stsb"}


def test_fixed_options_are_what_is_rendered() -> None:
    for name, row, _ in ROWS:
        task = tasks.get(name)
        if task.options is not None:
            assert task.example(row).options == task.options


def test_stsb_keeps_the_gold_decimal() -> None:
    example = tasks.get("stsb").example({"sentence1": "a", "sentence2": "b", "score": 2.5})
    assert (example.score, example.answer) == (2.5, "3")
    assert [float(option) for option in example.options] == [0, 1, 2, 3, 4, 5]


def test_missing_column_is_named_with_the_row_and_what_is_there() -> None:
    with pytest.raises(ConfigError, match=r"'sst2', row 7 has no column 'sentence'; its columns are 'text', 'label'"):
        tasks.get("sst2").example({"text": "x", "label": 0}, 7)


@pytest.mark.parametrize(
    ("name", "change", "wrong"),
    [
        ("sst2", {"label": 2}, "label 2 is not one of 0, 1"),
        ("sst2", {"label": -1}, "label -1"),  # what the hub has for unlabelled test rows
        ("stsb", {"score": 5.2}, "score 5.2 is not a number from 0 to 5"),
        ("boolq", {"answer": 1}, "label 1 is not one of False, True"),
        ("social_iqa", {"label": "4"}, "label '4'"),
        ("arc_easy", {"answerKey": "C"}, "label 'C' is not one of 'A', 'B'"),
    ],
)
def test_label_outside_the_options(name: str, change: dict[str, Any], wrong: str) -> None:
    row = next(row for known, row, _ in ROWS if known == name)
    with pytest.raises(ConfigError, match=rf"task '{name}', row 3: {wrong}"):
        tasks.get(name).example({**row, **change}, 3)


def test_unknown_task_suggests() -> None:
    with pytest.raises(ConfigError, match=r"unknown task 'hellaswog'. Did you mean 'hellaswag'?"):
        tasks.get("hellaswog")
    with pytest.raises(ConfigError) as error:
        tasks.expand("sst3,boolqq,piqa")
    assert len(error.value.problems) == 2  # all at once


def test_expand_groups_and_names_once_each() -> None:
    assert [task.name for task in tasks.expand("cola,glue")] == ["cola", "sst2", "qnli", "qqp", "mrpc", "stsb"]
