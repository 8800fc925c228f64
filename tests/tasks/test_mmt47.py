"""MMT-47: texts, pictures and clips in one training split, a metric for every test split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from monkeyjump import tasks
from monkeyjump.errors import ConfigError
from monkeyjump.tasks import cache, load
from monkeyjump.tasks.encode import Encoder
from monkeyjump.tasks.media import Media
from monkeyjump.tasks.mixture import Mixture
from monkeyjump.tasks.preflight import look_at
from tests.tasks.pictures import clip, picture
from tests.visual import tiny_processor

NAMES = tasks.groups()["mmt47"]


def row(kind: str, path: str | None, question: str = "Who?", answer: str = "B") -> dict[str, Any]:
    return {"source_type": kind, "media_path": path, "question": question, "answer": answer}


def test_the_splits_are_those_of_the_hub() -> None:
    sources = {name: tasks.get(name).source for name in NAMES}
    splits = {name: dict(getattr(source, "splits", {})) for name, source in sources.items()}
    assert splits.pop("mmt47_train") == {"train": "train"}
    assert len(splits) == 47
    assert splits["mmt47_social_i_qa"] == {"test": "text_test_social_i_qa"}
    assert splits["mmt47_stsb"] == {"test": "glue_test_stsb"}
    assert splits["mmt47_okvqa"] == {"test": "image_test_okvqa"}
    assert splits["mmt47_object_shuffle"] == {"test": "video_test_object_shuffle"}
    metrics = {name: tasks.get(name).metric for name in NAMES}
    assert {name: metric for name, metric in metrics.items() if metric != "exact_match"} == {
        "mmt47_chartqa": "relaxed_accuracy",
        "mmt47_stsb": "spearman",
    }
    assert not set(NAMES) & set(tasks.names())  # a second copy of the same tasks: only if it is asked for
    assert [task.name for task in tasks.expand("mmt47")] == NAMES


def test_rows_bring_their_kind(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture())
    task = tasks.get("mmt47_train")
    assert task.example(row("text", None), folder=tmp_path).media == ()
    for kind in ("image", "video"):
        assert task.example(row(kind, "a.png"), folder=tmp_path).media == (Media(kind, str(tmp_path / "a.png")),)
    with pytest.raises(ConfigError, match="row 4: label 'audio' is not one of 'text', 'image', 'video'"):
        task.example(row("audio", "a.png"), 4, tmp_path)
    with pytest.raises(ConfigError, match="there is no image in 'media_path'"):
        task.example(row("image", None), folder=tmp_path)
    similar = tasks.get("mmt47_stsb").example(row("text", None, "How similar?", "2.75"))
    assert (similar.free_answer, similar.score, similar.metric) == ("2.75", 2.75, "spearman")


def test_one_run_over_all_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    monkeypatch.setattr(cache, "folder", lambda: tmp_path / "cache" / "data")
    monkeypatch.setattr(load, "_loaded", {})
    home = tmp_path / "MMT-47"
    for name in ("data", "images", "videos"):
        (home / name).mkdir(parents=True)
    (home / "images" / "a.png").write_bytes(picture())
    clip(home / "videos" / "a.mkv", 2)
    kinds = [row("text", None), row("image", "images/a.png"), row("video", "videos/a.mkv")]
    splits = {
        "train": [{**kinds[n % 3], "question": f"Question {n}?"} for n in range(90)],
        "image_test_pets": kinds[1:2] * 2,
        "text_test_piqa": kinds[:1] * 3,
        "video_test_action_count": kinds[2:] * 4,
    }
    for split, rows in splits.items():
        datasets.Dataset.from_list(rows).to_parquet(home / "data" / f"{split}-00000-of-00001.parquet")
    chosen = tasks.expand("mmt47_train,mmt47_pets,mmt47_piqa,mmt47_action_count")
    looks = look_at(chosen, tmp_path)
    sizes = {(look.task, look.split): look.rows for look in looks}
    assert sizes.pop(("mmt47_train", "train")) + sizes.pop(("mmt47_train", "validation")) == 90
    assert sizes == {(f"mmt47_{n}", "test"): c for n, c in (("pets", 2), ("piqa", 3), ("action_count", 4))}
    mixture = Mixture.load(chosen, Encoder(tiny_processor()), tmp_path)
    assert mixture.names == ["mmt47_train"]
    assert {e.media[0].kind if e.media else "text" for e in tasks.load_examples(chosen[0], "train", tmp_path)} == {
        *("text", "image", "video")
    }
