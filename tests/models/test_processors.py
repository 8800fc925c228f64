"""Processors of four families of models, as Transformers makes them with Pillow and with torchvision.

The tests with torchvision are skipped where it cannot be imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from monkeyjump.models import load_model
from monkeyjump.models.visual import PLAIN_TEMPLATE, Frames, VisualProcessor, without_clips
from monkeyjump.tasks.collate import PaddingCollator
from monkeyjump.tasks.encode import Encoder
from monkeyjump.tasks.media import Media, open_image, read_frames
from monkeyjump.tasks.task import Example
from tests.tasks.conftest import make_tokenizer
from tests.tasks.pictures import Image, clip, encoded
from tests.visual import save_visual_model

try:
    import torchvision  # noqa: F401

    WHY = ""
except Exception as error:  # a build for other libraries raises more than ImportError
    WHY = f"torchvision: {error}"
needs_torchvision = pytest.mark.skipif(bool(WHY), reason=WHY)

SIDE = {"height": 28, "width": 28}
TILES = {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}}
# image processor, its settings, the model, settings of the processor
FAMILIES: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "llava_onevision": (
        "LlavaOnevision",
        {"size": SIDE, "image_grid_pinpoints": [[28, 28], [28, 56], [56, 28]]},
        "LlavaOnevision",
        {"num_image_tokens": 4, "vision_feature_select_strategy": "full"},
    ),
    "idefics3": ("Idefics3", TILES, "Idefics3", {"image_seq_len": 4}),
    "smolvlm": ("SmolVLM", TILES, "Idefics3", {"image_seq_len": 4}),  # its own processor needs one more package
    "qwen2_5_vl": ("Qwen2VL", {"size": {"shortest_edge": 28 * 28, "longest_edge": 84 * 84}}, "Qwen2_5_VL", {}),
    "gemma3": ("Gemma3", {"size": SIDE}, "Gemma3", {"image_seq_length": 4}),
}
PIXELS, FRAMES = 0.016, 0.0151  # two grey levels where the deviation is 0.5; one where it is 0.26, as for clips
TOKENS = ["<image>", "<video>", "<soft>", "<end>"]


def processor(family: str, backend: str) -> VisualProcessor:
    prefix, settings, model, more = FAMILIES[family]
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": TOKENS})
    tokenizer.chat_template = PLAIN_TEMPLATE
    ids = tokenizer.convert_tokens_to_ids
    names = {"image_token": "<image>", "video_token": "<video>"}
    if family == "gemma3":  # one token stands for a picture before it is processed, another one after
        names |= {"boi_token": "<image>", "image_token": "<soft>", "eoi_token": "<end>"}
    for name, token in names.items():
        vars(tokenizer).update({name: token, f"{name}_id": ids(token)})
    try:
        pictures = getattr(transformers, f"{prefix}ImageProcessor{backend}")(**settings)
    except ImportError as error:  # older versions of Transformers want torchvision for some that work with Pillow
        pytest.skip(str(error).strip().splitlines()[0])
    config = getattr(transformers, f"{model}Config")
    found = without_clips(config())(image_processor=pictures, tokenizer=tokenizer, **more)
    found.chat_template = PLAIN_TEMPLATE
    forward = getattr(transformers, f"{model}ForConditionalGeneration").forward
    described = SimpleNamespace(forward=forward, config=SimpleNamespace(model_type=family))
    return VisualProcessor(found, tokenizer, described)


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> list[Media]:
    """Noise, smoothed as photographs are, in three sizes; and a clip."""
    folder, generator = tmp_path_factory.mktemp("media"), np.random.default_rng(0)
    for number, (width, height) in enumerate([(64, 48), (30, 90), (28, 28)]):
        noise = Image.fromarray(generator.integers(0, 256, (8, 8, 3), dtype=np.uint8))
        (folder / f"{number}.png").write_bytes(encoded(noise.resize((width, height), Image.Resampling.BICUBIC)))
    clip(folder / "clip.mkv", 9)
    images = [Media("image", str(folder / f"{number}.png")) for number in range(3)]
    return [*images, Media("video", str(folder / "clip.mkv"))]


def batch(visual: VisualProcessor, rows: Sequence[tuple[Media, ...]]) -> dict[str, torch.Tensor]:
    encoder = Encoder(visual, frames=4)
    items = encoder.encode_all([Example("What?", ("a", "b"), 1, media=row) for row in rows])
    return PaddingCollator(encoder.tokenizer.pad_token_id, pictures=encoder.pictures)(items)


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    """The same ids, sizes and grids; pixels within the tolerance."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        allowed = tolerance if name.startswith("pixel_values") else 0
        torch.testing.assert_close(found[name], value, atol=allowed, rtol=0, msg=f"{{}} in {name}".format)


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_and_kinds_are_those_of_the_processor(family: str, media: list[Media]) -> None:
    visual = processor(family, "Pil")
    encoder = Encoder(visual)
    for image in media[:3]:
        example = Example("What?", ("a", "b"), 1, media=(image,))
        text = encoder.prompt_text(example)
        own = visual.processor(
            text=[text], images=[[open_image(image)]], add_special_tokens=False, return_mm_token_type_ids=True
        )
        found = batch(visual, [(image,)])
        length = int(found["prompt_lengths"])
        assert found["input_ids"][0, :length].tolist() == list(own["input_ids"][0])
        for name in {"token_type_ids", "mm_token_type_ids"} & found.keys():
            assert found[name][0, :length].tolist() == list(own[name][0])


@needs_torchvision
@pytest.mark.parametrize("family", FAMILIES)
def test_torchvision_makes_the_batches_of_pillow(family: str, media: list[Media]) -> None:
    rows = [(image,) for image in media[:3]]
    assert_close(batch(processor(family, ""), rows), batch(processor(family, "Pil"), rows), PIXELS)


@needs_torchvision
def test_frames_of_a_clip_are_those_of_the_video_processor(media: list[Media]) -> None:
    frames = [open_image(image) for image in media[:1]] * 2 + read_frames(media[3], 2)
    frames = [frame.resize((48, 32)) for frame in frames]
    settings = FAMILIES["llava_onevision"][1]
    pictures = transformers.LlavaOnevisionImageProcessorPil(**settings)
    found = Frames(pictures)([frames])["pixel_values_videos"]
    real = transformers.LlavaOnevisionVideoProcessor(size=SIDE)
    expected = real(videos=[np.stack([np.asarray(frame) for frame in frames])], return_tensors="pt")
    torch.testing.assert_close(found, expected["pixel_values_videos"], atol=FRAMES, rtol=0)


@needs_torchvision
def test_a_loaded_model_reads_alike_with_torchvision_and_without(media: list[Media], tmp_path: Path) -> None:
    """The folder is as a model without clips leaves it, then as one with clips does."""
    folder = save_visual_model(tmp_path / "model")
    rows = [(media[0],), (), (media[3],), (media[1], media[2])]
    _, visual = load_model(str(folder))
    assert type(visual.processor.image_processor) is transformers.LlavaOnevisionImageProcessor
    loaded = [batch(visual, rows)]
    transformers.LlavaOnevisionVideoProcessor(size=SIDE).save_pretrained(folder)
    _, whole = load_model(str(folder))
    assert type(whole.processor.video_processor) is transformers.LlavaOnevisionVideoProcessor
    loaded.append(batch(whole, rows))
    pillow = transformers.LlavaOnevisionImageProcessorPil.from_pretrained(folder)
    visual.processor.image_processor, visual.processor.video_processor = pillow, Frames(pillow)
    for found in loaded:
        assert_close(found, batch(visual, rows), PIXELS)
