"""Pictures and clips as people have them: what is odd becomes RGB, what is broken or elsewhere is refused."""

from __future__ import annotations

import hashlib
import struct
import sys
import wave
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from monkeyjump.errors import ConfigError
from monkeyjump.tasks import cache
from monkeyjump.tasks.media import BadMediaError, Media, identity, media_in, open_image, read_frames, stored
from tests.tasks.pictures import Image, clip, encoded, picture

RED = (200, 30, 30)


def opened(content: Any) -> np.ndarray:
    image = open_image(Media("image", content))
    assert image.mode == "RGB"
    return np.asarray(image)


def test_deep_grey_is_scaled_and_not_clipped() -> None:
    deep = np.array([[0, 16_448, 32_896, 65_535]], np.uint16)
    assert opened(encoded(Image.fromarray(deep)))[0, :, 0].tolist() == [0, 64, 128, 255]
    dark = np.array([[0, 200, 255]], np.uint16)  # of 65,535: nearly black, and not white
    assert opened(encoded(Image.fromarray(dark)))[0, :, 0].tolist() == [0, 1, 1]
    floats = np.array([[0.0, 0.5, 1.0]], np.float32)
    assert opened(encoded(Image.fromarray(floats), "TIFF"))[0, :, 0].tolist() == [0, 128, 255]


def test_inks_palettes_and_grey_become_rgb() -> None:
    inks = Image.new("CMYK", (8, 8), (0, 255, 255, 0))  # full magenta and yellow are red
    red, green, blue = opened(encoded(inks, "JPEG", quality=95))[4, 4]
    assert red > 240
    assert green < 15
    assert blue < 15
    assert opened(picture(RED))[0, 0].tolist() == list(RED)
    palette = Image.new("RGB", (2, 1), RED).convert("P", palette=Image.Palette.ADAPTIVE)
    assert opened(encoded(palette))[0, 0].tolist() == list(RED)
    assert opened(encoded(Image.new("1", (1, 1), 1))).tolist() == [[[255, 255, 255]]]


def test_what_is_transparent_is_white() -> None:
    image = Image.new("RGBA", (3, 1), (*RED, 255))
    image.putpixel((1, 0), (0, 0, 0, 0))
    image.putpixel((2, 0), (0, 0, 0, 128))
    assert opened(encoded(image))[0].tolist() == [list(RED), [255, 255, 255], [127, 127, 127]]
    palette = Image.new("P", (2, 1), 0)
    palette.putpalette([*RED, 9, 9, 9])
    palette.putpixel((1, 0), 1)
    assert opened(encoded(palette, transparency=1))[0].tolist() == [list(RED), [255, 255, 255]]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_pictures_stand_upright(orientation: int) -> None:
    from PIL import ImageOps

    exif = Image.Exif()
    exif[0x0112] = orientation
    values = np.arange(6, dtype=np.uint8).reshape(2, 3) * 40
    content = encoded(Image.fromarray(values).convert("RGB"), exif=exif)
    (expected := Image.fromarray(values).convert("RGB")).getexif()[0x0112] = orientation
    assert opened(content).tolist() == np.asarray(ImageOps.exif_transpose(expected)).tolist()


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_damaged_exif_is_no_reason_to_refuse() -> None:
    assert opened(picture(RED, exif=b"Exif\0\0II*\0\xff\xff\xff\xff"))[0, 0].tolist() == list(RED)


def test_sizes_from_one_pixel_to_8k() -> None:
    assert opened(picture(RED, (1, 1))).shape == (1, 1, 3)
    assert opened(encoded(Image.new("1", (7680, 4320), 1))).shape == (4320, 7680, 3)


def bomb() -> bytes:
    """A head that promises 40,000 x 40,000 pixels."""
    head = b"IHDR" + struct.pack(">IIBBBBB", 40_000, 40_000, 8, 2, 0, 0, 0)
    start = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + head + struct.pack(">I", zlib.crc32(head))
    return start + struct.pack(">I", 9) + b"IDAT" + zlib.compress(b"\0")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (picture(RED, (64, 64), form="JPEG")[:-200], "of 500 bytes cannot be read"),
        (picture(RED, (64, 64))[:60], "cannot be read"),
        (b"no picture", "image of 10 bytes cannot be read (cannot identify image file)."),
        (b"", "image of 0 bytes cannot be read"),
        (bomb(), "has more than 89,478,485 pixels. Scale it down"),
    ],
)
def test_broken_pictures_are_refused(content: bytes, message: str) -> None:
    message = message.replace("500", str(len(content)))
    with pytest.raises(BadMediaError) as error:
        open_image(Media("image", content))
    assert message in str(error.value)
    assert ("get it again, or leave its row out" in str(error.value)) == ("cannot be read" in message)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_pillow_only_warns_of_smaller_bombs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 8)
    with pytest.raises(BadMediaError, match="has more than 8 pixels"):
        open_image(Media("image", picture(RED, (4, 3))))


def test_errors_name_the_file(tmp_path: Path) -> None:
    gone = Media("image", str(tmp_path / "gone.jpg"))
    for use in (open_image, identity):
        with pytest.raises(BadMediaError, match=r"gone\.jpg' cannot be read"):
            use(gone)


# -- clips --------------------------------------------------------------------------------------


def greys(frames: list[Any]) -> list[int]:
    return [frame.getpixel((frame.width - 1, frame.height - 1))[0] // 10 for frame in frames]


@pytest.mark.parametrize(
    ("frames", "count", "sampled"),
    [(10, 4, [0, 3, 6, 9]), (10, 1, [0]), (3, 8, [0, 0, 0, 0, 1, 1, 1, 2]), (1, 2, [0, 0])],
)
def test_frames_lie_at_equal_distances(tmp_path: Path, frames: int, count: int, sampled: list[int]) -> None:
    path = clip(tmp_path / "a.mkv", frames)
    assert sampled == np.linspace(0, frames - 1, count, dtype=int).tolist()
    for content in (str(path), path.read_bytes()):
        found = read_frames(Media("video", content), count)
        assert greys(found) == sampled
        assert {frame.mode for frame in found} == {"RGB"}


def test_odd_sizes_and_turned_clips(tmp_path: Path) -> None:
    [frame] = read_frames(Media("video", str(clip(tmp_path / "odd.mkv", 1, (33, 17)))), 1)
    assert frame.size == (33, 17)
    [turned] = read_frames(Media("video", str(clip(tmp_path / "turned.mkv", 1, (32, 16), rotation=90))), 1)
    assert turned.size == (16, 32)
    assert turned.getpixel((0, 31)) == (255, 255, 255)  # turned against the clock the first column is the last row
    assert turned.getpixel((0, 0)) == (0, 0, 0)


def test_broken_clips_are_refused(tmp_path: Path) -> None:
    good = clip(tmp_path / "a.mkv").read_bytes()
    contents = {"empty": b"", "noise": bytes(range(256)) * 8, "cut": good[:300], "text": b"not a clip" * 50}
    for name, content in contents.items():
        path = tmp_path / f"{name}.mp4"
        path.write_bytes(content)
        with pytest.raises(BadMediaError, match=rf"video '.*{name}\.mp4' (cannot be read|has no frames)"):
            read_frames(Media("video", str(path)), 4)


def test_a_clip_without_frames_is_refused(tmp_path: Path) -> None:
    with wave.open(str(tmp_path / "sound.mp4"), "wb") as sound:
        sound.setparams((1, 2, 8000, 0, "NONE", ""))
        sound.writeframes(bytes(8000))
    clip(tmp_path / "none.avi", frames=0)
    for name in ("sound.mp4", "none.avi"):
        with pytest.raises(BadMediaError, match=rf"{name}' has no frames\. .* leave its row out"):
            read_frames(Media("video", str(tmp_path / name)), 4)


# -- cells --------------------------------------------------------------------------------------


def test_what_a_cell_may_hold(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in ("a.png", "in/b.png"):
        (tmp_path / name).write_bytes(picture())
    a, b = (Media("image", str(tmp_path / name)) for name in ("a.png", "in/b.png"))
    for cell, found in (
        ("a.png", [a]),
        ({"bytes": b"x", "path": "a.png"}, [Media("image", b"x")]),
        ({"bytes": None, "path": "a.png"}, [a]),
        (["in/b.png", {"path": "a.png"}, b"x"], [b, a, Media("image", b"x")]),
        ('["a.png", "in/b.png"]', [a, b]),  # a cell of CSV
        ("in/../a.png", [a]),
        (None, []),
        ("", []),
        (float("nan"), []),
    ):
        assert list(media_in(cell, "image", tmp_path)) == found


def test_paths_may_not_leave_the_folder(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (tmp_path / "secret.png").write_bytes(picture())
    (home / "link.png").symlink_to(tmp_path / "secret.png")
    (home / "here.png").write_bytes(picture())
    for name in ("../secret.png", str(tmp_path / "secret.png"), str(home / "here.png"), "link.png", "/etc/passwd"):
        with pytest.raises(BadMediaError, match=r"is outside .*home'\. Paths count from the folder of the data file"):
            list(media_in(name, "image", home))
    for name in ("gone.png", "https://example.org/a.png"):
        with pytest.raises(BadMediaError, match="there is no such file in"):
            list(media_in(name, "image", home))
    with pytest.raises(BadMediaError, match="is a path, but these rows come without files"):
        list(media_in("here.png", "image", None))
    with pytest.raises(BadMediaError, match="image 7 is neither a path nor bytes"):
        list(media_in(7, "image", home))


def test_bytes_are_put_into_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "folder", lambda: tmp_path / "cache" / "data")
    content = picture()
    held, again = (stored(Media("image", content)) for _ in range(2))
    assert held == again
    assert isinstance(held.content, str)
    assert Path(held.content).read_bytes() == content
    assert identity(held) == identity(Media("image", content)) == hashlib.sha256(content).hexdigest()
    assert stored(held) is held
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(cache, "folder", lambda: tmp_path / "file" / "data")
    assert stored(Media("image", b"x")) == Media("image", b"x")


def test_without_the_packages_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, use in (("PIL.Image", open_image), ("av", lambda media: read_frames(media, 1))):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ConfigError, match=r'pip install "monkeyjump\[vision\]"'):
            use(Media("image", b"x"))
