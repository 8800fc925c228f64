"""Whole runs of a tiny LLaVA-OneVision: text, pictures and clips in one mixture, from files of the user's own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model
from PIL import ImageOps
from PIL.Image import Image
from transformers import Trainer

import monkeyjump as mj
from monkeyjump.cli.main import main
from monkeyjump.evaluation.load import load_adapter
from monkeyjump.evaluation.run import evaluate
from monkeyjump.experiments.forecast import forecast
from monkeyjump.models import load_model
from monkeyjump.tasks import expand
from monkeyjump.tasks import pictures as task_pictures
from monkeyjump.tasks.collate import PaddingCollator
from monkeyjump.tasks.encode import Encoder
from monkeyjump.tasks.load import load_examples
from monkeyjump.tasks.media import Media, read_frames
from monkeyjump.training.compile import compiled
from monkeyjump.training.features import Features
from monkeyjump.training.recipe import load_recipe
from monkeyjump.training.run import run
from tests.replay import replaying
from tests.tasks.pictures import clip, picture
from tests.visual import save_visual_model

COLORS = {"red": (220, 20, 20), "green": (20, 200, 20), "blue": (20, 20, 220)}
RECIPE = """
name: eyes
model: {model}
method: mjlora
tasks: [opinion, {paint}, {tamper}]
adapter: {{init_tokens: 200}}
data: {{cap: 12, validation: 4, max_length: 512, frames: 4}}
train:
  {{lr: 1.0e-2, max_steps: 4, batch_size: 4, accumulation: 1, eval_steps: 2, save_steps: 2, log_steps: 1}}
evaluate: {{validation_limit: 3, test_limit: 4}}
"""


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, a folder of pictures per class, clips with a list of them, and a recipe."""
    home = tmp_path_factory.mktemp("eyes")
    model = save_visual_model(home / "model")
    for split, count in (("train", 8), ("test", 3)):
        for name, color in COLORS.items():
            (home / split / name).mkdir(parents=True)
            for number in range(count):
                shade = tuple(min(255, value + 5 * number) for value in color)
                (home / split / name / f"{number}.png").write_bytes(picture(shade, (20 + 10 * number, 24)))
    for number in range(3):
        clip(home / f"{number}.mkv", 6 + number)
    rows = [{"clip": f"{n % 3}.mkv", "said": ("cut", "whole")[n % 2], "n": n} for n in range(16)]
    (home / "clips.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (home / "paint.yaml").write_text(
        "name: paint_folder\nprompt: Which colour?\ndata: {train: train, test: test}\nimage: image\nanswer: label\n"
        "options: [red, green, blue]\n"
    )
    (home / "tamper.yaml").write_text(
        "name: tampered\nprompt: 'Clip {n}: cut or whole?'\ndata: {train: clips.jsonl, test: clips.jsonl}\n"
        "video: clip\nanswer: said\noptions: [cut, whole]\n"
    )
    path = home / "eyes.yaml"
    path.write_text(RECIPE.format(model=model, paint=home / "paint.yaml", tamper=home / "tamper.yaml"))
    return path


def test_train_evaluate_and_load(recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(recipe_file), f"output={tmp_path / 'run'}"]) == 0
    out = capsys.readouterr().out
    assert "paint_folder" in out
    assert "tampered" in out
    saved = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert {row["task"]: row["n"] for row in saved["rows"]} == {"opinion": 4, "paint_folder": 4, "tampered": 4}
    page = (tmp_path / "run" / "evaluation.html").read_text()
    assert page.count("<img ") == page.count("<figure ") == 8  # of four pictures and four clips, not of four texts
    words = ["evaluate", str(tmp_path / "run" / "adapter"), "--limit", "4", "--output", str(tmp_path / "again")]
    assert main(words) == 0
    again = json.loads((tmp_path / "again.json").read_text())
    assert [row["adapter"] for row in again["rows"]] == [row["adapter"] for row in saved["rows"]]


@pytest.mark.parametrize("mode", ["letter", "text", "generate"])
def test_batches_do_not_change_answers(recipe_file: Path, mode: Any) -> None:
    """All kinds in one batch, against every row by itself."""
    model, processor = load_model(str(recipe_file.parent / "model"))
    adapted = get_peft_model(model, mj.MonkeyJumpConfig(center_init="random_normalized"))
    chosen = expand(str(recipe_file.parent / "paint.yaml")) + expand(str(recipe_file.parent / "tamper.yaml"))
    settings = {"mode": mode, "limit": 5, "frames": 4, "progress": False}
    found = [
        evaluate(adapted, processor, [*chosen, *expand("opinion")], **settings, batch_tokens=size).predictions
        for size in (1, 8192)
    ]
    for task in found[0]:
        for side in ("base", "adapter"):
            one, other = (each[task][side] for each in found)
            assert [p.predicted for p in one] == [p.predicted for p in other]
            assert [p.text for p in one] == [p.text for p in other]


def test_packing_is_refused(recipe_file: Path, tmp_path: Path) -> None:
    with pytest.raises(mj.ConfigError, match="rows with pictures or clips are not packed"):
        run(load_recipe(str(recipe_file), [f"output={tmp_path}", "data.packing=true"]))


def test_another_process_prepares_the_same_batches(recipe_file: Path, tmp_path: Path) -> None:
    found = []
    short = ["train.max_steps=2", "train.eval_steps=none", "train.save_steps=none"]
    for workers in (0, 1):
        output = tmp_path / str(workers)
        run(load_recipe(str(recipe_file), [f"output={output}", f"train.workers={workers}", *short]), test=False)
        lines = map(json.loads, (output / "log.jsonl").read_text().splitlines())
        found.append([line["loss"] for line in lines if "loss" in line])
    assert found[0] == found[1] != []


def batches(recipe_file: Path, processor: Any) -> list[dict[str, torch.Tensor]]:
    encoder = Encoder(processor, {"paint_folder": 0, "tampered": 1}, frames=4)
    collate = PaddingCollator(encoder.tokenizer.pad_token_id, buckets=(96, 160), pictures=encoder.pictures)
    rows = [expand(str(recipe_file.parent / f"{name}.yaml"))[0] for name in ("paint", "tamper")]
    items = [item for task in rows for item in encoder.encode_all(load_examples(task, "train", limit=6))]
    return [collate(items[start::3]) for start in range(3)]


def losses(recipe_file: Path, switch: Any = None) -> list[float]:
    """Of nine steps, inside what `switch` makes of the model."""
    model, processor = load_model(str(recipe_file.parent / "model"))
    torch.manual_seed(0)
    adapted = get_peft_model(model, mj.MonkeyJumpConfig(dropout=0.0, center_init="random_normalized")).train()
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    found = []
    with nullcontext() if switch is None else switch(adapted):
        for batch in batches(recipe_file, processor) * 3:
            loss = adapted(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(loss))
    return found


@pytest.fixture(scope="module")
def ordinary(recipe_file: Path) -> list[float]:
    return losses(recipe_file)


def test_replayed_steps_are_the_ordinary_ones(recipe_file: Path, ordinary: list[float]) -> None:
    """The language blocks are recorded; the tower runs as it is."""
    inside = []

    @contextmanager
    def replayed(adapted: Any) -> Iterator[None]:
        with replaying(adapted, [adapted.get_base_model().model.language_model]) as report:
            inside.append(report)
            yield

    assert losses(recipe_file, replayed) == pytest.approx(ordinary, rel=1e-4)
    assert (inside[0].graphs, inside[0].replayed) == (1, 8)  # one width: the shapes of pictures do not count


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_steps_are_the_ordinary_ones(recipe_file: Path, ordinary: list[float]) -> None:
    found = losses(recipe_file, lambda adapted: compiled(adapted, "blocks", backend="aot_eager"))
    assert found == pytest.approx(ordinary, rel=1e-4)


def test_an_ordinary_trainer(recipe_file: Path, tmp_path: Path) -> None:
    """PEFT, Transformers' Trainer, our callback: what a user with a script of his own has."""
    from transformers import TrainingArguments

    model, processor = load_model(str(recipe_file.parent / "model"))
    adapted = get_peft_model(model, mj.MonkeyJumpConfig(init_tokens=60))
    encoder = Encoder(processor, frames=4)
    task = expand(str(recipe_file.parent / "paint.yaml"))[0]
    arguments = TrainingArguments(
        str(tmp_path), max_steps=3, per_device_train_batch_size=4, report_to="none", use_cpu=True, learning_rate=1e-2,
        remove_unused_columns=False, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(
        adapted,
        arguments,
        train_dataset=encoder.encode_all(load_examples(task, "train")),
        data_collator=PaddingCollator(encoder.tokenizer.pad_token_id, pictures=encoder.pictures),
        callbacks=[mj.MonkeyJumpCallback(progress=False)],
    )
    trainer.train()
    adapted.save_pretrained(str(tmp_path / "adapter"))
    loaded, _ = load_adapter(tmp_path / "adapter", base=str(recipe_file.parent / "model"))
    batch = {k: v for k, v in batches(recipe_file, processor)[0].items() if k not in ("task_ids", "prompt_lengths")}
    with torch.no_grad():
        torch.testing.assert_close(loaded(**batch).logits, adapted.eval()(**batch).logits, atol=1e-5, rtol=1e-5)


def test_kept_features_are_those_of_the_tower(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same losses with and without; a second run computes none."""
    monkeypatch.setenv("MONKEYJUMP_CACHE", str(tmp_path / "cache"))
    found, made = {}, []
    compute = Features._computed

    def counted(*args: Any) -> Any:
        made.append(args)
        return compute(*args)

    monkeypatch.setattr(Features, "_computed", counted)
    for name, keep in (("pixels", False), ("features", True), ("again", True)):
        words = [f"output={tmp_path / name}", f"data.keep_features={str(keep).lower()}"]
        run(load_recipe(str(recipe_file), words), test=False)
        log = [json.loads(line) for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]
        found[name] = [entry["loss"] for entry in log if "loss" in entry], len(made)
    assert found["features"][0] == pytest.approx(found["pixels"][0], rel=1e-5)
    assert found["again"] == found["features"]
    assert found["pixels"][1] == 0 < found["features"][1] <= 24 + 3


def test_features_of_a_trained_tower_are_not_kept(recipe_file: Path, tmp_path: Path) -> None:
    words = [f"output={tmp_path}", "data.keep_features=true", "adapter.modules_to_save=[multi_modal_projector]"]
    with pytest.raises(mj.ConfigError, match=r"multi_modal_projector.* is trained"):
        run(load_recipe(str(recipe_file), words))


def test_a_forecast_sees_clips(recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other frames are another forecast of the clips' task, and the same of the texts."""
    recipe = load_recipe(str(recipe_file), ["data.answer=text"])
    recipe = recipe.model_copy(update={"tasks": ["opinion", str(recipe_file.parent / "tamper.yaml")]})
    found = forecast(recipe, rows=8)

    def negatives(media: Media, count: int) -> list[Image]:
        return [ImageOps.invert(frame) for frame in read_frames(media, count)]

    monkeypatch.setattr(task_pictures, "read_frames", negatives)
    other = forecast(recipe, rows=8)
    assert found.tasks == other.tasks == ["opinion", "tampered"]
    assert found.cosines[0][0] == pytest.approx(other.cosines[0][0], abs=1e-6)
    assert found.cosines[1][1] != pytest.approx(other.cosines[1][1], abs=1e-3)
