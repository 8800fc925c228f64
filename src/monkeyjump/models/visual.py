"""Processors of models that read pictures and clips, with torchvision and without it.

Without torchvision Transformers has no processors for clips, and cannot even build the processors of models that know
clips. Pictures alone then work all the same, and clips of LLaVA-OneVision through its processor for pictures.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cache
from typing import Any

from monkeyjump.errors import require

# For base models, which have no template of their own: the conversation as labelled paragraphs, pictures as marks.
PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | capitalize + ': ' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}{{ '<' + part['type'] + '>\\n' }}{% endif %}"
    "{% endfor %}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:\\n' }}{% endif %}"
)


def is_visual(config: Any) -> bool:
    """Whether a model reads pictures beside text."""
    return "vision_config" in getattr(config, "sub_configs", ())


class VisualProcessor:
    """A processor where other models have a tokenizer, and what the model takes of what it makes."""

    def __init__(self, processor: Any, tokenizer: Any, model: Any) -> None:
        self.processor, self.tokenizer = processor, tokenizer
        self.accepts = frozenset(inspect.signature(model.forward).parameters)

    def save_pretrained(self, folder: Any) -> None:
        """The tokenizer, for people who look; what reads pictures is loaded with the base model."""
        self.tokenizer.save_pretrained(folder)


def load_processor(source: str, options: dict[str, Any], tokenizer: Any, model: Any) -> VisualProcessor:
    """The processor of a model, with a chat template. The tokenizer has been made complete before."""
    from transformers import AutoProcessor

    require("PIL", f"model {source!r} reads pictures, which needs Pillow", "vision")
    if model.config.model_type == "monkeyjump_vlm":
        from monkeyjump.models.vlm_tiny import TinyProcessor

        return VisualProcessor(TinyProcessor(tokenizer), tokenizer, model)
    try:
        processor = AutoProcessor.from_pretrained(source, **options)
    except (ImportError, OSError):  # it wants a processor for clips: torchvision, or a file, is missing
        processor = without_clips(model.config).from_pretrained(source, **options)
        if model.config.model_type == "llava_onevision":
            processor.video_processor = Frames(processor.image_processor)
    template = getattr(processor, "chat_template", None)
    template = template or getattr(processor.tokenizer, "chat_template", None) or PLAIN_TEMPLATE
    processor.tokenizer = tokenizer
    processor.chat_template = tokenizer.chat_template = template
    return VisualProcessor(processor, tokenizer, model)


def without_clips(config: Any) -> Any:
    """The class of a model's processor, for pictures alone."""
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    return _pictures_only(PROCESSOR_MAPPING[type(config)])


@cache
def _pictures_only(kind: Any) -> Any:
    class PicturesOnly(kind):
        @classmethod
        def get_attributes(cls) -> list[str]:
            return [name for name in super().get_attributes() if name != "video_processor"]

        def __reduce__(self) -> tuple[Any, ...]:
            """Processes that prepare batches get a copy, and find the class by that of the model's processor."""
            return _unpickled, (kind, vars(self))

    PicturesOnly.__name__ = kind.__name__  # under which it is saved
    return PicturesOnly


def _unpickled(kind: Any, attributes: dict[str, Any]) -> Any:
    processor = object.__new__(_pictures_only(kind))
    vars(processor).update(attributes)
    return processor


class Frames:
    """Clips for LLaVA-OneVision: each frame is stretched to the size of a tile; pictures would get margins."""

    def __init__(self, image_processor: Any) -> None:
        self.image_processor = image_processor
        self.valid_kwargs = getattr(image_processor, "valid_kwargs", None)
        self.model_input_names = ["pixel_values_videos"]

    def __repr__(self) -> str:
        """The same in every process: kept features are found by it."""
        return f"stretched frames, {self.image_processor}"

    def __call__(self, videos: Sequence[Any], **kwargs: Any) -> Any:
        import torch
        from PIL import Image
        from transformers import BatchFeature

        clips = videos if isinstance(videos[0], list | tuple) else [videos]
        found, size = [], (self.image_processor.size["width"], self.image_processor.size["height"])
        for clip in clips:
            frames = [frame.resize(size, Image.Resampling.BICUBIC) for frame in (*clip, clip[-1])]
            # one frame more: one alone would be cut into tiles
            pixels = self.image_processor(images=[frames], return_tensors="pt")["pixel_values"]
            found.append(pixels[: len(clip), 0])
        return BatchFeature({"pixel_values_videos": torch.stack(found)})
