"""Pictures and clips that cannot be used, through the command line: one clear error before training, or left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from monkeyjump.cli.main import main
from tests.tasks.pictures import Image, clip, encoded, picture
from tests.visual import save_visual_model

RECIPE = """
name: odd
model: {model}
method: mjlora
tasks: [{tasks}]
adapter: {{init_tokens: 40}}
data: {{max_length: 512, frames: 2}}
train: {{max_steps: 1, batch_size: 8, accumulation: 1, log_steps: 1}}
"""
BAD: dict[str, tuple[dict[str, str], str]] = {  # a row, and what is said of it
    "cut off": ({"file": "half.jpg"}, "half.jpg' cannot be read (image file is truncated"),
    "bomb": ({"file": "bomb.png"}, "bomb.png' has more than 5,000,000 pixels. Scale it down"),
    "outside": ({"file": "../x.png"}, "row 4: image '../x.png' is outside"),
    "gone": ({"file": "gone.png"}, "row 4: image 'gone.png': there is no such file in"),
    "empty": ({"file": ""}, "row 4: there is no image in 'file'. Fill the cell"),
    "placeholder": ({"file": "1.png", "q": "An <image>?"}, "contains '<image>', which stands for a picture"),
    "no column": ({}, "row 4 has no column 'file'; its columns are 'q', 'said'"),
    "no frames": ({"file": "none.avi"}, "none.avi' has no frames"),
}
FOUND_BY_A_LOOK = ("outside", "gone", "empty", "no column")  # others are found where files are decoded: in training
KNOWN = {"bomb": "bomb.png' has more", "cut off": "half.jpg' cannot be read", "no frames": "none.avi' has no frames"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, good pictures of odd kinds, and bad ones."""
    home = tmp_path_factory.mktemp("odd")
    save_visual_model(home / "model")
    data = home / "data"
    data.mkdir()
    (home / "x.png").write_bytes(picture())
    (data / "1.png").write_bytes(picture(size=(1, 1)))
    (data / "cmyk.jpg").write_bytes(encoded(Image.new("CMYK", (30, 20), (10, 200, 30, 0)), "JPEG"))
    (data / "deep.png").write_bytes(encoded(Image.new("I;16", (20, 30), 40_000)))
    (data / "wide.png").write_bytes(encoded(Image.new("L", (7680, 432), 90)))
    (data / "half.jpg").write_bytes(picture(size=(300, 300), form="JPEG")[:-400])
    (data / "bomb.png").write_bytes(encoded(Image.new("1", (3400, 3400))))
    clip(data / "good.mkv", 3)
    clip(data / "none.avi", frames=0)
    return home


@pytest.fixture(autouse=True)
def small_bombs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 5_000_000)


def recipe(home: Path, folder: Path, train: list[Any], test: list[Any], kind: str = "image") -> list[str]:
    """A recipe for rows that are written beside the files of `home`."""
    names = {"train": train, "test": test}
    for split, rows in names.items():
        full = [{"q": "Which?", "said": ("cut", "whole")[n % 2], **row} for n, row in enumerate(rows)]
        text = "".join(json.dumps(row) + "\n" for row in full)
        (home / "data" / f"{folder.name}-{split}.jsonl").write_text(text)
    files = ", ".join(f"{split}: {home / 'data' / folder.name}-{split}.jsonl" for split in names)
    task = f"name: odd\nprompt: '{{q}}'\ndata: {{{files}}}\n{kind}: file\nanswer: said\noptions: [cut, whole]\n"
    (folder / "odd.yaml").write_text(task)
    (folder / "recipe.yaml").write_text(RECIPE.format(model=home / "model", tasks=folder / "odd.yaml"))
    return [str(folder / "recipe.yaml"), f"output={folder / 'run'}"]


def good(count: int, *names: str) -> list[dict[str, Any]]:
    return [{"file": names[number % len(names)], "n": number} for number in range(count)]


@pytest.mark.parametrize("case", BAD)
def test_a_bad_row_of_the_test_split_stops_a_run_before_it_trains(
    case: str, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its place is one that a first look at the data passes over."""
    row, part = BAD[case]
    kind, name = ("video", "good.mkv") if case == "no frames" else ("image", "1.png")
    rows = good(60, name)
    words = recipe(home, tmp_path, rows, [*rows[:3], row, *rows[4:6]], kind)
    assert main(["train", *words]) == 2
    error = capsys.readouterr().err
    assert error.count("error:") == 1
    assert "task 'odd'" in error
    assert part in error
    assert not (tmp_path / "run" / "log.jsonl").exists()
    assert main(["validate", *words]) == (2 if case in FOUND_BY_A_LOOK else 0)
    assert (part in capsys.readouterr().err) == (case in FOUND_BY_A_LOOK)


@pytest.mark.parametrize("case", KNOWN)
def test_validate_looks_at_some_files(
    case: str, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, name = ("video", "good.mkv") if case == "no frames" else ("image", "1.png")
    words = recipe(home, tmp_path, [BAD[case][0], *good(60, name)], good(3, name), kind)
    assert main(["validate", *words]) == 2
    assert KNOWN[case] in capsys.readouterr().err


def test_bad_rows_are_left_out_and_counted(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Pictures of odd kinds are good: CMYK, 16 bits, one pixel, nearly 8,000 pixels wide."""
    bad = [row for case, (row, _) in BAD.items() if case not in ("no column", "no frames")]
    rows = [*bad, *good(40, "1.png", "cmyk.jpg", "deep.png"), *good(1, "wide.png")]
    words = recipe(home, tmp_path, rows, [*good(5, "cmyk.jpg", "wide.png"), *bad])
    assert main(["validate", *words, "data.bad_media=drop"]) == 0
    capsys.readouterr()
    assert main(["train", *words, "data.bad_media=drop"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"odd: {len(bad)} training rows were left out because their pictures or clips cannot be used" in out
    assert f"not scored because their pictures or clips cannot be used: odd {len(bad)}." in out
    (row,) = json.loads((tmp_path / "run" / "evaluation.json").read_text())["rows"]
    assert (row["n"], row["unreadable"], row["dropped"]) == (5, len(bad), 0)
    assert main(["evaluate", str(tmp_path / "run" / "adapter"), "--output", str(tmp_path / "again")]) == 0
    again = json.loads((tmp_path / "again.json").read_text())
    assert again["rows"][0] == row
    assert again["settings"]["frames"] == 2
