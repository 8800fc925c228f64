"""Pictures and clips: what a row says of them, and how they become RGB pictures.

A row holds a path, the encoded bytes, or a list of either. Paths count from the folder of the data file and may not
leave it: data from strangers cannot make a model read other files of the disk.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from monkeyjump.errors import ConfigError, require
from monkeyjump.record import write_atomic
from monkeyjump.tasks import cache
from monkeyjump.tasks.cells import missing, opened

if TYPE_CHECKING:
    from PIL.Image import Image

LEAVE_OUT = "leave its row out (data.bad_media=drop does so with all such rows)"
_NEEDS = "pictures and clips need {}"
MediaKind = Literal["image", "video"]
IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")


@dataclass(frozen=True, slots=True)
class Media:
    """A picture or a clip: the path of its file, or the encoded bytes."""

    kind: MediaKind
    content: str | bytes

    def __repr__(self) -> str:
        """Names bytes by their hash, because keys of caches are made from what is printed."""
        content = self.content if isinstance(self.content, str) else identity(self)
        return f"Media({self.kind!r}, {content!r})"

    @property
    def name(self) -> str:
        """What error messages call it."""
        return repr(self.content) if isinstance(self.content, str) else f"of {len(self.content):,} bytes"


class BadMediaError(ConfigError):
    """A picture or clip that cannot be used: which one, why, and what to do."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        super().__init__(problems, title="bad data")


def identity(media: Media) -> str:
    """A hash of the content, for keys of caches."""
    from monkeyjump.tasks.load import file_hash

    if isinstance(media.content, bytes):
        return hashlib.sha256(media.content).hexdigest()
    try:
        return file_hash(Path(media.content))
    except OSError as error:
        raise _unreadable(media, error) from error


# -- from a cell of a row -----------------------------------------------------------------------


def media_in(cell: Any, kind: MediaKind, folder: Path | None) -> Iterator[Media]:
    """What a cell holds: a path, bytes, `{"bytes": ..., "path": ...}` as parquet files of the hub have it, or a list.

    `folder` is where paths count from; None for rows that come without files.
    """
    cell = opened(cell)
    if isinstance(cell, Mapping):  # bytes first: the path is then a name that leads nowhere
        cell = cell.get("path") if cell.get("bytes") is None else cell["bytes"]
    if isinstance(cell, list | tuple):
        for entry in cell:
            yield from media_in(entry, kind, folder)
    elif isinstance(cell, bytes):
        yield Media(kind, cell)
    elif isinstance(cell, str) and cell:
        yield Media(kind, str(_inside(folder, cell, kind)))
    elif not missing(cell) and cell != "":
        raise BadMediaError(f"{kind} {cell!r:.80} is neither a path nor bytes. Write the path of a file.")


def _inside(folder: Path | None, name: str, kind: str) -> Path:
    if folder is None:
        raise BadMediaError(
            f"{kind} {name!r} is a path, but these rows come without files. Put the rows and the files into a folder."
        )
    root = folder.resolve()
    path = (root / name).resolve()
    if Path(name).is_absolute() or not path.is_relative_to(root):
        raise BadMediaError(
            f"{kind} {name!r} is outside {str(folder)!r}. Paths count from the folder of the data file and must stay "
            "in it, links included: copy the files there and write relative paths."
        )
    if not path.is_file():
        raise BadMediaError(f"{kind} {name!r}: there is no such file in {str(folder)!r}. Paths count from that folder.")
    return path


def stored(media: Media) -> Media:
    """The same with its bytes in a file of the cache folder: lists of examples must fit in memory.

    Where nothing can be written the bytes stay.
    """
    if isinstance(media.content, str):
        return media
    name = identity(media)
    path = cache.folder().parent / "media" / name[:2] / name
    with suppress(OSError):
        if not path.is_file():
            write_atomic(path, media.content, cached=True)
        return Media(media.kind, str(path))
    return media


# -- pictures -----------------------------------------------------------------------------------


def open_image(media: Media) -> Image:
    """A picture as RGB, upright as its EXIF says, on white where it is transparent."""
    Image = require("PIL.Image", _NEEDS.format("Pillow"), "vision")
    try:
        with Image.open(_file(media)) as image:
            limit = Image.MAX_IMAGE_PIXELS
            if limit and image.width * image.height > limit:
                raise Image.DecompressionBombError
            image.load()
            upright = image
            with suppress(Exception):  # damaged EXIF: the picture itself is good
                upright = import_module("PIL.ImageOps").exif_transpose(image)
            return _rgb(upright, Image)
    except Image.DecompressionBombError as error:
        raise BadMediaError(
            f"image {media.name} has more than {Image.MAX_IMAGE_PIXELS:,} pixels. Scale it down, set "
            f"PIL.Image.MAX_IMAGE_PIXELS if you trust it, or {LEAVE_OUT}."
        ) from error
    except Exception as error:  # decoders of damaged files raise almost anything
        raise _unreadable(media, error) from error


def _rgb(image: Image, pillow: Any) -> Image:
    if image.mode.startswith(("I", "F")):  # more than 8 bits, which Pillow would clip and not scale
        import numpy as np

        values = np.asarray(image).astype(np.float64)
        top = float(values.max())
        full = 65535 if image.mode.startswith("I;16") or top > 255 else 1 if image.mode == "F" and top <= 1 else 255
        return pillow.fromarray((values * (255 / full)).clip(0, 255).round().astype(np.uint8)).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    white = image.copy()
    white.paste((255, 255, 255, 255), (0, 0, *image.size))
    white.alpha_composite(image)
    return white.convert("RGB")


# -- clips --------------------------------------------------------------------------------------


def read_frames(media: Media, count: int) -> list[Image]:
    """`count` frames of a clip at equal distances, the first and the last among them; short clips repeat frames."""
    import numpy as np

    av = require("av", _NEEDS.format("PyAV"), "vision")
    try:
        total = _packets(av, media)
        while total:
            wanted = np.linspace(0, total - 1, count, dtype=int).tolist()
            frames, decoded = _decoded(av, media, set(wanted))
            if decoded > wanted[-1]:
                return [frames[index] for index in wanted]
            total = decoded  # packets that give no frame
    except (av.error.FFmpegError, OSError, ValueError, IndexError) as error:
        raise _unreadable(media, error) from error
    raise BadMediaError(f"video {media.name} has no frames. Make the file again, or {LEAVE_OUT}.")


def _opened(av: Any, media: Media) -> Any:
    """A clip whose titles may be in any encoding. PyAV 19 never reads them strictly and has no such option."""
    strict = int(av.__version__.partition(".")[0]) < 19
    return av.open(_file(media), **({"metadata_errors": "ignore"} if strict else {}))


def _packets(av: Any, media: Media) -> int:
    """How many frames a clip should have. What its head says is often missing or wrong."""
    with _opened(av, media) as container:
        return sum(packet.size > 0 for stream in container.streams.video[:1] for packet in container.demux(stream))


def _decoded(av: Any, media: Media, wanted: set[int]) -> tuple[dict[int, Image], int]:
    found: dict[int, Image] = {}
    count = 0
    with _opened(av, media) as container:
        container.streams.video[0].thread_type = "AUTO"
        for count, frame in enumerate(container.decode(container.streams.video[0]), start=1):
            if count - 1 in wanted:
                found[count - 1] = frame.to_image().rotate(frame.rotation, expand=True)
            if len(found) == len(wanted):
                break
    return found, count


def _file(media: Media) -> Any:
    return io.BytesIO(media.content) if isinstance(media.content, bytes) else media.content


def _unreadable(media: Media, error: Exception) -> BadMediaError:
    said = getattr(error, "strerror", None) or str(error) or type(error).__name__
    reason = re.sub(r"[: ]+(<[^<]*>|'[^']*')$", "", said.splitlines()[0])  # the file, which is named already
    return BadMediaError(
        f"{media.kind} {media.name} cannot be read ({reason}). The file may be damaged or incomplete: "
        f"get it again, or {LEAVE_OUT}."
    )
