"""Pictures and clips in prompts and batches, against what the processor of the model makes of them itself."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from monkeyjump import ConfigError
from monkeyjump.models import load_model
from monkeyjump.tasks.collate import PaddingCollator
from monkeyjump.tasks.encode import Encoder
from monkeyjump.tasks.media import BadMediaError, Media, open_image, read_frames
from monkeyjump.tasks.task import Example
from tests.helpers import assert_same
from tests.tasks.pictures import Image, clip, picture
from tests.visual import save_visual_model, tiny_processor

SIZES = ((30, 20), (30, 20), (64, 20), (20, 90), (1, 1))


@pytest.fixture(scope="module")
def visual(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    return load_model(str(save_visual_model(tmp_path_factory.mktemp("visual"))))


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> list[Media]:
    """Pictures of several sizes and a clip."""
    folder = tmp_path_factory.mktemp("media")
    for number, size in enumerate(SIZES):
        (folder / f"{number}.png").write_bytes(picture((50 * number, 90, 30), size))
    clip(folder / "clip.mkv", 9)
    names = [*(("image", f"{number}.png") for number in range(len(SIZES))), ("video", "clip.mkv")]
    return [Media(kind, str(folder / name)) for kind, name in names]  # type: ignore[arg-type]


def example(*media: Media, question: str = "What is it?", context: str = "") -> Example:
    return Example(question, ("a dog", "a cat"), 1, context=context, task="zoo", media=media)


def given(media: tuple[Media, ...]) -> dict[str, Any]:
    """The real pictures and clips, as a processor takes those of one prompt."""
    found: dict[str, Any] = {}
    if images := [open_image(each) for each in media if each.kind == "image"]:
        found["images"] = [images]
    if clips := [read_frames(each, 4) for each in media if each.kind == "video"]:
        found["videos"] = clips
    return found


def test_prompts_are_those_of_the_processor(visual: tuple[Any, Any], media: list[Media]) -> None:
    """It is asked once for each size, and never sees a picture."""
    processor = visual[1].processor
    encoder = Encoder(visual[1], {"zoo": 3}, frames=4)
    shown = [*((each,) for each in media), (media[0], media[2]), (media[1], media[5]), ()]
    asked = []
    whole = encoder.pictures._whole  # type: ignore[union-attr]
    encoder.pictures._whole = lambda *args: asked.append(args) or whole(*args)  # type: ignore[union-attr, method-assign, func-returns-value]
    items = encoder.encode_all([example(*each) for each in shown])
    assert len(asked) == len({tuple((m.kind, *encoder.pictures.size(m)) for m in each) for each in shown if each})  # type: ignore[union-attr]
    for each, item in zip(shown, items, strict=True):
        text = encoder.prompt_text(example(*each))
        ids = processor(text=[text], add_special_tokens=False, **given(each))["input_ids"][0]
        assert item.input_ids[: item.prompt_length].tolist() == ids
        assert item.media == each


def test_a_batch_of_all_kinds(visual: tuple[Any, Any], media: list[Media]) -> None:
    """The tensors are the processor's, and the loss of the batch is made of the losses of its rows."""
    model, processor = visual
    encoder = Encoder(processor, frames=4)
    shown = [(media[2],), (), (media[5],), (media[0], media[3])]
    items = encoder.encode_all([example(*each) for each in shown])
    collate = PaddingCollator(encoder.tokenizer.pad_token_id, pictures=encoder.pictures)
    batch = collate(items)
    pixels = processor.processor.image_processor(
        images=[[open_image(media[2])], [open_image(media[0]), open_image(media[3])]], return_tensors="pt"
    )
    for name, tensor in pixels.items():
        assert torch.equal(batch[name], torch.as_tensor(tensor)), name
    frames = batch["pixel_values_videos"]
    assert frames.shape == (1, 4, 3, 28, 28)
    pixels = processor.processor.image_processor
    resized = [
        frame.resize((28, 28), Image.Resampling.BICUBIC) for frame in read_frames(media[5], 4)
    ]  # without margins
    expected = (np.stack([np.asarray(frame) for frame in resized]) / 255 - pixels.image_mean) / pixels.image_std
    np.testing.assert_allclose(frames[0].permute(0, 2, 3, 1).numpy(), expected, atol=1e-5)

    def loss(rows: dict[str, torch.Tensor]) -> float:
        kept = {name: value for name, value in rows.items() if name not in ("task_ids", "prompt_lengths")}
        with torch.no_grad():
            return float(model(**kept).loss)

    answers = [len(item) - item.prompt_length for item in items]
    apart = [loss(collate([item])) * count for item, count in zip(items, answers, strict=True)]
    assert loss(batch) == pytest.approx(sum(apart) / sum(answers), rel=1e-4)


def test_a_collator_goes_to_another_process(visual: tuple[Any, Any], media: list[Media]) -> None:
    encoder = Encoder(visual[1], frames=4)
    items = encoder.encode_all([example(media[2]), example(media[5])])
    collate = PaddingCollator(encoder.tokenizer.pad_token_id, pictures=encoder.pictures)
    copy = pickle.loads(pickle.dumps(collate))
    assert type(copy.pictures.processor) is type(visual[1].processor)
    assert_same(copy(items), collate(items), rtol=0, atol=0)


def test_only_the_context_is_cut(visual: tuple[Any, Any], media: list[Media]) -> None:
    encoder = Encoder(visual[1], max_length=150)
    long = example(media[2], context="word " * 100)
    (item,) = encoder.encode_all([long])
    image = visual[0].config.image_token_id
    (bare,) = Encoder(visual[1]).encode_all([example(media[2])])
    assert len(bare) < len(item) <= 150
    assert (item.input_ids == image).sum() == (bare.input_ids == image).sum() > 0
    assert encoder.counts.truncated["zoo"] == 1
    small = Encoder(visual[1], max_length=60)
    assert small.encode_all([long]) == []
    assert small.counts.dropped["zoo"] == 1


def test_broken_files_stop_the_work_or_are_left_out(visual: tuple[Any, Any], tmp_path: Path) -> None:
    pytest.importorskip("av")
    (tmp_path / "good.png").write_bytes(picture())
    (tmp_path / "half.png").write_bytes(picture(size=(60, 60))[:70])
    (tmp_path / "none.mkv").write_bytes(b"no clip")
    kinds = (("image", "good.png"), ("image", "half.png"), ("video", "none.mkv"))
    rows = [example(Media(kind, str(tmp_path / name))) for kind, name in kinds]  # type: ignore[arg-type]
    with pytest.raises(BadMediaError, match=r"half\.png' cannot be read"):
        Encoder(visual[1]).encode_all(rows)
    encoder = Encoder(visual[1], bad_media="drop")
    assert len(encoder.encode_all(rows)) == 1
    assert encoder.counts.unreadable == {"zoo": 2}


def test_a_text_that_contains_a_placeholder_is_refused(visual: tuple[Any, Any], media: list[Media]) -> None:
    for shown in ((media[0],), ()):
        with pytest.raises(BadMediaError, match=f"contains '<image>', .* beside the {len(shown)} that its row has"):
            Encoder(visual[1]).encode_all([example(*shown, question="What does <image> mean?")])


def test_a_model_without_eyes(tokenizer: Any, media: list[Media]) -> None:
    with pytest.raises(ConfigError, match="task 'zoo' shows pictures, and the model reads none"):
        Encoder(tokenizer).encode_all([example(media[0])])


def test_what_reads_pictures_is_named_alike_in_every_process(visual: tuple[Any, Any]) -> None:
    """Features that are kept on disk are found by these names."""
    for processor in (tiny_processor().processor, visual[1].processor):
        for reader in (processor.image_processor, processor.video_processor):
            assert " at 0x" not in str(reader)


def test_sizes_are_kept_on_disk(visual: tuple[Any, Any], media: list[Media], monkeypatch: pytest.MonkeyPatch) -> None:
    first, again = Encoder(visual[1]).pictures, Encoder(visual[1]).pictures
    assert first is not None
    assert again is not None
    first.measure(media)
    monkeypatch.setattr("monkeyjump.tasks.pictures.open_image", None)  # nothing is decoded
    again.measure(media)
    assert again._sizes == first._sizes
    assert [again.size(each) for each in media[:5]] == list(SIZES)


def test_drawings_follow_from_the_seed() -> None:
    from monkeyjump.tasks.builtin import PICTURE_TASKS

    for task in PICTURE_TASKS:
        one, same, other = (task.source.generate("train", seed)[:3] for seed in (0, 0, 1))  # type: ignore[union-attr]
        assert one == same != other
        found = [task.example(row) for row in one]
        assert all(each.options == task.options and len(each.media) == 1 for each in found)
        assert np.asarray(open_image(found[0].media[0])).shape == (112, 112, 3)
