"""Chat completions over the classes of Transformers' own server.

Transformers makes prompts, runs `generate` on a thread of its own, streams, and builds what OpenAI's clients expect.
This module says which adapter a request runs with and what a request may ask for.

All requests take turns on one thread, and each names its adapter in its call: none can meet the adapter of another.
With continuous batching the requests of one adapter are one ragged batch instead.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
from jinja2 import TemplateError
from pydantic import ConfigDict, Field
from transformers import ContinuousBatchingConfig, GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.utils import BaseGenerateManager, GenerationState

from monkeyjump.checked import Number, Section
from monkeyjump.config import MonkeyJumpConfig
from monkeyjump.errors import ConfigError
from monkeyjump.serving.answers import Answerer, Sampling
from monkeyjump.tuner.block_list import by_row

log = logging.getLogger(__name__)
CPU_TOKENS = 65_536  # of all requests together, for which continuous batching keeps keys and values on a CPU


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


@dataclass
class Counts:
    """What the server has done, for whoever watches it. Requests in the event loop and their thread both count."""

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
        self.answerer, self.stop, self.seed = answerer, stop, asked.seed
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
            with torch.inference_mode():
                return self.answerer.model.generate(
                    **given, **self.extra, adapter_names=self.adapter_names, stopping_criteria=criteria
                )
        except Exception as error:
            if type(error).__name__ != "_GenerationCancelled":  # how Transformers' streamer ends a generation
                log.exception("a generation failed")
                raise RuntimeError("the generation failed; the log of the server says why") from error
            raise


class OneThread(GenerationState):
    """One thread for all adapters of the model, where Transformers has one for each model name."""

    def get_manager(self, model_id: str, use_cb: bool = False) -> BaseGenerateManager:
        return super().get_manager("", use_cb)

    def end(self) -> None:
        """End what runs. Requests on the thread look for that themselves, between two tokens."""

    def shutdown(self) -> None:
        """Wait for the thread to come to its end: a process that ends under it may crash."""
        for manager in self._generate_managers.values():
            manager.submit(lambda: None).result(timeout=5)


class RaggedBatch(OneThread):
    """Continuous batching for one name. Its thread knows no calls of ours, so the model is switched once and stays."""

    def __init__(self, answerer: Answerer, name: str, config: ContinuousBatchingConfig | None = None) -> None:
        if config is None and answerer.device.type == "cpu":  # else Transformers would take most of the memory
            tokens = max(CPU_TOKENS, answerer.prompts.limit)
            config = ContinuousBatchingConfig(page_size=64, num_blocks=-(-tokens // 64), max_batch_tokens=1024)
        super().__init__(continuous_batching=True, cb_config=config)
        peft_name, model, base = answerer.peft_name(name), answerer.model, answerer.model.get_base_model()
        adapter = model.peft_config.get(peft_name)
        if reason := by_row(adapter) if isinstance(adapter, MonkeyJumpConfig) else None:
            raise ConfigError(
                f"adapter {name!r} decides for whole prompts ({reason}), and continuous batching mixes the tokens of "
                "many: serve it without --continuous-batching.",
                title="adapter cannot be served",
            )
        if not hasattr(base, "init_continuous_batching"):
            raise ConfigError(
                f"{type(base).__name__} knows no continuous batching: leave --continuous-batching out.",
                title="model cannot be served",
            )
        if adapter is None:
            model.base_model.disable_adapter_layers()
        else:
            model.set_adapter(peft_name)
        settings = answerer.settings(Sampling(), answerer.prompts.limit)
        settings.use_cache = False
        manager: Any = self.get_manager("", use_cb=True)
        manager.init_cb(base, settings)
        self.batches, self.ended = manager._cb, False

    def end(self) -> None:
        if not self.ended:
            self.ended = True
            self.batches.stop(block=False, hard_stop=True)

    def shutdown(self) -> None:
        self.end()
        self.batches.join(time.perf_counter(), 5)

    def cancel(self, request_id: str) -> None:
        """End a request that nobody waits for."""
        self.batches.cancel_request(request_id)


def unserved_together(asked: ChatRequest) -> list[str]:
    """What Transformers' continuous batching does not do for single requests."""
    given = {"temperature": asked.temperature, "top_p": asked.top_p, "stop": asked.stop}
    return [
        f"{key!r} is not served with continuous batching, where all requests take the most likely tokens. Leave it out."
        for key, value in given.items()
        if value
    ]


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
        if asked.stop:
            settings.stop_strings = asked.stop
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
        return super()._streaming(request_id, model, processor, model_id, inputs, *args, **kw)

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
