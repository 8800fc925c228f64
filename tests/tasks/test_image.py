"""Every image task on a row with the hub's columns, and the whole way from files, parquet and folders to examples."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from monkeyjump import tasks
from monkeyjump.errors import ConfigError
from monkeyjump.tasks import cache, load
from monkeyjump.tasks.media import BadMediaError, Media
from monkeyjump.tasks.preflight import look_at
from monkeyjump.tasks.task import Example, HubSource
from tests.tasks.pictures import picture

MEDIA = (Media("image", picture()),)
PICTURE = {"bytes": MEDIA[0].content, "path": None}
SHORT = "\nAnswer the question using a single word or phrase."
_CAR = {"type": "Car", "location": [1.0, 2.0, 9.5], "bbox": [0.0, 0.0, 1.0, 1.0], "alpha": 0.1}
_VOTES = ["red"] * 6 + ["dark red"] * 4

# columns that the tasks do not read are left out of the rows; (task, row, question, answer, number of options)
CLASSES: list[tuple[str, Any, str, str, int]] = [
    ("camelyon", True, "tumor", "tumor", 2),
    ("camelyon", False, "normal", "normal", 2),
    ("svhn", 7, "Which digit", "7", 10),
    ("pets", 36, "Which breed", "yorkshire terrier", 37),
    ("pets", "Egyptian_Mau", "Which breed", "egyptian mau", 37),  # the name of a class folder
    ("flowers102", 0, "Which flower", "pink primrose", 102),
    ("flowers102", 101, "Which flower", "blackberry lily", 102),
    ("eurosat", 9, "satellite", "sea lake", 10),
    ("eurosat", "AnnualCrop", "satellite", "annual crop", 10),
    ("caltech101", 46, "What is in", "hawksbill", 102),
    ("caltech101", "Faces_easy", "What is in", "faces easy", 102),
    ("retinopathy", 4, "How severe", "proliferative", 5),
    ("kitti_distance", [_CAR, {**_CAR, "type": "Cyclist", "location": [0, 0, 1]}], "closest", "8 to 20 meters", 4),
    ("kitti_distance", [{**_CAR, "location": [0, 0, 3]}, _CAR], "closest", "less than 8 meters", 4),
    ("kitti_distance", [{**_CAR, "type": "Van", "location": [0, 0, 31]}], "closest", "more than 20 meters", 4),
    ("kitti_distance", [{**_CAR, "type": "DontCare"}], "closest", "no vehicle", 4),
]
QUESTIONS: list[tuple[str, dict[str, Any], Example]] = [
    (
        "chartqa",
        {"query": "How many? ", "label": ["14"], "human_or_machine": 0},
        Example(f"How many?{SHORT}", free_answer="14", metric="relaxed_accuracy"),
    ),
    (
        "okvqa",
        {"question_id": "17", "question": "Which color?", "answers": _VOTES, "answer_type": "other"},
        Example(f"Which color?{SHORT}", free_answer="red", answers=tuple(_VOTES), metric="vqa_accuracy"),
    ),
    (
        "scienceqa",
        {"question": "Which is hot?", "choices": ["ice", "fire"], "answer": 1, "hint": "Look.", "lecture": "..."},
        Example("Which is hot?", ("ice", "fire"), 1, context="Look.", metric="accuracy"),
    ),
    (
        "seed_bench",
        {
            **{"choice_a": "one", "choice_b": "two", "choice_c": "three", "choice_d": "four"},
            **{"question": "How many?", "answer": "C", "data_id": "1", "question_type_id": 5},
        },
        Example("How many?", ("one", "two", "three", "four"), 2, metric="accuracy"),
    ),
    (
        "text_recognition",
        {"text": "Delikatesem"},
        Example("What is the text in the image? Answer with the text alone.", free_answer="Delikatesem"),
    ),
    (
        "textvqa",
        {"question_id": 3, "question": "what brand?", "answers": _VOTES, "ocr_tokens": ["RED"]},
        Example(f"what brand?{SHORT}", free_answer="red", answers=tuple(_VOTES), metric="vqa_accuracy"),
    ),
    (
        "vizwiz_vqa",
        {"question_id": "a.jpg", "question": "What is it?", "answers": [{"answer": a} for a in _VOTES]},
        Example(
            "What is it?\nWhen the provided information is insufficient, respond with 'Unanswerable'." + SHORT,
            free_answer="red",
            answers=tuple(_VOTES),
            metric="vqa_accuracy",
        ),
    ),
    (
        "vqa_rad",
        {"question": "Is it broken?", "answer": "yes"},
        Example(f"Is it broken?{SHORT}", free_answer="yes"),
    ),
]


@pytest.mark.parametrize(("name", "label", "question", "answer", "count"), CLASSES)
def test_classes(name: str, label: Any, question: str, answer: str, count: int) -> None:
    task = tasks.get(name)
    example = task.example({"image": PICTURE, "label": label})
    assert (example.answer, len(example.options), example.media) == (answer, count, MEDIA)
    assert (task.modality, task.metric, task.options) == ("image", "accuracy", example.options)
    for form in ("letter", "text"):
        assert question in example.prompt(form)
        assert (f"A. {example.options[0]}" in example.prompt(form)) == (count <= 26)
    assert example.target("letter") == (example.letter if count <= 26 else answer)
    with pytest.raises(ConfigError, match=rf"task '{name}', row 3: label 'x' is neither a class nor a number"):
        task.example({"image": PICTURE, "label": "x"}, number=3)


@pytest.mark.parametrize(("name", "row", "expected"), QUESTIONS)
def test_questions(name: str, row: dict[str, Any], expected: Example) -> None:
    example = tasks.get(name).example({"image": PICTURE, **row})
    assert example == replace(expected, task=name, media=MEDIA)
    assert example.metric == tasks.get(name).metric


def test_the_groups_are_the_papers() -> None:
    groups = tasks.groups()
    tested = {name for name, *_ in (*CLASSES, *QUESTIONS)}
    assert tested == {*groups["image14"], "retinopathy", "kitti_distance"}
    assert len(groups["image14"]) == 14
    assert tested == {*groups["image_classes"], *groups["vision_qa"]}
    assert len(groups["vision_qa"]) == 8


def test_clips_of_several_pictures() -> None:
    row = dict(QUESTIONS[3][1], image=[PICTURE, PICTURE])
    assert tasks.get("seed_bench").example(row).media == MEDIA * 2


# -- from data to examples ----------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder, with a cache of its own."""
    monkeypatch.setattr(cache, "folder", lambda: tmp_path / "cache" / "data")
    monkeypatch.setattr(load, "_loaded", {})
    return tmp_path


def photos(home: Path, count: int = 80) -> list[str]:
    (home / "photos").mkdir()
    names = [f"photos/{number}.png" for number in range(count)]
    for number, name in enumerate(names):
        (home / name).write_bytes(picture((number, 0, 0)))
    return names


PETS = """\
name: mine
image: photo
prompt: Which animal?
options: [cat, dog]
answer: label
data: {train: rows.jsonl, test: rows.jsonl}
"""


def task_in(home: Path, rows: list[dict[str, Any]], text: str = PETS) -> tasks.Task:
    (home / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (home / "mine.yaml").write_text(text)
    return tasks.get(str(home / "mine.yaml"))


def test_a_task_file_with_pictures(home: Path) -> None:
    task = task_in(home, [{"photo": name, "label": n % 2} for n, name in enumerate(photos(home))])
    assert (task.modality, task.media, task.fields) == ("image", ("photo",), ("label",))
    looks = look_at([task])
    test = tasks.load_examples(task, "test")
    assert test[3].media == (Media("image", str(home / "photos" / "3.png")),)
    assert test[3].answer == "dog"
    parts = [tasks.load_examples(task, split) for split in ("train", "validation")]
    assert [look.rows for look in looks] == [*map(len, parts), 80]
    load._loaded.clear()
    assert tasks.load_examples(task, "validation") == parts[1]  # from the disk


def test_kept_examples_are_those_of_the_task_as_it_is_now(home: Path) -> None:
    """Another column, another metric or another folder with the same rows is another origin."""
    names = photos(home)
    rows = [{"photo": name, "other": names[-1], "label": n % 2} for n, name in enumerate(names)]
    task = task_in(home, rows)
    known = tasks.load_examples(task, "validation")
    other = task_in(home, rows, PETS.replace("image: photo", "image: other"))
    assert {one.media[0].content for one in tasks.load_examples(other, "validation")} == {str(home / names[-1])}
    free = PETS.replace("options: [cat, dog]\n", "")
    assert {one.metric for one in tasks.load_examples(task_in(home, rows, free), "validation")} == {"exact_match"}
    relaxed = task_in(home, rows, free + "metric: relaxed_accuracy\n")
    assert {one.metric for one in tasks.load_examples(relaxed, "validation")} == {"relaxed_accuracy"}
    moved = home / "moved"
    moved.mkdir()
    for name in ("photos", "rows.jsonl", "mine.yaml"):
        (home / name).rename(moved / name)
    (moved / "mine.yaml").write_text(PETS)
    found = tasks.load_examples(tasks.get(str(moved / "mine.yaml")), "validation")
    assert [one.media[0].content for one in found] == [
        str(one.media[0].content).replace(str(home), str(moved)) for one in known
    ]


def test_what_is_gone_from_the_cache_is_made_again(home: Path) -> None:
    task = parquet_task(home, [picture((n, 1, 1)) for n in range(60)])
    known = tasks.load_examples(task, "validation")
    for file in (home / "cache" / "media").rglob("*"):
        if file.is_file():
            file.unlink()
    load._loaded.clear()
    assert tasks.load_examples(task, "validation") == known
    assert all(Path(str(one.media[0].content)).is_file() for one in known)


def test_several_columns_of_pictures(home: Path) -> None:
    a, b, c = photos(home, 3)
    rows: list[dict[str, Any]] = [{"x": a, "y": b, "label": 0}, {"x": None, "y": [b, c], "label": 1}]
    task = task_in(home, rows, PETS.replace("image: photo", "image: [x, y]"))
    found = [[Path(str(one.content)).name for one in e.media] for e in tasks.load_examples(task, "test")]
    assert found == [["0.png", "1.png"], ["1.png", "2.png"]]
    with pytest.raises(BadMediaError, match=r"row 1: there is no image in 'x' or 'y'\. Fill the cell, or leave"):
        tasks.load_examples(task_in(home, [{"x": None, "y": "", "label": 0}], PETS.replace("photo", "[x, y]")), "test")


def test_a_look_finds_every_problem_before_the_work(home: Path) -> None:
    good = photos(home, 40)
    (home / "photos" / "cut.png").write_bytes(picture(size=(40, 40))[:70])
    names = ["photos/cut.png", *good, "photos/gone.png", "../out.png"]
    task = task_in(home, [{"photo": name, "label": 0} for name in names])
    with pytest.raises(ConfigError) as error:
        look_at([task], splits=["test"])
    for part in ("row 42: image 'photos/gone.png': there is no such file", "row 43: image '../out.png' is outside"):
        assert f"task 'mine', {part}" in str(error.value)
    assert "cut.png' cannot be read (image file is truncated)" in error.value.problems[0]
    task = task_in(home, [{"photo": "photos/cut.png", "label": 0}] * 60)
    with pytest.raises(ConfigError, match=r"task 'mine': image '.*cut\.png' cannot be read .*get it again") as error:
        look_at([task], splits=["test"])
    assert len(error.value.problems) == 1
    with pytest.raises(ConfigError, match="row 1 has no column 'photo'; its columns are 'image', 'label'"):
        look_at([task_in(home, [{"image": good[0], "label": 0}])], splits=["test"])
    (home / "both.yaml").write_text(PETS + "video: clip\n")
    with pytest.raises(ConfigError, match="image and video are both given"):
        tasks.get(str(home / "both.yaml"))


def parquet_task(home: Path, contents: list[bytes]) -> tasks.Task:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [{"photo": {"bytes": content, "path": f"{n}.png"}, "label": n % 2} for n, content in enumerate(contents)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), home / "rows.parquet")
    (home / "mine.yaml").write_text(PETS.replace("rows.jsonl", "rows.parquet"))
    return tasks.get(str(home / "mine.yaml"))


def test_parquet_with_bytes_is_read_into_files(home: Path) -> None:
    contents = [picture((n, 1, 1)) for n in range(60)]
    task = parquet_task(home, contents)
    found = tasks.load_examples(task, "test")
    assert [Path(str(one.media[0].content)).read_bytes() for one in found] == contents
    assert [one.media for one in load.SplitData(task, "test").examples()] == [(Media("image", c),) for c in contents]
    assert len(tasks.load_examples(task, "train")) + len(tasks.load_examples(task, "validation")) == 60


def test_a_folder_for_every_class(home: Path) -> None:
    for split, count in (("train", 3), ("test", 1)):
        for name in ("dog", "cat", "rare"):
            if name == "rare" and split == "test":
                continue
            (home / "zoo" / split / name / "deep").mkdir(parents=True)
            for number in range(count):
                (home / "zoo" / split / name / "deep" / f"{number}.JPG").write_bytes(picture(form="JPEG"))
            (home / "zoo" / split / name / "notes.txt").write_text("")
    text = "name: zoo\nprompt: What is it?\nanswer: label\ndata: {train: zoo/train, test: zoo/test}\n"
    (home / "zoo.yaml").write_text(text)
    task = tasks.get(str(home / "zoo.yaml"))
    assert (task.options, task.modality, task.metric) == (("cat", "dog", "rare"), "image", "accuracy")
    looks = look_at([task], splits=["test"])
    assert [e.answer for e in looks[0].examples] == ["cat", "dog"]
    assert looks[0].examples[1].media == (Media("image", str(home / "zoo" / "test" / "dog" / "deep" / "0.JPG")),)
    assert [state.state for state in tasks.describe(tasks=[task])] == ["local"]
    # the same folders stand for a task of the hub, whose classes have names
    (home / "zoo" / "train" / "dog").rename(home / "zoo" / "train" / "Basset_Hound")
    (home / "zoo").rename(home / "pets")
    with pytest.raises(ConfigError, match="label 'cat' is neither a class nor a number"):
        tasks.load_examples(tasks.get("pets"), "train", home)
    assert [state.state for state in tasks.describe(home, [tasks.get("pets")])] == ["in the folder"]


# -- datasets of the hub ------------------------------------------------------------------------


@pytest.fixture
def hub(home: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes a copy of a dataset as the hub has it, which the package `datasets` reads."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", home / "hf")

    def write(name: str, split: str, rows: list[dict[str, Any]], **features: Any) -> None:
        (home / name / "data").mkdir(parents=True, exist_ok=True)
        table = datasets.Dataset.from_list(rows)
        for column, feature in features.items():
            table = table.cast_column(column, feature)
        table.to_parquet(home / name / "data" / f"{split}-00000-of-00001.parquet")

    return write


def test_a_copy_of_a_dataset_of_the_hub(home: Path, hub: Any) -> None:
    import datasets

    contents = [picture((n, 2, 2)) for n in range(90)]
    rows = [
        {**QUESTIONS[3][1], "image": [{"bytes": c, "path": None}] * (1 + n % 2), "data_id": str(n // 3)}
        for n, c in enumerate(contents)
    ]
    hub("SEED-Bench", "test", rows, image=datasets.List(datasets.Image()))
    task = tasks.get("seed_bench")
    parts = {split: list(load.SplitData(task, split, home).examples()) for split in ("train", "validation", "test")}
    streamed = [task.example(row) for _, row in load.SplitData(task, "test", home).rows(streaming=True)]
    assert streamed == parts["test"]
    seen = {split: {e.media[0].content for e in examples} for split, examples in parts.items()}
    assert sum(map(len, seen.values())) == 90
    assert set.union(*seen.values()) == set(contents)
    # three questions about one picture, here three pictures of one id, fall on one side
    groups = {split: {n // 3 for n, c in enumerate(contents) if c in found} for split, found in seen.items()}
    assert not groups["test"] & (groups["train"] | groups["validation"])
    assert 3 <= len(parts["test"]) <= 30


def test_one_split_gives_validation_too(home: Path, hub: Any) -> None:
    """The hashes for test and for validation are different ones."""
    import datasets

    rows = [{"image": {"bytes": picture((n, 3, 3)), "path": None}, "label": [_CAR]} for n in range(120)]
    hub("kitti", "train", rows, image=datasets.Image())
    sizes = [len(tasks.load_examples(tasks.get("kitti_distance"), s, home)) for s in ("train", "validation", "test")]
    assert sum(sizes) == 120
    assert min(sizes) > 0
    assert sizes[2] < 40


def test_a_dataset_of_the_hub_is_read_once(home: Path, hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    rows = [{"image": {"bytes": picture((n, 3, 3)), "path": None}, "label": n % 2 == 0} for n in range(80)]
    hub("PatchCamelyon", "train", rows, image=datasets.Image())
    task = tasks.get("camelyon")
    train, validation = (tasks.load_examples(task, split, home) for split in ("train", "validation"))
    monkeypatch.setattr(datasets, "load_dataset", None)
    assert tasks.load_examples(task, "train", home) == train
    assert tasks.load_examples(task, "validation", home) == validation
    assert len(train) + len(validation) == 80
    one = replace(task, source=HubSource("1aurent/PatchCamelyon", splits={"train": "train"}))
    with pytest.raises(ConfigError, match="task 'camelyon' has no split for test, only for train"):
        tasks.load_examples(one, "test", home)


def test_states_in_the_list(home: Path) -> None:
    states = {state.name: state for state in tasks.describe()}
    assert (states["pets"].state, states["pets"].source) == ("on the hub", "hub timm/oxford-iiit-pet")
    assert (states["action_count"].state, states["action_count"].metric) == ("to unpack", "accuracy")
    assert len([s for s in states.values() if isinstance(tasks.get(s.name).source, HubSource)]) == 14 + 16 + 19
    assert {s.state for s in tasks.describe(home, [tasks.get("pets")])} == {"missing"}
