"""What is kept on disk between runs: the same as made anew, and never of anything that has changed since."""

from __future__ import annotations

import copy
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from monkeyjump import tasks
from monkeyjump.tasks import cache, encode, load, mixture
from monkeyjump.tasks.custom import simple_task
from monkeyjump.tasks.encode import Encoder
from monkeyjump.tasks.mixture import Mixture
from monkeyjump.tasks.preflight import look_at
from monkeyjump.tasks.task import Example, Task


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cache"
    monkeypatch.setattr(cache, "folder", lambda: path)
    monkeypatch.setattr(load, "_loaded", {})
    return path


def write(path: Path, count: int = 60, word: str = "row") -> None:
    rows = ({"text": f"{word} {n}", "context": "c" * 3 * n, "label": n % 2} for n in range(count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def task_of(tmp_path: Path, prompt: str = "{text}?", options: Any = ("no", "yes")) -> Task:
    path = tmp_path / "train.jsonl"
    if not path.exists():
        write(path)
    data = {"train": path, "test": path}
    return simple_task("own", prompt=prompt, context="{context}", options=options, answer="label", data=data)


def sequences(items: Any) -> list[tuple[list[int], int, int]]:
    return [(item.input_ids.tolist(), item.prompt_length, item.task_id) for item in items]


def assert_as_made_anew(task: Task, tokenizer: Any, cap: int | None = None, **settings: Any) -> None:
    """A mixture, twice, is what encoding the examples gives, with the same counts."""
    settings = {"max_length": 130, **settings}
    plain = Encoder(tokenizer, {"own": 0}, **settings)
    examples = tasks.load_examples(task, "train")
    expected = sequences(plain.encode_all(examples[n] for n in mixture.draw(len(examples), cap, "0/own/train")))
    for _ in range(2):
        encoder = Encoder(tokenizer, **settings)
        assert sequences(Mixture.load([task], encoder, caps=None if cap is None else {"own": cap})) == expected
        assert encoder.counts == plain.counts


def test_the_second_time_nothing_is_read(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    task = task_of(tmp_path)
    assert_as_made_anew(task, tokenizer)
    looks = look_at([task])
    monkeypatch.setattr(load, "read_rows", lambda _path: pytest.fail("the file was read again"))
    encoder = Encoder(tokenizer, max_length=130)
    assert len(Mixture.load([task], encoder)) == encoder.counts.encoded["own"] > 0
    assert encoder.counts.truncated["own"] > 0
    assert look_at([task]) == looks


def test_a_file_is_read_once_for_train_and_validation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task, read, seen = task_of(tmp_path), load.read_rows, list[Path]()

    def counted(path: Path) -> Any:
        seen.append(path)
        return read(path)

    monkeypatch.setattr(load, "read_rows", counted)
    look_at([task], splits=["train", "validation"])
    for split in ("train", "validation"):
        examples = tasks.load_examples(task, split)
        assert examples == list(load.SplitData(task, split).examples())
        assert tasks.load_examples(task, split, limit=2) == examples[:2]
        examples.clear()  # a list of one's own
    assert len(seen) == 1 + 2  # the look, and what was streamed here
    assert tasks.load_examples(task, "train") + tasks.load_examples(task, "validation")
    write(tmp_path / "train.jsonl", word="new")
    assert all("new" in example.question for example in tasks.load_examples(task, "train"))
    monkeypatch.setattr(load, "_MOST_LOADED", 50)
    tasks.load_examples(tasks.get("opinion"), "train")
    assert len(load._loaded) == 1


def test_prompts_and_validation_rows_are_read_as_they_were_made(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a task whose texts are cut, and one of which does not fit."""
    monkeypatch.setattr(encode, "_WORTH_KEEPING", 1)
    monkeypatch.setattr(load, "VALIDATION_FRACTION", 0.5)
    task = task_of(tmp_path)
    found = []
    for once in (True, False):
        load._loaded.clear()
        encoder = Encoder(tokenizer, {"own": 0}, max_length=130)
        if not once:
            monkeypatch.setattr(load.SplitData, "all_rows", None)  # nobody reads
        examples = tasks.load_examples(task, "validation")
        long = replace(examples[0], question="why " * 200)
        if not once:
            monkeypatch.setattr(encoder, "_fit", None)  # nobody encodes
        found.append((examples, encoder.prompt_ids([*examples, long]), encoder.counts))
    assert found[0] == found[1]
    assert found[0][1][-1] is None
    assert found[0][2].truncated["own"] > 0
    other = Encoder(tokenizer, {"own": 0}, max_length=140)
    assert other.prompt_ids(examples) == [ids for example in examples for ids in other.prompt_ids([example])]


def test_whatever_changes_is_made_anew(tmp_path: Path, tokenizer: Any) -> None:
    other = copy.deepcopy(tokenizer)
    other.chat_template = other.chat_template.replace("assistant", "bot")
    longer = copy.deepcopy(tokenizer)
    longer.add_tokens(["row"])
    for task in (task_of(tmp_path), task_of(tmp_path, "{text}!"), task_of(tmp_path, options=("nay", "yea"))):
        for changed in (tokenizer, other, longer):
            assert_as_made_anew(task, changed)
    settings: list[dict[str, Any]]
    settings = [{"cap": 9}, {"max_length": 100}, {"answer_format": "text"}]
    for setting in settings:
        assert_as_made_anew(task, tokenizer, **setting)
    write(tmp_path / "train.jsonl", word="new")
    assert_as_made_anew(task, tokenizer)
    assert {answer for look in look_at([task]) for answer in look.answers} == {"nay", "yea"}


def test_code_of_the_user_is_not_trusted_to_stay_the_same(tmp_path: Path, tokenizer: Any) -> None:
    task = task_of(tmp_path)
    for question in ("Why?", "How?"):

        def render(row: Any, question: str = question) -> Example:
            return Example(question=question, options=("no", "yes"), label=row["label"])

        assert load.SplitData(replace(task, render=render), "train").origin() is None
        assert_as_made_anew(replace(task, render=render), tokenizer)
    assert load.SplitData(tasks.get("sst2"), "train").origin() is None  # of the hub
    builtin = tasks.get("opinion")
    places = [(builtin, "train", 0), (builtin, "train", 1), (builtin, "test", 0), (tasks.get("place"), "train", 0)]
    known = {load.SplitData(task, split, seed=seed).origin() for task, split, seed in places}
    assert len(known - {None}) == 4


@pytest.mark.parametrize("damage", [lambda b: b[:-5], lambda b: b[:10], lambda _: b"", lambda b: b[:-1] + b"\xff"])
def test_damaged_entries_are_made_again(tmp_path: Path, tokenizer: Any, folder: Path, damage: Any) -> None:
    task = task_of(tmp_path)
    assert_as_made_anew(task, tokenizer)
    look_at([task])
    whole = {path: path.read_bytes() for path in folder.iterdir()}
    assert len(whole) == 5
    for path, content in whole.items():
        path.write_bytes(damage(content))
    load._loaded.clear()
    assert_as_made_anew(task, tokenizer)
    look_at([task])
    assert {path: path.read_bytes() for path in folder.iterdir()} == whole


def test_a_file_that_changes_while_it_is_read_is_not_kept(
    tmp_path: Path, tokenizer: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, read = task_of(tmp_path), load.read_rows

    def slowly(path: Path) -> Any:
        yield from read(path)
        write(path, word=f"row {time.time()}")

    monkeypatch.setattr(load, "read_rows", slowly)
    Mixture.load([task], Encoder(tokenizer))
    look_at([task], splits=["test"])
    assert not folder.exists()


def test_a_change_that_the_time_of_a_file_does_not_tell(tmp_path: Path) -> None:
    path, hashes = tmp_path / "a", set()
    for number in range(3):
        path.write_text(str(number))
        os.utime(path, ns=(0, time.time_ns() // 10**9 * 10**9))  # of a system that counts seconds
        hashes.add(load.file_hash(path))
    assert len(hashes) == 3


def test_old_entries_and_the_oldest_of_many_are_dropped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_BYTES", 200)
    cache.write("old", b"o" * 10)
    os.utime(folder / "old", (0, time.time() - 31 * 86_400))
    for age, name in enumerate(("third", "second", "first")):
        cache.write(name, b"x" * 40)  # 72 with the digest
        os.utime(folder / name, (0, time.time() - 1000 + age))
    assert cache.read("third") is None  # 216 bytes are too many
    assert cache.read("second") == b"x" * 40  # and now it is the newest
    cache.write("more", b"x" * 40)
    assert sorted(path.name for path in folder.iterdir()) == ["more", "second"]


def test_who_reads_while_others_write_gets_a_whole_entry(folder: Path) -> None:
    contents = [bytes([number]) * 200_000 for number in range(4)]
    with ThreadPoolExecutor() as pool:
        writing = [pool.submit(cache.write, "name", content) for content in contents * 10]
        found = [cache.read("name") for _ in range(50)]
        for one in writing:
            one.result()
    assert all(content is None or bytes(content) in contents for content in found)
    assert cache.read("name") in contents
    assert len(list(folder.iterdir())) == 1


def test_without_a_place_to_write_the_work_is_done_again(tmp_path: Path, tokenizer: Any, folder: Path) -> None:
    folder.write_text("not a folder")
    assert_as_made_anew(task_of(tmp_path), tokenizer)
