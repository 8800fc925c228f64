"""Chat completions over the classes of Transformers' own server.

Transformers makes prompts, runs `generate` on a thread of its own, streams, and builds what OpenAI's clients expect.
This module says which adapter a request runs with and what a request may ask for.

Each request names its adapter in its call: none can meet the adapter of another.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import torch
from jinja2 import TemplateError
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList, StopStringCriteria
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.utils import GenerationState

from monkeyjump.errors import ConfigError
from monkeyjump.serving.answers import Answerer, Sampling
from monkeyjump.serving.requests import ChatRequest

log = logging.getLogger(__name__)
FAILED = "The generation failed; the log of the server says why."


@dataclass
class Counts:
    """What the server has done, for whoever watches it. Only the event loop counts, so there is no lock."""

    requests: Counter[int] = field(default_factory=Counter)  # by status
    prompt_tokens: Counter[str] = field(default_factory=Counter)  # by model
    generated_tokens: Counter[str] = field(default_factory=Counter)
    in_flight: int = 0

    def text(self) -> str:
        """Prometheus' plain format."""
        lines = ["# TYPE monkeyjump_requests_total counter"]
        lines += [f'monkeyjump_requests_total{{status="{status}"}} {n}' for status, n in sorted(self.requests.items())]
        for name, counter in (("prompt", self.prompt_tokens), ("generated", self.generated_tokens)):
            lines.append(f"# TYPE monkeyjump_{name}_tokens_total counter")
            lines += [f'monkeyjump_{name}_tokens_total{{model="{_label(model)}"}} {n}' for model, n in counter.items()]
        lines += ["# TYPE monkeyjump_requests_in_flight gauge", f"monkeyjump_requests_in_flight {self.in_flight}"]
        return "\n".join(lines) + "\n"


def _label(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


@dataclass(frozen=True)
class Limits:
    """What one request, and all together, may take."""

    prompt: int | None = None  # tokens; None: what the model reads
    answer: int = 1024  # tokens, where a request asks for no number or for more
    concurrent: int = 64  # requests

    def __post_init__(self) -> None:
        names = {"prompt": "--max-prompt", "answer": "--max-tokens", "concurrent": "--concurrent"}
        given = {names[key]: value for key, value in vars(self).items()}
        problems = [
            f"{name} {value} must be at least 1." for name, value in given.items() if value is not None and value < 1
        ]
        if problems:
            raise ConfigError(problems, title="limits")


class Stop(StoppingCriteria):
    """Ends a generation between two tokens, because nobody waits for it any more."""

    def __init__(self, *events: threading.Event) -> None:
        self.events = events

    def ended(self) -> bool:
        return any(event.is_set() for event in self.events)

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        return torch.full((input_ids.shape[0],), self.ended(), dtype=torch.bool, device=input_ids.device)  # type: ignore[return-value]


class ModelOfRequest:
    """The model as one request sees it: `generate` with its adapter, its seed and its end."""

    def __init__(self, answerer: Answerer, asked: ChatRequest, stop: Stop) -> None:
        self.answerer, self.stop, self.stop_strings, self.seed = answerer, stop, asked.stop, asked.seed
        self.adapter_names = [answerer.peft_name(asked.model)]
        task = answerer.task_id(asked.model, asked.task)
        self.extra = {} if task is None else {"task_ids": torch.tensor([task], device=answerer.device)}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.answerer.model, name)

    def generate(self, **given: Any) -> Any:
        if self.seed is not None:
            torch.manual_seed(self.seed)
        criteria = StoppingCriteriaList([self.stop])
        try:
            if self.stop_strings:
                criteria.append(StopStringCriteria(self.answerer.tokenizer, self.stop_strings))
            return self.answerer.generate(self.adapter_names, **given, **self.extra, stopping_criteria=criteria)
        except Exception as error:
            if type(error).__name__ != "_GenerationCancelled":  # how Transformers' streamer ends a generation
                log.exception("a generation failed")
                raise RuntimeError(FAILED) from error
            raise


async def _with_errors_in_form(parts: Any) -> AsyncIterator[str]:
    """A stream whose last part, where the generation failed, has the form of OpenAI and not that of Transformers.

    The quotes of a text are escaped in a stream, so no answer can look like an error.
    """
    async with aclosing(parts):
        async for part in parts:
            before, mark, _ = part.partition('data: {"error": "')
            error = {"message": FAILED, "type": "server_error", "param": None, "code": None}
            yield f"{before}data: {json.dumps({'error': error})}\n\n" if mark else part


class Completion(ChatCompletionHandler):
    """One request; made for it and gone with it."""

    def __init__(
        self, answerer: Answerer, state: GenerationState, limits: Limits, counts: Counts, asked: ChatRequest, stop: Stop
    ) -> None:
        manager: Any = ModelManager  # only its static test of modality is called
        super().__init__(manager, state)
        self.answerer, self.limits, self.counts, self.asked, self.stop = answerer, limits, counts, asked, stop

    async def answer(self, request_id: str) -> Any:
        """The response; a prompt that the chat template refuses is the client's."""
        body = self.asked.model_dump(include={"model", "messages", "stream"})
        try:
            return await self.handle_request(body, request_id)
        except TemplateError as error:
            raise ConfigError(
                f"the model's chat template refuses these messages ({error}).", title="messages"
            ) from error

    def _validate_request(self, body: dict) -> None:
        """Done before, by `ChatRequest`."""

    def _resolve_model(self, body: dict) -> tuple[str, Any, Any]:
        return self.asked.model, ModelOfRequest(self.answerer, self.asked, self.stop), self.answerer.tokenizer

    def _build_generation_config(self, body: dict, model_generation_config: Any, use_cb: bool = False) -> Any:
        asked, most = self.asked, self.limits.answer
        wanted = min(asked.max_completion_tokens or asked.max_tokens or most, most)
        settings = self.answerer.settings(Sampling(wanted, asked.temperature or 0.0), most)
        if asked.top_p is not None and settings.do_sample:
            settings.top_p = asked.top_p
        if use_cb:
            settings.use_cache = False
        return settings

    def _fit(self, inputs: Any, settings: GenerationConfig) -> None:
        """Refuse a prompt that is too long, and end the answer where the model's positions end."""
        ids = inputs["input_ids"]
        length, limit = len(ids) if isinstance(ids, list) else ids.shape[-1], self.answerer.prompts.limit
        most = min(self.limits.prompt or limit, limit - 1)
        if length > most:
            raise ConfigError(
                f"the messages are {length:,} tokens, and at most {most:,} are read here. Shorten them.",
                title="prompt too long",
            )
        settings.max_new_tokens = min(settings.max_new_tokens or limit, limit - length)

    def _streaming(
        self, request_id: str, model: Any, processor: Any, model_id: str, inputs: Any, *args: Any, **kw: Any
    ) -> Any:
        self._fit(inputs, args[0])
        response = super()._streaming(request_id, model, processor, model_id, inputs, *args, **kw)
        response.body_iterator = _with_errors_in_form(response.body_iterator)
        return response

    async def _non_streaming(
        self, request_id: str, model: Any, processor: Any, model_id: str, inputs: Any, *args: Any, **kw: Any
    ) -> Any:
        self._fit(inputs, args[0])
        return await super()._non_streaming(request_id, model, processor, model_id, inputs, *args, **kw)

    def _build_completion(self, *args: Any, **kwargs: Any) -> dict:
        return super()._build_completion(*args, **self._ended(kwargs))

    def _build_chunk_sse(self, *args: Any, **kwargs: Any) -> str:
        chunk = super()._build_chunk_sse(*args, **self._ended(kwargs))
        return chunk if kwargs.get("finish_reason") is None else f"{chunk}data: [DONE]\n\n"

    def _ended(self, given: dict[str, Any]) -> dict[str, Any]:
        """Count the tokens of an answer that has ended. One that was cut off, as the server is stopped, says so."""
        usage = given.get("usage")
        if usage is None:
            return given
        if given.get("finish_reason") == "stop" and self.stop.ended():
            given = {**given, "finish_reason": "length"}
        self.counts.prompt_tokens[self.asked.model] += usage.prompt_tokens
        self.counts.generated_tokens[self.asked.model] += usage.completion_tokens
        return given
