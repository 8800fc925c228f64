"""What a request for a chat completion may ask for."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from monkeyjump.checked import Number, Section

StopString = Annotated[str, Field(min_length=1, max_length=64)]


class TextPart(Section):
    """A part of a message. Others than text are not served."""

    type: Literal["text"]
    text: str


class ChatMessage(Section):
    """A message as clients send it; what else they add to it says nothing to a model."""

    model_config = ConfigDict(extra="ignore", strict=True)
    role: Literal["system", "user", "assistant"]
    content: str | list[TextPart]


class ChatRequest(Section):
    """What a request may ask for. Keys that change no answer are ignored, those that would are refused."""

    model_config = ConfigDict(extra="ignore", strict=True)
    model: str
    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: Number | None = Field(None, ge=0, le=10)
    top_p: Number | None = Field(None, gt=0, le=1)
    stop: StopString | Annotated[list[StopString], Field(max_length=4)] | None = None
    seed: int | None = Field(None, ge=0, le=2**63 - 1)
    stream: bool | None = None
    task: str | None = None  # ours: for adapters that route by task


# keys of OpenAI that would change the answer, with the values that ask for nothing
UNSERVED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "frequency_penalty": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "functions": ([],),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "generation_config": (),
    "chat_template_kwargs": ({},),
}


def unserved(content: Any) -> list[str]:
    """The keys of a request that ask for what is not served."""
    given = content if isinstance(content, dict) else {}
    return [
        f"{key!r} is not served here. Leave it out."
        for key, harmless in UNSERVED.items()
        if given.get(key) is not None and given[key] not in harmless
    ]


def unserved_together(asked: ChatRequest) -> list[str]:
    """What Transformers' continuous batching does not do for single requests."""
    given = {"temperature": asked.temperature, "top_p": asked.top_p, "stop": asked.stop}
    return [
        f"{key!r} is not served with continuous batching, where all requests take the most likely tokens. Leave it out."
        for key, value in given.items()
        if value
    ]
