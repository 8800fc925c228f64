"""What a frozen tower makes of pictures and clips, kept on disk: it is computed once for each and not in every epoch.

Kept is what enters the language model (of `vlm-tiny`, whose projector is trained, what enters the projector). Batches
then carry it where pixels would be. A picture in a prompt of its own may be cut into tiles while one of several is not,
so that the two are kept apart.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor
from tqdm import tqdm

from monkeyjump.errors import ConfigError
from monkeyjump.models.bundled import cache_dir
from monkeyjump.record import write_atomic
from monkeyjump.tasks import cache
from monkeyjump.tasks.media import Media, identity
from monkeyjump.tasks.pictures import Pictures
from monkeyjump.training.data import TrainingData
from monkeyjump.training.recipe import Recipe
from monkeyjump.tuner.module_paths import language_path, outside_language

PIXELS = {"image": "pixel_values", "video": "pixel_values_videos"}


class Features:
    """The features of one model, in a folder of the cache."""

    def __init__(self, model: Any, pictures: Pictures, name: str) -> None:
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.pictures, self.inner, self.device = pictures, base.model, next(base.parameters()).device
        self.dtype = next(base.parameters()).dtype
        self.takes_them = bool(getattr(self.inner, "takes_features", False))
        self.listed: dict[str, bool] = {}  # by kind: whether the model joins a list; else it takes one tensor
        digest = hashlib.blake2b(digest_size=16)  # of a few weights of what makes the features
        for weights in _frozen_parts(base, self.takes_them):
            digest.update(weights.detach().flatten()[:64].float().cpu().numpy().tobytes())
        readers = [str(getattr(pictures.processor, f"{kind}_processor", "")) for kind in PIXELS]
        known = name, str(base.config), self.dtype, readers, pictures.frames, digest.hexdigest()
        self.folder = cache_dir() / "features" / cache.key(*known)

    def __getstate__(self) -> dict[str, Any]:
        """Processes that load data need no model."""
        return {**vars(self), "inner": None}

    def remember(self, rows: Iterable[Sequence[Media]]) -> None:
        """Compute what is missing, with a bar."""
        wanted = {self._path(media, len(row) == 1): (media, len(row) == 1) for row in rows for media in row}
        missing = [each for path, each in wanted.items() if not path.is_file()]
        with torch.no_grad(), tqdm(total=len(missing), desc="features", unit="file", disable=not missing) as bar:
            for media, alone in missing:
                write_atomic(self._path(media, alone), save(self._computed(media, alone)))
                bar.update()
        some = {media.kind: path for path, (media, _) in wanted.items()}
        self.listed = {kind: bool(load_file(path)["listed"]) for kind, path in some.items()}

    def _computed(self, media: Media, alone: bool) -> dict[str, Tensor]:
        """The features of one picture or clip, and the small tensors that come with its pixels."""
        row = [media] if alone or media.kind == "video" else [media, media]
        given = self.pictures.tensors([row])
        name = PIXELS[media.kind]
        sent = {key: value.to(self.device) for key, value in given.items()}
        make = self.inner.get_image_features if media.kind == "image" else self.inner.get_video_features
        taken = inspect.signature(make).parameters
        others = {key: sent[key] for key in given if key != name and key in taken}
        found = make(sent[name], **others, **({} if self.takes_them else {"return_dict": True}))
        if getattr(found, "deepstack_features", None) is not None:
            raise ConfigError(
                f"data.keep_features=true: {type(self.inner).__name__} puts features of its tower into several blocks, "
                "which are not kept. Leave keep_features out."
            )
        found = found if isinstance(found, Tensor) else found.pooler_output
        small = {key: value for key, value in given.items() if key not in (name, "batch_num_images")}
        rest = {key: value[: len(value) // len(row)].contiguous() for key, value in small.items()}
        listed = torch.tensor(isinstance(found, list | tuple))
        return {"features": found[0].to(self.dtype).cpu().contiguous(), "listed": listed, **rest}

    def tensors(self, rows: Sequence[Sequence[Media]]) -> dict[str, Tensor]:
        """What `Pictures.tensors` makes, with features in the place of pixels."""
        found: dict[str, list[Tensor]] = {}
        for row in rows:
            for media in row:
                kept = load_file(self._path(media, len(row) == 1))
                del kept["listed"]
                found.setdefault(PIXELS[media.kind], []).append(kept.pop("features"))
                for key, value in kept.items():
                    found.setdefault(key, []).append(value)
        joined = {name: torch.cat(parts) for name, parts in found.items() if name not in PIXELS.values()}
        for kind, name in PIXELS.items():
            if name in found:  # clips in one tensor have as many frames each, and so as many places
                apart = self.takes_them or (kind == "video" and not self.listed[kind])
                flat = [part.flatten(0, -2) for part in found[name]]
                joined[name] = torch.stack(found[name]) if apart else torch.cat(flat)
        counts = [sum(media.kind == "image" for media in row) for row in rows]
        if "batch_num_images" in self.pictures.accepts and any(counts):
            joined["batch_num_images"] = torch.tensor([count for count in counts if count])
        return joined

    @contextmanager
    def read(self) -> Iterator[None]:
        """Inside, the model takes features where pixels would be, and pixels as before."""
        if self.takes_them:
            yield
            return
        names = {kind: f"get_{kind}_features" for kind in self.listed}
        width = self.inner.config.get_text_config().hidden_size
        for kind, name in names.items():
            setattr(self.inner, name, _passing(getattr(self.inner, name), PIXELS[kind], width, self.listed[kind]))
        try:
            yield
        finally:
            for name in names.values():
                vars(self.inner).pop(name, None)

    def _path(self, media: Media, alone: bool) -> Path:
        return self.folder / f"{identity(media)}{'' if alone else '-several'}.safetensors"


@contextmanager
def kept_features(model: Any, recipe: Recipe, batches: TrainingData) -> Iterator[None]:
    """Inside, the batches of a recipe that asks for it carry kept features, and the model takes them."""
    pictures = getattr(batches.collator, "pictures", None)
    if pictures is None or not recipe.data.keep_features:
        yield
        return
    if batches.sampler is None:
        raise ConfigError("data.keep_features=true needs all pictures before training: set data.streaming=false.")
    features = Features(model, pictures, recipe.model)
    features.remember(batches.items[index].media for index in range(len(batches.items)))
    pictures.kept = features
    try:
        with features.read():
            yield
    finally:
        pictures.kept = None


def _passing(compute: Any, pixels: str, width: int, listed: bool) -> Any:
    def features(*args: Any, **kwargs: Any) -> Any:
        given: Any = args[0] if args else kwargs.get(pixels, kwargs.get("pixel_values"))  # as versions call it
        if given.dim() > 3 or given.shape[-1] != width:  # some take pixels as rows of patches
            return compute(*args, **kwargs)
        return SimpleNamespace(pooler_output=[given] if listed else given if given.dim() == 3 else given[None])

    return features


def _frozen_parts(base: Any, projector_may_learn: bool) -> list[Tensor]:
    """The parameters of what makes the features."""
    language = language_path(base)
    parts = {name: p for name, p in base.named_parameters() if outside_language(name, language)}
    parts = {name: p for name, p in parts.items() if not (projector_may_learn and "projector" in name)}
    trained = [name for name, parameter in parts.items() if parameter.requires_grad]
    if trained:
        raise ConfigError(
            f"data.keep_features=true keeps what frozen parts make of pictures, but {trained[0]!r} is trained: adapt "
            "language blocks only, or leave keep_features out."
        )
    return list(parts.values())
