"""A small vision-language model made from packages: EfficientNet-Lite0, a projector, and SmolLM2-135M.

Pictures are 224 x 224, and 4 x 4 features of them stand in the prompt; a frame of a clip is 2 x 2. The tower and the
language model are trained ones. The projector between them (a norm and a linear layer) starts at random and must be
trained: name it in `modules_to_save`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from monkeyjump.models.efficientnet_lite import WIDTH, Convolution, EfficientNetLite, folded

SIZE, GRID, FRAME_GRID = 224, 4, 2
TOKENS = ("<image>", "<video>")


class EfficientNetLiteConfig(PretrainedConfig):
    model_type = "efficientnet_lite"
    hidden_size = WIDTH


class VlmTinyConfig(PretrainedConfig):
    model_type = "monkeyjump_vlm"
    loss_type = "ForCausalLM"
    sub_configs = {"text_config": AutoConfig, "vision_config": EfficientNetLiteConfig}  # noqa: RUF012 - Transformers'

    def __init__(self, text_config: Any = None, vision_config: Any = None, **kwargs: Any) -> None:
        if isinstance(text_config, dict):
            text_config = AutoConfig.for_model(**text_config)
        self.text_config = text_config if text_config is not None else AutoConfig.for_model("llama")
        self.vision_config = EfficientNetLiteConfig()
        self.image_token_id, self.video_token_id = kwargs.pop("image_token_id", -1), kwargs.pop("video_token_id", -1)
        super().__init__(**kwargs)


# -- the model ----------------------------------------------------------------------------------


class VlmTinyPreTrained(PreTrainedModel):
    config_class = VlmTinyConfig
    base_model_prefix = "model"
    _supports_sdpa = _supports_flash_attn = True
    supports_gradient_checkpointing = True
    _can_compile_fullgraph = True  # its language model can: a step of generation may be recorded


class VlmTinyModel(VlmTinyPreTrained):
    takes_features = True  # where pixels would be: the projector comes after them and is trained

    def __init__(self, config: VlmTinyConfig) -> None:
        super().__init__(config)
        self.vision_tower = EfficientNetLite()
        width = config.text_config.hidden_size
        self.multi_modal_projector = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, width))
        self.language_model = AutoModel.from_config(config.text_config)
        self.post_init()

    def get_image_features(self, pixel_values: Tensor) -> Tensor:
        """Features [N, 1280, 4, 4] of pictures [N, 3, 224, 224]; features stay as they are."""
        return self._features(pixel_values, GRID)

    def get_video_features(self, pixel_values_videos: Tensor) -> Tensor:
        """Features [N, F, 1280, 2, 2] of clips [N, F, 3, 224, 224]; features stay as they are."""
        clips, frames = pixel_values_videos.shape[:2]
        return self._features(pixel_values_videos.flatten(0, 1), FRAME_GRID).unflatten(0, (clips, frames))

    def _features(self, pixels: Tensor, grid: int) -> Tensor:
        if pixels.shape[1] == WIDTH:
            return pixels.to(self.dtype)
        with torch.no_grad():
            return functional.adaptive_avg_pool2d(self.vision_tower(pixels.to(self.dtype)), grid)

    def forward(
        self,
        input_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        pixel_values_videos: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        if inputs_embeds is None and input_ids is not None:
            shown = (input_ids == self.config.image_token_id) | (input_ids == self.config.video_token_id)
            inputs_embeds = self.get_input_embeddings()(input_ids.masked_fill(shown, 0))
            for token, pixels, make in (
                (self.config.image_token_id, pixel_values, self.get_image_features),
                (self.config.video_token_id, pixel_values_videos, self.get_video_features),
            ):
                if pixels is not None:
                    found = make(pixels).flatten(0, -4).flatten(2).mT  # [pictures or frames, places, 1280]
                    found = self.multi_modal_projector(found).flatten(0, 1).to(inputs_embeds.dtype)
                    inputs_embeds = inputs_embeds.masked_scatter((input_ids == token).unsqueeze(-1), found)
        return self.language_model(inputs_embeds=inputs_embeds, **kwargs)


class VlmTiny(VlmTinyPreTrained, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.language_model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: VlmTinyConfig) -> None:
        super().__init__(config)
        self.model = VlmTinyModel(config)
        self.lm_head = nn.Linear(config.text_config.hidden_size, config.text_config.vocab_size, bias=False)
        self.post_init()

    def forward(  # noqa: PLR0913, PLR0917 - as all models of Transformers
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        pixel_values: Tensor | None = None,
        pixel_values_videos: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            pixel_values=pixel_values,
            pixel_values_videos=pixel_values_videos,
            **{name: value for name, value in kwargs.items() if name != "num_items_in_batch"},
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.text_config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=outputs.past_key_values)

    def prepare_inputs_for_generation(self, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        """The pictures are in the cache after the first forward."""
        cache = kwargs.get("past_key_values")
        found = super().prepare_inputs_for_generation(input_ids, *args, **kwargs)  # type: ignore[misc]
        if cache is not None and cache.get_seq_length() > 0:
            found |= {"pixel_values": None, "pixel_values_videos": None}
        return found


AutoConfig.register("monkeyjump_vlm", VlmTinyConfig, exist_ok=True)
AutoModelForImageTextToText.register(VlmTinyConfig, VlmTiny, exist_ok=True)


# -- what it reads ------------------------------------------------------------------------------


class PixelProcessor:
    """Pictures as the tower was trained: 224 x 224, bicubic, from -1 to 1."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        """The same in every process: kept features are found by it."""
        return f"PixelProcessor({self.name!r}, {SIZE}, {GRID}, {FRAME_GRID})"

    def __call__(self, images: Any = None, videos: Any = None, return_tensors: str = "pt") -> dict[str, Tensor]:
        if videos is not None:
            return {self.name: torch.stack([torch.stack([_pixels(frame) for frame in clip]) for clip in videos])}
        return {self.name: torch.stack([_pixels(image) for row in images for image in row])}


def _pixels(image: Any) -> Tensor:
    from PIL import Image

    picture = image if isinstance(image, Image.Image) else Image.fromarray(np.asarray(image))
    values = np.asarray(picture.resize((SIZE, SIZE), Image.Resampling.BICUBIC), dtype=np.float32)
    return torch.from_numpy((values - 127) / 128).permute(2, 0, 1)


class TinyProcessor:
    """What Transformers' processors do, for this model."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.image_processor = PixelProcessor("pixel_values")
        self.video_processor = PixelProcessor("pixel_values_videos")
        self.image_token, self.video_token = TOKENS
        self.image_token_id, self.video_token_id = tokenizer.convert_tokens_to_ids(list(TOKENS))
        self.chat_template = tokenizer.chat_template

    def __call__(self, text: list[str], images: Any = None, videos: Any = None, **kwargs: Any) -> dict[str, Any]:
        counts = {self.image_token: GRID**2, self.video_token: len(videos[0]) * FRAME_GRID**2 if videos else 0}
        for token, count in counts.items():
            text = [each.replace(token, token * count) for each in text]
        return {"input_ids": self.tokenizer(text, add_special_tokens=False)["input_ids"]}


# -- building it --------------------------------------------------------------------------------


def build(language: Path, published: Path, folder: Path) -> None:
    """Put the parts together, once. The projector is drawn so that its outputs are as long as embeddings of words."""
    text = AutoModelForCausalLM.from_pretrained(language, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(language)
    tokenizer.add_tokens(list(TOKENS), special_tokens=True)
    tokenizer.chat_template = with_pictures(tokenizer.chat_template)
    image, video = tokenizer.convert_tokens_to_ids(list(TOKENS))
    tied = bool(text.config.tie_word_embeddings)
    model: Any = VlmTiny(
        VlmTinyConfig(text_config=text.config, image_token_id=image, video_token_id=video, tie_word_embeddings=tied)
    )
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    weights = folded(torch.load(published, map_location="cpu", weights_only=True))
    convolutions = [part for part in model.model.vision_tower.modules() if isinstance(part, Convolution)]
    words: Any = text.get_input_embeddings().weight
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for convolution, (weight, bias) in zip(convolutions, weights, strict=True):
            convolution.weight.copy_(weight)
            convolution.bias.copy_(bias)  # type: ignore[union-attr]
        linear: Any = model.model.multi_modal_projector[1]
        linear.weight.normal_(std=float(words.square().mean().sqrt()) / WIDTH**0.5, generator=generator)
        linear.bias.zero_()
    model.generation_config = text.generation_config
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def with_pictures(template: str) -> str:
    """A chat template that also takes messages of several parts; the parts are written out before it begins."""
    flat = (
        "{% set flat = namespace(messages=[]) %}{% for message in messages %}{% if message['content'] is string %}"
        "{% set flat.messages = flat.messages + [message] %}{% else %}{% set text = namespace(all='') %}"
        "{% for part in message['content'] %}{% if part['type'] == 'text' %}"
        "{% set text.all = text.all + part['text'] %}"
        "{% else %}{% set text.all = text.all + '<' + part['type'] + '>\\n' %}{% endif %}{% endfor %}"
        "{% set flat.messages = flat.messages + [{'role': message['role'], 'content': text.all}] %}{% endif %}"
        "{% endfor %}{% set messages = flat.messages %}"
    )
    return flat + template
