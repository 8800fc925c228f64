"""The files people have: whatever the format, the same rows come out, and what is wrong with a file is one message."""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from monkeyjump import tasks
from monkeyjump.errors import ConfigError
from monkeyjump.tasks.cells import lookup, opened
from monkeyjump.tasks.custom import simple_task
from monkeyjump.tasks.files import read_rows

ROWS = [
    {"text": 'He said "no"; then, a\nnew line', "label": "1"},
    {"text": "naïve ünïcode", "label": "0"},
    {"text": "a|b\tc", "label": "1"},
]


def table(delimiter: str) -> bytes:
    file = io.StringIO()
    writer = csv.DictWriter(file, ["text", "label"], delimiter=delimiter)
    writer.writeheader()
    writer.writerows(ROWS)
    return file.getvalue().encode()


def parquet(rows: list[dict[str, Any]]) -> bytes:
    pyarrow, format_ = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    buffer = io.BytesIO()
    format_.write_table(pyarrow.Table.from_pylist(rows), buffer)
    return buffer.getvalue()


LINES = "".join(json.dumps(row) + "\n\n" for row in ROWS).encode()
FILES: dict[str, Callable[[], bytes]] = {
    "a.jsonl": lambda: LINES,
    "a.ndjson": lambda: LINES,
    "A.JSONL.GZ": lambda: gzip.compress(LINES),
    "a.json": lambda: json.dumps(ROWS, indent=1).encode(),
    "a.json.gz": lambda: gzip.compress(json.dumps(ROWS).encode()),
    "a.csv": lambda: table(","),
    "mark.csv": lambda: b"\xef\xbb\xbf" + table(","),
    "semicolon.csv": lambda: table(";"),
    "bar.csv": lambda: table("|"),
    "a.csv.gz": lambda: gzip.compress(table(";")),
    "unix.csv": lambda: table(",").replace(b"\r\n", b"\n") + b"\n\n",
    "a.tsv": lambda: table("\t"),
    "a.parquet": lambda: parquet(ROWS),
}


@pytest.mark.parametrize("name", FILES)
def test_every_format_gives_the_same_rows(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(FILES[name]())
    assert list(read_rows(tmp_path / name)) == ROWS


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("a.xlsx", b"", "is in no format that can be read; these are .jsonl, .jsonl.gz, .ndjson, .json"),
        ("a.csv", b"", "is empty: its first line must name the columns"),
        ("a.csv", b"text,label\nx,1\na, b,1\n", "line 3 has 3 cells, but the first line names 2 columns"),
        ("a.csv", b"text,label\nx\n", "line 2 has 1 cells"),
        ("a.csv", b'text,label\n"open,1\nx,0\n', "line 3 is not CSV (unexpected end of data)"),
        ("a.csv", b"text,text\nx,1\n", "names the columns 'text' twice"),
        ("a.csv", "text,label\né,1\n".encode("latin-1"), "save it as UTF-8"),
        ("a.csv.gz", b"text,label\n", "cannot be read (Not a gzipped file"),
        ("a.jsonl", b'{"text": 1}\n[1]\n', "line 2 is a list, not a JSON object with columns"),
        ("a.jsonl", b'[{"text": 1},\n', "line 1 is not JSON"),
        ("a.json", b'{"text": 1}', "holds a dict: write a list of objects"),
        ("a.json", b"[1]", "entry 1 is a int, not a JSON object"),
        ("a.parquet", b"nothing", "is not a parquet file that can be read"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_message(name: str, content: bytes, part: str, tmp_path: Path) -> None:
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        list(read_rows(tmp_path / name))
    assert part in str(caught.value)
    assert str(tmp_path / name) in str(caught.value)


def test_parquet_without_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"")
    with pytest.raises(ConfigError, match=r'pip install "monkeyjump\[parquet\]"'):
        list(read_rows(tmp_path / "a.parquet"))


# -- nested columns -----------------------------------------------------------------------------

NESTED = {"label": ["A", "B", "C"], "text": ["red", "green", "blue"]}
ARRAYS = "{'label': array(['A', 'B', 'C'], dtype=object), 'text': array(['red', 'green',\n 'blue'], dtype=object)}"


@pytest.mark.parametrize(
    "row",
    [
        {"choices": NESTED},
        {"choices": json.dumps(NESTED)},
        {"choices": str(NESTED)},
        {"choices": ARRAYS},
        {"choices": [{"label": a, "text": b} for a, b in zip(NESTED["label"], NESTED["text"], strict=True)]},
        {"choices.label": NESTED["label"], "choices.text": NESTED["text"]},
        {"choices.label": str(NESTED["label"]), "choices.text": json.dumps(NESTED["text"])},
        {"choices": dict(zip(NESTED["label"], NESTED["text"], strict=True))},
        {"choices": NESTED["text"]},
    ],
    ids=["nested", "JSON", "Python", "NumPy", "pairs", "flat", "flat text", "labelled", "plain"],
)
@pytest.mark.parametrize("gold", ["B", "green", 1, 1.0, "1", "1.0"])
def test_choices_in_every_form(row: dict[str, Any], gold: Any) -> None:
    task = simple_task("q", prompt="{question}?", options="choices", answer="gold", data={"hub": "x"})
    example = task.example({"question": "Colour", "gold": gold, **row})
    assert (example.options, example.label) == (("red", "green", "blue"), 1)


def test_labels_come_before_texts_and_indices() -> None:
    task = simple_task("q", prompt="?", options="choices.text", answer="gold", data={"hub": "x"})
    choices = {"label": ["1", "2", "3"], "text": ["2", "3", "1"]}
    assert task.example({"choices": choices, "gold": 2}).label == 1
    assert task.example({"choices": choices, "gold": "2.0"}).label == 1


def test_paths_into_a_row() -> None:
    row = {"a": {"b": [{"c": 1}, {"c": 2}]}, "x.y": ["flat"], "cell": '{"deep": [10, 20]}'}
    found = [lookup(row, path) for path in ("a.b[1].c", "a.b.c", "x.y[0]", "cell.deep[-1]")]
    assert found == [2, [1, 2], "flat", 20]
    task = simple_task("q", prompt="{a.b[0].c}, {cell.deep[1]}, {{x}}", answer="x.y[0]", data={"hub": "x"})
    example = task.example(row)
    assert (example.question, example.answer) == ("1, 20, {x}", "flat")
    with pytest.raises(ConfigError, match=r"row 2: template .* cannot be filled \('a' holds no 'z' \(it has b\)\)"):
        simple_task("q", prompt="{a.z}", answer="x.y[0]", data={"hub": "x"}).example(row, 2)
    with pytest.raises(ConfigError, match=r"no column 'nothing.here'"):
        simple_task("q", prompt="{nothing.here}", answer="x.y[0]", data={"hub": "x"}).example(row)


def test_a_template_reaches_no_attributes() -> None:
    task = simple_task("q", prompt="{text.__class__}", answer="text", data={"hub": "x"})
    with pytest.raises(ConfigError, match="'text' holds no '__class__'"):
        task.example({"text": "secret"})


def test_text_that_looks_nested_stays_text() -> None:
    assert [opened(text) for text in ("[sic] he said", "{not closed", "[1, 2", "plain")] == [
        "[sic] he said",
        "{not closed",
        "[1, 2",
        "plain",
    ]


# -- labels from tables -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "value", "answer"),
    [
        (["no", "yes"], 1.0, "yes"),
        (["no", "yes"], "1.0", "yes"),
        (["no", "yes"], "True", "yes"),
        ({0: "no", 1: "yes"}, 1.0, "yes"),
        ({"false": "no", "true": "yes"}, "TRUE", "yes"),
        (["1.0", "2.0"], 1.0, "1.0"),
        (["1", "2"], 1.0, "1"),
        (["0.5", "1.5"], 1.5, "1.5"),
    ],
)
def test_labels_as_tables_write_them(options: Any, value: Any, answer: str) -> None:
    task = simple_task("mine", prompt="?", answer="gold", options=options, data={"hub": "x"})
    assert task.example({"gold": value}).answer == answer


@pytest.mark.parametrize("value", [None, float("nan"), ""])
def test_an_empty_answer_is_named_and_an_empty_text_is_empty(value: Any) -> None:
    task = simple_task("mine", prompt="{a}!", answer="gold", options=["no", "yes"], data={"hub": "x"})
    with pytest.raises(ConfigError, match=r"row 7: the answer \(column 'gold'\) is empty"):
        task.example({"a": "x", "gold": value}, 7)
    assert task.example({"a": value, "gold": 0}).question == "!"


@pytest.mark.parametrize(
    ("name", "row", "label"),
    [
        ("sst2", {"sentence": "x", "label": "1"}, 1),
        ("sst2", {"sentence": "x", "label": 1.0}, 1),
        ("boolq", {"question": "q", "passage": "p", "answer": "True"}, 1),
        ("stsb", {"sentence1": "a", "sentence2": "b", "score": "3.6"}, 4),
        ("hellaswag", {"ctx": "c", "endings": "['a', 'b', 'c', 'd']", "label": 2.0}, 2),
        ("arc_easy", {"question": "q", "choices": ARRAYS, "answerKey": "C"}, 2),
        ("arc_easy", {"question": "q", "choices": json.dumps(NESTED), "answerKey": "3"}, 2),
        ("social_iqa", dict.fromkeys(("context", "question", "answerA", "answerB", "answerC"), "") | {"label": 3.0}, 2),
    ],
)
def test_the_papers_tasks_from_tables(name: str, row: dict[str, Any], label: int) -> None:
    assert tasks.get(name).example(row).label == label


def test_true_is_no_one() -> None:
    with pytest.raises(ConfigError, match="label True is not one of 0, 1"):
        tasks.get("sst2").example({"sentence": "x", "label": True})
    with pytest.raises(ConfigError, match="label 1 is not one of False, True"):
        tasks.get("boolq").example({"question": "q", "passage": "p", "answer": 1})


def test_a_folder_may_hold_any_format(tmp_path: Path) -> None:
    (tmp_path / "sst2").mkdir()
    (tmp_path / "sst2" / "train.csv").write_text("sentence,label\nfine,1\nbad,0\n")
    (tmp_path / "sst2" / "test.parquet").write_bytes(parquet([{"sentence": "good", "label": 1.0}]))
    assert [e.label for e in tasks.load_examples(tasks.get("sst2"), "train", tmp_path)] == [1, 0]
    assert [e.label for e in tasks.load_examples(tasks.get("sst2"), "test", tmp_path)] == [1]
