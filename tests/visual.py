"""Models that read pictures and clips, small and random, and batches for them made by hand."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionImageProcessorPil,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    SiglipVisionConfig,
)

from monkeyjump.models.visual import PLAIN_TEMPLATE, VisualProcessor, without_clips
from monkeyjump.models.vlm_tiny import TOKENS, TinyProcessor, VlmTiny
from tests.tasks.conftest import make_tokenizer

IMAGE, VIDEO, VOCABULARY = 120, 121, 128
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
TILES = [[28, 28], [28, 56], [56, 28]]


def llava_onevision(seed: int = 0) -> Any:
    """A picture is itself and one tile of the same size, each of 2 x 2 patches."""
    config = LlavaOnevisionConfig(  # type: ignore[call-arg]
        vision_config=SiglipVisionConfig(**VISION),
        text_config=Qwen2Config(**TEXT),
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        image_grid_pinpoints=[[28, 28]],
        vision_feature_layer=-1,
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    return LlavaOnevisionForConditionalGeneration(config).eval()


def idefics3(seed: int = 0) -> Any:
    text = {**TEXT, "model_type": "llama"}
    vision = {**VISION, "model_type": "idefics3_vision"}
    config = Idefics3Config(
        text_config=text, vision_config=vision, image_token_id=IMAGE, scale_factor=1, tie_word_embeddings=False
    )
    torch.manual_seed(seed)
    return Idefics3ForConditionalGeneration(config).eval()


def qwen2_5_vl(seed: int = 0) -> Any:
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    vision = {"hidden_size": 32, "intermediate_size": 48, "depth": 2, "num_heads": 2, "out_hidden_size": 64}
    vision |= {"patch_size": 14, "spatial_merge_size": 1, "temporal_patch_size": 1, "window_size": 28}
    config = Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_parameters": rope},
        vision_config={**vision, "fullatt_block_indexes": [1]},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=122,
        vision_end_token_id=123,
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    return Qwen2_5_VLForConditionalGeneration(config).eval()


def qwen3_vl(seed: int = 0) -> Any:
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    vision = {"hidden_size": 32, "intermediate_size": 48, "depth": 2, "num_heads": 2, "out_hidden_size": 64}
    vision |= {"patch_size": 14, "spatial_merge_size": 1, "temporal_patch_size": 1, "num_position_embeddings": 16}
    config = Qwen3VLConfig(
        text_config={**TEXT, "head_dim": 16, "rope_parameters": rope},
        vision_config={**vision, "deepstack_visual_indexes": [0]},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=122,
        vision_end_token_id=123,
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    return Qwen3VLForConditionalGeneration(config).eval()


def gemma3(seed: int = 0) -> Any:
    config = Gemma3Config(  # type: ignore[call-arg]
        text_config={**TEXT, "head_dim": 16, "sliding_window": 512},
        vision_config={**VISION, "model_type": "siglip_vision_model", "vision_use_head": False},
        mm_tokens_per_image=4,
        image_token_id=IMAGE,
        image_token_index=IMAGE,
        boi_token_index=122,
        eoi_token_index=123,
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    return Gemma3ForConditionalGeneration(config).eval()


def save_visual_model(folder: Path) -> Path:
    """A tiny LLaVA-OneVision over bytes with its processor, as `save_pretrained` leaves them."""
    tokenizer: Any = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>", "<video>"]})
    image, video = tokenizer.convert_tokens_to_ids(["<image>", "<video>"])
    text = {**TEXT, "vocab_size": video + 1, "max_position_embeddings": 4096}
    text |= {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    config = LlavaOnevisionConfig(  # type: ignore[call-arg]
        vision_config=SiglipVisionConfig(**VISION),
        text_config=Qwen2Config(**text, initializer_range=0.2),
        image_token_id=image,
        video_token_id=video,
        image_grid_pinpoints=TILES,
        vision_feature_layer=-1,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = LlavaOnevisionForConditionalGeneration(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    pictures = LlavaOnevisionImageProcessorPil(size={"height": 28, "width": 28}, image_grid_pinpoints=TILES)
    processor = without_clips(config)(
        image_processor=pictures, tokenizer=tokenizer, num_image_tokens=4, vision_feature_select_strategy="full"
    )
    processor.chat_template = PLAIN_TEMPLATE
    processor.save_pretrained(folder)
    return folder


def tiny_processor() -> VisualProcessor:
    """A processor over bytes: 16 places for a picture, 4 for each frame of a clip."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(list(TOKENS), special_tokens=True)
    tokenizer.chat_template = PLAIN_TEMPLATE
    model = SimpleNamespace(forward=VlmTiny.forward)
    return VisualProcessor(TinyProcessor(tokenizer), tokenizer, model)


MODELS = {
    "llava_onevision": llava_onevision,
    "idefics3": idefics3,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_vl": qwen3_vl,
    "gemma3": gemma3,
}
PLACES = {"llava_onevision": 10}  # of one picture: 4 of the whole, 6 of its tile with the ends of lines; 4 elsewhere


def pictures(model: str, count: int, seed: int = 0) -> dict[str, Tensor]:
    """What the model is given of `count` pictures of 28 x 28, one in each row."""
    generator = torch.Generator().manual_seed(seed)
    if model.startswith("qwen"):
        patches = torch.randn(count * 4, 3 * 14 * 14, generator=generator)
        return {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, 2, 2]] * count)}
    pixels = torch.randn(count, 3, 28, 28, generator=generator)
    if model == "llava_onevision":  # the whole picture, and its one tile
        pixels = torch.stack([pixels, pixels], 1)
        return {"pixel_values": pixels, "image_sizes": torch.tensor([[28, 28]] * count)}
    return {"pixel_values": pixels[:, None] if model == "idefics3" else pixels}


def batch(model: str, rows: int = 2, words: int = 8, left: bool = False, seed: int = 0) -> dict[str, Tensor]:
    """Rows of a picture and words; the first row has three words less, and pads instead."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(3, 100, (rows, words), generator=generator)
    places = PLACES.get(model, 4)
    ids = torch.cat([text[:, :2], torch.full((rows, places), IMAGE), text[:, 2:]], 1)
    mask = torch.ones_like(ids)
    if left:
        ids[0] = torch.cat([torch.zeros(3, dtype=ids.dtype), ids[0, :-3]])
        mask[0, :3] = 0
    else:
        ids[0, -3:], mask[0, -3:] = 0, 0
    given = {"input_ids": ids, "attention_mask": mask, **pictures(model, rows, seed)}
    kinds = (ids == IMAGE).long()
    if model == "gemma3":
        given["token_type_ids"] = kinds
    if model.startswith("qwen"):
        given["mm_token_type_ids"] = kinds.int()
    return given
