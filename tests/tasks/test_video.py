"""The 19 tasks of MVTamperBench on rows with its columns: options, clips, and which scenes are held out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from monkeyjump import tasks
from monkeyjump.errors import ConfigError
from monkeyjump.tasks import cache, load
from monkeyjump.tasks.media import Media
from monkeyjump.tasks.preflight import look_at
from monkeyjump.tasks.task import HubSource
from monkeyjump.tasks.video import TAMPERINGS, original_of
from tests.tasks.pictures import clip

QUESTION = "What tampering does this video exhibit?"
NAMES = tasks.groups()["video19"]


def row(video: Any, answer: str = "masking", **more: Any) -> dict[str, Any]:
    """A row of the hub's JSON files."""
    return {
        **{"video": video, "question": QUESTION, "candidates": list(TAMPERINGS), "answer": answer},
        **{"tamper_type": answer, "start": None, "end": None, **more},
    }


@pytest.mark.parametrize("name", NAMES)
def test_every_kind_of_scene(name: str) -> None:
    task = tasks.get(name)
    example = task.example(row({"bytes": b"clip", "path": "a.mp4"}, "rotate"))
    assert example.media == (Media("video", b"clip"),)
    assert (example.question, example.options, example.letter) == (QUESTION, TAMPERINGS, "F")
    assert (task.modality, task.metric, task.media) == ("video", "accuracy", ("video",))
    assert isinstance(task.source, HubSource)
    assert (task.source.id, task.source.config) == ("Srikant86/MVTamperBench", name)


def test_the_groups_are_the_papers() -> None:
    groups = tasks.groups()
    sizes = [len(groups[name]) for name in ("video_action", "video_motion", "video_reasoning")]
    assert sizes == [8, 6, 5]
    assert len(NAMES) == sum(sizes) == 19
    assert groups["video_reasoning"][-1] == "counterfactual_inference"


def test_options_of_the_row_count() -> None:
    task = tasks.get("action_count")
    other = task.example(row({"bytes": b"x"}, "yes", candidates=["yes", "no"], question="Tampered?"))
    assert (other.question, other.options, other.label) == ("Tampered?", ("yes", "no"), 0)
    with pytest.raises(ConfigError, match="label 'blur' is not one of 'original', 'masking'"):
        task.example(row({"bytes": b"x"}, "blur"))


def test_scenes_are_held_out_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read from a copy of the dataset, with the clips where the benchmark's archives put them."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    monkeypatch.setattr(cache, "folder", lambda: tmp_path / "cache" / "data")
    monkeypatch.setattr(load, "_loaded", {})
    home = tmp_path / "MVTamperBench"
    clips = home / "video" / "perception" / "videos"
    (home / "json").mkdir(parents=True)
    clips.mkdir(parents=True)
    content, rows = clip(tmp_path / "a.mkv", 3).read_bytes(), []
    for number in range(24):
        for tampering in TAMPERINGS:
            name = f"v_{number}" + f"_middle_tampered_{tampering}_1sec" * (tampering != "original") + ".mp4"
            (clips / name).write_bytes(content)
            rows.append(row(name, tampering))
    (home / "json" / "action_count.json").write_text(json.dumps(rows))
    (home / "README.md").write_text(
        "---\nconfigs:\n- config_name: action_count\n  data_files: json/action_count.json\n---\n"
    )
    task = tasks.get("action_count")
    look_at([task], tmp_path)
    sides = {
        split: {original_of({"video": str(e.media[0].content)}) for e in tasks.load_examples(task, split, tmp_path)}
        for split in ("train", "validation", "test")
    }
    assert not sides["test"] & (sides["train"] | sides["validation"])
    assert len(sides["test"] | sides["train"]) == 24
    assert 5 <= len(sides["test"]) <= 15
    assert [s.state for s in tasks.describe(tmp_path, [task])] == ["in the folder"]


@pytest.mark.parametrize(
    ("video", "original"),
    [
        ("star/ZS9XR.mp4", "ZS9XR"),
        ("ZS9XR_middle_tampered_masking_1sec.mp4", "ZS9XR"),
        ("video_13.mp4", "video_13"),
        ("video_13_rotate.mp4", "video_13"),
    ],
)
def test_the_original_of_a_clip(video: str, original: str) -> None:
    assert original_of({"video": video}) == original


def test_clips_in_archives_say_how_to_get_them(tmp_path: Path) -> None:
    commands = [
        "`hf download Srikant86/MVTamperBench --repo-type dataset --local-dir DIR/MVTamperBench`",
        "`cd DIR/MVTamperBench/video && unzip -n '*.zip'`, and say `--data DIR`",
    ]
    for data in (None, tmp_path):
        with pytest.raises(ConfigError) as error:
            tasks.load_examples(tasks.get("moving_count"), "test", data)
        for command in commands:
            assert command in str(error.value)
