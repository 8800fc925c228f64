"""What people type to a model, as the ids that its adapters were trained to see: in the chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from monkeyjump.errors import ConfigError
from monkeyjump.tasks.encode import Encoder
from monkeyjump.tasks.media import Media

Messages = Sequence[Mapping[str, str]]  # each with a `role` and its `content`


class Prompts:
    """Turns conversations into ids for one model, and refuses what it cannot read."""

    def __init__(self, model: Any, tokenizer: Any, most: int) -> None:
        longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self.limit = min(most, longest or most)  # tokens of a prompt with its answer
        self.encoder = Encoder(tokenizer, max_length=max(self.limit, 8))
        self.tokenizer, self.pictures = self.encoder.tokenizer, self.encoder.pictures

    def ids(self, messages: Messages, media: tuple[Media, ...] = ()) -> list[int]:
        """The conversation up to where the answer begins; pictures stand before the first text."""
        if not media and not any(message["content"].strip() for message in messages):
            raise ConfigError("there is nothing to read. Type a text.", title="empty prompt")
        if media and self.pictures is None:
            raise ConfigError("the model reads no pictures. Type a text alone.", title="picture")
        if self.pictures is not None:
            self.pictures.measure(media)
            for message in messages:
                if problem := self.pictures.problem(media, message["content"]):
                    raise ConfigError(problem, title="picture")
        rendered = self.encoder.rendered(messages, media)
        ids = self.tokenizer(rendered, add_special_tokens=False, verbose=False)["input_ids"]
        if media and self.pictures is not None:
            ids = self.pictures.ids(rendered, ids, media)
        if len(ids) > self.limit:
            raise ConfigError(
                f"{len(ids):,} tokens with the chat template, and at most {self.limit:,} can be read. Shorten it.",
                title="prompt too long",
            )
        return list(ids)
