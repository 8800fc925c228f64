"""Pictures and clips of examples as a model takes them: as placeholders in its ids, and as tensors.

How many placeholders a picture needs follows from its size. A processor says so only after it has done all its work,
so it is asked once for each size, with a blank picture, and its answer is put into the ids of other prompts. Every file
is decoded once before training, which finds broken ones at once; what was found is kept on disk.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monkeyjump.errors import ConfigError
from monkeyjump.tasks import cache
from monkeyjump.tasks.media import LEAVE_OUT, BadMediaError, Media, identity, open_image, read_frames

if TYPE_CHECKING:
    from torch import Tensor

FRAMES = 8  # of a clip, at equal distances
_THREADS = 8  # decoders give the GIL away
_WORTH_A_BAR = 200  # files

Size = tuple[int, int]


class Pictures:
    """The picture side of a processor."""

    def __init__(self, visual: Any, frames: int = FRAMES) -> None:
        self.processor, self.accepts, self.frames = visual.processor, visual.accepts, frames
        self._between: dict[Any, tuple[list[int], list[int]] | None] = {}
        self._sizes: dict[Media, Size | BadMediaError] = {}
        self.kept: Any = None  # features instead of pixels, where they are kept on disk

    # -- in a prompt ----------------------------------------------------------------------------

    def ids(self, text: str, short: list[int], media: Sequence[Media]) -> list[int]:
        """The ids of a rendered prompt; `short` are those of the text as it stands, with one placeholder a picture."""
        sizes = tuple((each.kind, *self.size(each)) for each in media)
        if sizes not in self._between:
            self._between[sizes] = self._learned(text, short, sizes)
        known = self._between[sizes]
        if known is None:
            return self._whole(text, sizes)
        placeholder, found = known
        places = _places(short, placeholder)
        return short[: places[0]] + found + short[places[-1] + 1 :]

    def _learned(self, text: str, short: list[int], sizes: tuple) -> tuple[list[int], list[int]] | None:
        """What stands from the first picture to the last, and the ids that are replaced by it; None: not to be said."""
        whole = self._whole(text, sizes)
        known = (self.processor.tokenizer.convert_tokens_to_ids(token) for token in self._tokens())
        placeholder = [token for token in known if token in short]
        places = _places(short, placeholder)
        if len(places) != len(sizes):
            return None
        before, after = short[: places[0]], short[places[-1] + 1 :]
        end = len(whole) - len(after)
        if whole[: len(before)] != before or whole[end:] != after:
            return None  # pieces of text grow together with what stands for a picture
        return placeholder, whole[len(before) : end]

    def _whole(self, text: str, sizes: tuple) -> list[int]:
        """The ids that the processor itself makes, of blank pictures."""
        from PIL import Image

        blank = [(kind, Image.new("RGB", (width, height))) for kind, width, height in sizes]
        given: dict[str, Any] = {}
        if images := [image for kind, image in blank if kind == "image"]:
            given["images"] = [images]
        if clips := [[image] * self.frames for kind, image in blank if kind == "video"]:
            given["videos"] = self._clips(clips)
        try:
            return list(self.processor(text=[text], add_special_tokens=False, **given)["input_ids"][0])
        except (ValueError, IndexError, StopIteration) as error:
            raise ConfigError(
                f"the model's processor does not take {len(sizes)} pictures or clips in one prompt ({error}). Use a "
                "model that reads several, or rows with one."
            ) from error

    def _tokens(self) -> list[str]:
        """What stands for pictures and clips in a prompt."""
        names = ("boi_token", "image_token", "video_token")
        return [str(token) for name in names if (token := getattr(self.processor, name, None))]

    # -- files ----------------------------------------------------------------------------------

    def size(self, media: Media) -> Size:
        """Width and height; a broken file raises."""
        if media not in self._sizes:
            self._sizes[media] = self._measured(media)
        found = self._sizes[media]
        if isinstance(found, BadMediaError):
            raise found
        return found

    def measure(self, media: Iterable[Media], name: str = "") -> None:
        """Decode files that were never decoded, several at a time."""
        wanted = [each for each in dict.fromkeys(media) if each not in self._sizes]
        if not wanted:
            return
        with ThreadPoolExecutor(_THREADS) as pool:
            key = cache.key("sizes", self.frames, *pool.map(_fingerprint, wanted))
            kept = cache.read(key)
            if kept is not None:
                self._sizes.update(zip(wanted, map(tuple, json.loads(bytes(kept))), strict=True))
                return
            from tqdm import tqdm

            found = pool.map(self._measured, wanted)
            quiet = len(wanted) < _WORTH_A_BAR
            bar = tqdm(found, desc=f"decoding {name}", total=len(wanted), unit="file", leave=False, disable=quiet)
            self._sizes.update(zip(wanted, bar, strict=True))
        sizes = [self._sizes[each] for each in wanted]
        if not any(isinstance(size, BadMediaError) for size in sizes):
            cache.write(key, json.dumps(sizes).encode())

    def _measured(self, media: Media) -> Size | BadMediaError:
        try:
            return (open_image(media) if media.kind == "image" else read_frames(media, self.frames)[0]).size
        except BadMediaError as error:
            return error

    def problem(self, media: Sequence[Media], message: str) -> str | None:
        """What is wrong with a row: a file that cannot be read, or a text in which a picture seems to stand."""
        if token := next((token for token in self._tokens() if token in message), None):
            return (
                f"a text contains {token!r}, which stands for a picture or clip in prompts of this model, beside the "
                f"{len(media)} that its row has. Take it out of the text, or {LEAVE_OUT}."
            )
        sizes = (self._sizes.get(each) for each in media)
        return next((size.problems[0] for size in sizes if isinstance(size, BadMediaError)), None)

    # -- as tensors -----------------------------------------------------------------------------

    def tensors(self, rows: Sequence[Sequence[Media]]) -> dict[str, Tensor]:
        """What the model takes of the pictures and clips of a batch."""
        if self.kept is not None:
            return self.kept.tensors(rows)
        found: dict[str, Any] = {}
        images = [[open_image(each) for each in row if each.kind == "image"] for row in rows]
        if images := [row for row in images if row]:
            found |= self.processor.image_processor(images=images, return_tensors="pt")
        clips = [read_frames(each, self.frames) for row in rows for each in row if each.kind == "video"]
        if clips:
            found |= self.processor.video_processor(videos=self._clips(clips), return_tensors="pt")
        return {name: value for name, value in found.items() if name in self.accepts}

    def kinds(self, input_ids: Tensor) -> dict[str, Tensor]:
        """The kinds of all tokens, for models that ask for them: 0 text, 1 image, 2 video."""
        names = self.accepts & {"token_type_ids", "mm_token_type_ids"}
        if not names:
            return {}
        kinds = input_ids.new_zeros(input_ids.shape)
        for kind, name in ((1, "image"), (2, "video")):
            # Gemma's `image_token_id` is what stands in the text; its `image_token_ids` are what takes its place.
            single = [getattr(self.processor, f"{name}_token_id", None)]
            for token in getattr(self.processor, f"{name}_token_ids", single):
                kinds = kinds if token is None else kinds.masked_fill(input_ids == token, kind)
        return dict.fromkeys(names, kinds)

    def _clips(self, clips: list[Any]) -> list[Any]:
        if getattr(self.processor, "video_processor", None) is None:
            raise ConfigError(
                f"{type(self.processor).__name__} reads clips only with torchvision, which is not installed: install "
                "it, or use LLaVA-OneVision, which does without.",
                title="missing package",
            )
        import numpy as np

        if type(self.processor.video_processor).__name__ == "Frames":
            return clips
        return [np.stack([np.asarray(frame) for frame in clip]) for clip in clips]  # as Transformers' own take them


def _places(ids: Sequence[int], tokens: Sequence[int]) -> list[int]:
    return [place for place, token in enumerate(ids) if token in tokens]


def _fingerprint(media: Media) -> str:
    if isinstance(media.content, bytes):
        return identity(media)
    try:
        known = Path(media.content).stat()
    except OSError:
        return media.content
    return f"{media.kind} {media.content} {known.st_mtime_ns} {known.st_size}"
