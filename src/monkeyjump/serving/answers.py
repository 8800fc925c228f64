"""A model with its adapters that answers conversations; each request says which adapter it is for, or the base model.

The model is never switched. The adapter goes with the call (`adapter_names`), so a call cannot meet the adapter of
another one.

Shapes: B conversations, P prompt tokens (padded on the left).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from monkeyjump.errors import ConfigError
from monkeyjump.evaluation.load import Adapters, load_adapters
from monkeyjump.evaluation.prompts import Messages, Prompts
from monkeyjump.evaluation.score import end_ids
from monkeyjump.registry import did_you_mean
from monkeyjump.serving.decoding import Decoding
from monkeyjump.tasks.media import Media
from monkeyjump.tuner.mixed_batch import BASE

MOST_TOKENS = 32_768  # of a prompt with its answer, where the model itself sets no limit


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn; at temperature 0 the most likely token is taken."""

    max_tokens: int = 256
    temperature: float = 0.0

    def __post_init__(self) -> None:
        problems = []
        if self.max_tokens < 1:
            problems.append(f"--max-tokens {self.max_tokens} must be at least 1.")
        if not 0 <= self.temperature <= 10:
            problems.append(f"--temperature {self.temperature} must be between 0 (the most likely token) and 10.")
        if problems:
            raise ConfigError(problems, title="sampling")


@dataclass(frozen=True)
class Question:
    """A conversation that ends where an answer is wanted."""

    messages: Messages
    media: tuple[Media, ...] = ()
    task: str | None = None  # for adapters that route by task


class Answerer:
    """The adapters of some folders on their base model, for answers."""

    def __init__(self, adapters: Adapters) -> None:
        self.model, self.adapters, self.base_name = adapters.model, adapters.named, _shown(adapters)
        kinds = {
            str(getattr(config.peft_type, "value", config.peft_type)) for config in self.model.peft_config.values()
        }
        if kinds - {"MONKEYJUMP", "LORA"}:
            raise ConfigError(
                f"adapters of kind {', '.join(sorted(kinds))} cannot be chosen for one call: PEFT does that for LoRA "
                "and this library for its own.",
                title="adapters cannot be served",
            )
        self.prompts = Prompts(self.model, adapters.tokenizer, MOST_TOKENS)
        self.tokenizer = self.prompts.tokenizer
        self.device = self.model.get_input_embeddings().weight.device
        self.ends = sorted(end_ids(self.model, self.tokenizer))
        self.pad = self.ends[0] if self.tokenizer.pad_token_id is None else self.tokenizer.pad_token_id
        self.decoding = Decoding(self.model, self.pad)

    @property
    def names(self) -> list[str]:
        """The names that can be asked for: the adapters, then the base model."""
        return [*self.adapters, self.base_name]

    def peft_name(self, name: str) -> str:
        """The name by which PEFT knows an adapter, or the rows without one."""
        if name == self.base_name:
            return BASE
        if name not in self.adapters:
            raise ConfigError(
                f"there is no model {name!r}.{did_you_mean(name, self.names)} Known: {', '.join(self.names)}.",
                title="unknown model",
            )
        return self.adapters[name].peft_name

    def task_id(self, name: str, task: str | None) -> int | None:
        """The id of a task of this adapter; None where it needs none."""
        if name == self.base_name:
            return None
        known, config = self.adapters[name].task_ids, self.model.peft_config[self.adapters[name].peft_name]
        by_task = getattr(config, "granularity", None) == "task"
        if not by_task and (task is None or getattr(config, "placement", None) != "nested"):
            return None
        if task is None or task not in known:
            said = "no task was named" if task is None else f"task {task!r} is none of its own"
            raise ConfigError(
                f"adapter {name!r} routes by task, but {said}: name one of {', '.join(sorted(known)) or '(none)'}.",
                title="task",
            )
        return known[task]

    def answers(self, questions: Sequence[Question], name: str, how: Sampling, streamer: Any = None) -> list[str]:
        """The answer of one adapter, or of the base model, to each question; they are computed together."""
        inputs = self.inputs(questions, name)
        width = inputs["input_ids"].shape[1]
        settings = self.settings(how, self.prompts.limit - width)
        adapter_names = [self.peft_name(name)] * len(questions)
        found = self.generate(adapter_names, **inputs, generation_config=settings, streamer=streamer)
        return self.tokenizer.batch_decode(found[:, width:], skip_special_tokens=True)

    def generate(self, adapter_names: list[str], streamer: Any = None, **given: Any) -> Any:
        """`generate` of the model for rows of these adapters, with recorded steps where that can be."""
        how = self.decoding.arguments(adapter_names, streamer)
        with torch.inference_mode():
            return self.model.generate(**given, **how, adapter_names=adapter_names, streamer=streamer)

    def prompt_ids(self, question: Question) -> list[int]:
        """The ids of a prompt that leaves room for an answer."""
        ids = self.prompts.ids(question.messages, question.media)
        if len(ids) == self.prompts.limit:
            raise ConfigError(
                f"the prompt fills all {len(ids):,} tokens and leaves none for an answer. Shorten it.",
                title="prompt too long",
            )
        return ids

    def inputs(self, questions: Sequence[Question], name: str) -> dict[str, Any]:
        """What `generate` takes of the questions, on the device of the model."""
        rows = [self.prompt_ids(question) for question in questions]
        tasks = [self.task_id(name, question.task) for question in questions]
        width = max(map(len, rows))
        ids = torch.tensor([[self.pad] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
        if tasks[0] is not None:
            inputs["task_ids"] = torch.tensor(tasks)
        if self.prompts.pictures is not None:
            inputs |= self.prompts.pictures.tensors([question.media for question in questions])
            inputs |= self.prompts.pictures.kinds(ids)
        return {key: value.to(self.device) for key, value in inputs.items()}

    def settings(self, how: Sampling, room: int) -> GenerationConfig:
        """The same for every model: what its own generation settings say beside the end tokens is not used."""
        drawn = {"do_sample": True, "temperature": how.temperature, "top_k": 0, "top_p": 1.0}
        return GenerationConfig(
            max_new_tokens=min(how.max_tokens, room),
            eos_token_id=self.ends,
            pad_token_id=self.pad,
            use_cache=True,  # the configuration of a model that was saved in training may say otherwise
            **(drawn if how.temperature > 0 else {"do_sample": False}),
        )


def _shown(adapters: Adapters) -> str:
    """A name for the base model that says nothing of the folders of this machine, and is no adapter's."""
    path = Path(adapters.base_name).expanduser()
    name = path.name if path.exists() else adapters.base_name
    return f"{name} (base)" if name in adapters.named else name


def small_batches(page: int, pages: int, tokens: int) -> ContinuousBatchingConfig:
    """So many pages of so many tokens for keys and values, and so many tokens in one forward."""
    name = "page_size" if "page_size" in ContinuousBatchingConfig.__dataclass_fields__ else "block_size"  # of 5.17
    sizes: dict[str, int] = {name: page, "num_blocks": pages, "max_batch_tokens": tokens}
    return ContinuousBatchingConfig(**sizes)  # type: ignore[arg-type]


def load(paths: Sequence[str | Path], base: str | None = None) -> Answerer:
    """The adapters of some folders on their base model, on a GPU where there is one."""
    return Answerer(load_adapters(paths, base))
