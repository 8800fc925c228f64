"""The examples of docs/pictures.md are run as they stand there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import transformers
from peft import get_peft_model

import monkeyjump as mj
from monkeyjump.cli.main import main
from monkeyjump.models.visual import without_clips
from monkeyjump.tasks import expand
from monkeyjump.training.recipe import load_recipe
from monkeyjump.tuner.layer import MonkeyJumpLayer
from tests.tasks.conftest import make_tokenizer
from tests.tasks.pictures import picture
from tests.visual import batch, llava_onevision

PAGE = (Path(__file__).parents[2] / "docs" / "pictures.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.M | re.S)


def blocks(language: str) -> list[str]:
    return [text for name, text in BLOCKS if name == language]


def test_five_lines_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    auto = transformers.AutoModelForImageTextToText
    monkeypatch.setattr(auto, "from_pretrained", lambda name: llava_onevision())
    (code,) = blocks("python")
    given = {"batches": [batch("llava_onevision", rows=4, seed=seed) for seed in range(4)]}
    exec(code, given)
    model = given["model"]
    model.train()(**given["batches"][0], labels=given["batches"][0]["input_ids"]).loss.backward()  # type: ignore[attr-defined]


def test_every_command_has_a_recipe_and_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (task,) = blocks("yaml")
    Path("birds.yaml").write_text(task)
    for number, name in enumerate(("wren", "rook") * 40):
        split = tmp_path / "birds" / ("test" if number < 8 else "train") / name
        split.mkdir(parents=True, exist_ok=True)
        (split / f"{number}.png").write_bytes(picture((number, 90, 30)))
    commands = [shlex.split(line) for text in blocks("bash") for line in text.splitlines()]
    assert len(commands) == 6
    for _, verb, recipe, *words in commands:
        assert expand(load_recipe(recipe, [word for word in words if "=" in word]).tasks)
        if verb == "validate":
            assert main([verb, recipe, *words]) == 0
    assert "birds" in capsys.readouterr().out


def test_the_pattern_names_the_tower() -> None:
    (pattern,) = re.findall(r'target_modules=r"([^"]+)"', PAGE)
    model = get_peft_model(llava_onevision(), mj.MonkeyJumpConfig(target_modules=pattern, layers_to_route=[]))
    adapted = [path for path, module in model.named_modules() if isinstance(module, MonkeyJumpLayer)]
    assert {"vision_tower" in path for path in adapted} == {True, False}


def test_pictures_have_as_many_tokens_as_the_page_says() -> None:
    """The settings are those of the published model."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>", "<video>"]})
    processor = without_clips(transformers.LlavaOnevisionConfig())(
        image_processor=transformers.LlavaOnevisionImageProcessorPil(),
        tokenizer=tokenizer,
        num_image_tokens=27 * 27,
        vision_feature_select_strategy="full",
    )
    for width, height in ((500, 375), (640, 480), (1920, 1080)):
        tokens = processor._get_number_of_features(height, width, 384, 384)
        assert f"{width:,} x {height:,}" in PAGE
        assert f"{tokens:,}" in PAGE
