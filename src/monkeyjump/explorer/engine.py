"""One model in memory with its adapters, and what the page asks of it: where tokens go and what comes next.

A `Reading` is one prompt read by one side: by the base model, or by an adapter with or without some of its experts.
Every step of it takes the lock, switches the model to its side and gives the lock back, so that two readings can
advance in turns and one that nobody follows any more holds up nobody.

Shapes: T tokens, C gates of all blocks side by side, V vocabulary.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from monkeyjump.errors import ConfigError
from monkeyjump.evaluation.forward import AnswerReader, Inputs, evaluating
from monkeyjump.evaluation.load import TASK_IDS, NamedAdapter, load_adapters
from monkeyjump.evaluation.prompts import Prompts
from monkeyjump.evaluation.recorded_step import GrowingStep
from monkeyjump.evaluation.score import end_ids
from monkeyjump.record import read_record
from monkeyjump.registry import did_you_mean
from monkeyjump.tasks.media import Media
from monkeyjump.tuner.knock_out import knock_out
from monkeyjump.tuner.model import require_context
from monkeyjump.tuner.trace import RoutingTrace, record_routing

BASE = "base"  # the name of the side without an adapter
MOST_TOKENS = 4096  # of a prompt with what is generated after it
SHOWN = 8  # most likely next tokens


@dataclass(frozen=True)
class Side:
    """Who reads a prompt: the base model, or an adapter without the experts that are `off`, by block."""

    adapter: str = BASE
    off: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Prompt:
    """What is read."""

    text: str
    picture: bytes | None = None
    task: str | None = None  # for adapters that route by task


@dataclass
class Reading:
    """A prompt after a side has read it, and what runs the tokens after it."""

    side: Side
    view: dict[str, Any]
    step: GrowingStep
    shift: Any  # of positions, in models where they depend on pictures


class Explorer:
    """A model with one or two adapters, for several threads.

    `usage` holds, by adapter, the shares by task and block from the record of its training.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        adapters: Mapping[str, NamedAdapter],
        name: str = "",
        usage: Mapping[str, Any] | None = None,
    ) -> None:
        require_context(model)  # or it has nothing to show
        self.model, self.name, self.usage, self.adapters = model, name, usage or {}, dict[str, NamedAdapter]()
        for own_name, known in adapters.items():
            config = model.peft_config[known.peft_name]
            by_task = getattr(config, "granularity", "") == "task" or getattr(config, "placement", "") == "nested"
            self.adapters[own_name] = known if by_task else replace(known, task_ids={})
        self.prompts = Prompts(model, tokenizer, MOST_TOKENS)
        self.tokenizer, self.pictures, self.limit = self.prompts.tokenizer, self.prompts.pictures, self.prompts.limit
        pad = self.tokenizer.pad_token_id
        self.reader = AnswerReader(model, self.tokenizer.eos_token_id if pad is None else pad, self.pictures)
        self.ends = end_ids(model, self.tokenizer)
        self._lock = threading.Lock()

    def about(self) -> dict[str, Any]:
        """What the page has to know before the first prompt."""
        adapters = [
            {"name": name, "tasks": sorted(known.task_ids), "usage": self.usage.get(name)}
            for name, known in self.adapters.items()
        ]
        return {"model": self.name, "adapters": adapters, "limit": self.limit, "pictures": self.pictures is not None}

    def read(self, prompt: Prompt, side: Side) -> Reading:
        """Read a prompt; the view of the result is what the page draws."""
        media = () if prompt.picture is None else (Media("image", prompt.picture),)
        ids = self.prompts.ids([{"role": "user", "content": prompt.text}], media)
        inputs = self._inputs(ids, media, self._task_id(prompt.task, side))
        with self._as(side) as trace:
            prefix = self.reader.read(inputs, cached=True)
            shift = getattr(self.reader.shifts, "rope_deltas", None)
        columns = routed(trace, len(ids))
        view = {
            "prompt": prompt.text,
            "adapter": side.adapter,
            "off": {block: list(names) for block, names in side.off.items()},
            "tokens": self._texts(ids),
            "blocks": [[block, trace.experts(block)] for block in columns],
            "next": self._next(prefix.logits[:, -1]),
            **packed(trace, columns),
        }
        return Reading(side, view, GrowingStep(self.reader, prefix), shift)

    def generate(self, prompt: Prompt, side: Side, most: int, temperature: float, seed: int) -> Iterator[dict]:
        """Continue a prompt token by token: each with its text, its gates and the text so far.

        The noise of sampling depends on the seed and the place alone, so that two sides that agree say the same.
        """
        reading = self.read(prompt, side)
        prefix, new_ids, noise = reading.step.prefix, list[int](), torch.Generator().manual_seed(seed)
        logits, most = prefix.logits[:, -1], min(most, self.limit - prefix.mask.shape[1])
        for _ in range(most):
            scores = logits[0].float().cpu()
            if temperature > 0:
                uniform = torch.rand(scores.shape, generator=noise).clamp_(1e-20, 1 - 1e-7)
                scores = scores / temperature - torch.log(-torch.log(uniform))
            token = int(scores.argmax())
            if token in self.ends:
                yield {"end": "The model ended its answer."}
                return
            logits, trace = self._advance(reading, token)
            new_ids.append(token)
            text = self.tokenizer.decode(new_ids, skip_special_tokens=True)
            yield {"token": self._texts([token])[0], "text": text, **packed(trace, routed(trace, 1))}
        yield {"end": f"Stopped after {most} tokens.", "next": self._next(logits)}

    def _advance(self, reading: Reading, token: int) -> tuple[Tensor, RoutingTrace]:
        """Run one more token: the logits [1, V] after it, and where it went."""
        with self._as(reading.side) as trace:
            if self.reader.shifts is not None:
                self.reader.shifts.rope_deltas = reading.shift
            return reading.step.after(torch.tensor([token], device=self.reader.device)), trace

    @contextmanager
    def _as(self, side: Side) -> Iterator[RoutingTrace]:
        """Inside, the model is this side, and belongs to this thread."""
        known = self._known(side)
        with self._lock, evaluating(self.model), record_routing(self.model, probabilities=True) as trace:
            if known is not None and self.model.active_adapters != [known.peft_name]:
                self.model.set_adapter(known.peft_name)
            with self.model.disable_adapter() if known is None else nullcontext(), knock_out(self.model, side.off):
                yield trace

    def _known(self, side: Side) -> NamedAdapter | None:
        if side.adapter != BASE and side.adapter not in self.adapters:
            names = [BASE, *self.adapters]
            known = f"{did_you_mean(side.adapter, names)} Known: {', '.join(names)}."
            raise ConfigError(f"there is no adapter {side.adapter!r}.{known}", title="adapter")
        if side.adapter == BASE and side.off:
            raise ConfigError("the base model has no experts that could be switched off.", title="adapter")
        return None if side.adapter == BASE else self.adapters[side.adapter]

    def _task_id(self, task: str | None, side: Side) -> int | None:
        known = self._known(side)
        if known is None or not known.task_ids:
            return None
        if task is None or task not in known.task_ids:
            names = ", ".join(sorted(known.task_ids))
            raise ConfigError(f"adapter {side.adapter!r} routes by task: choose one of {names}.", title="task")
        return known.task_ids[task]

    def _inputs(self, ids: list[int], media: tuple[Media, ...], task_id: int | None) -> Inputs:
        device = self.reader.device
        prompts, length = torch.tensor([ids], device=device), torch.tensor([len(ids)], device=device)
        task_ids: Any = None if task_id is None else torch.tensor([task_id], device=device)
        inputs = Inputs(True, prompts, length, task_ids, prompts[:, :0], length, length * 0)
        if media and self.pictures is not None:
            inputs.shown = {name: tensor.to(device) for name, tensor in self.pictures.tensors([media]).items()}
            inputs.shown |= self.pictures.kinds(prompts)
        return inputs

    def _next(self, logits: Tensor) -> list[list[Any]]:
        """The most likely next tokens with their probabilities."""
        p, ids = logits[0].float().softmax(-1).topk(min(SHOWN, logits.shape[-1]))
        return [[text, round(value, 5)] for text, value in zip(self._texts(ids.tolist()), p.tolist(), strict=True)]

    def _texts(self, ids: list[int]) -> list[str]:
        """Tokens as people read them, each by itself; part of a character is shown as the tokenizer names it."""
        found = self.tokenizer.batch_decode([[token] for token in ids], clean_up_tokenization_spaces=False)
        names = [
            name or f"<{token}>" for token, name in zip(ids, self.tokenizer.convert_ids_to_tokens(ids), strict=True)
        ]
        return [
            name if "\ufffd" in text or not text else f" {text}" if name.startswith("▁") and text[0] != " " else text
            for name, text in zip(names, found, strict=True)
        ]


def routed(trace: RoutingTrace, tokens: int) -> list[str]:
    """The blocks that have routed these tokens; those of a vision tower route others."""
    return [block for block in trace.blocks() if trace.gates(block).shape[:2] == (1, tokens)]


def packed(trace: RoutingTrace, blocks: Sequence[str]) -> dict[str, Any]:
    """The gates [T, C] in 16 bits each, and what the routers gave all experts where that says more."""
    if not blocks:
        return {"gates": "", "probabilities": None, "scale": 1.0}
    gates = torch.cat([trace.gates(block)[0].float().cpu() for block in blocks], -1)
    known = [trace.probabilities(block) for block in blocks]
    probabilities = [trace.gates(block) if p is None else p for block, p in zip(blocks, known, strict=True)]
    p = torch.cat([each[0].float().cpu() for each in probabilities], -1)
    scale = max(1.0, float(gates.max()))
    return {"gates": _text(gates, scale), "probabilities": None if p.equal(gates) else _text(p, scale), "scale": scale}


def _text(values: Tensor, scale: float) -> str:
    rounded = (values / scale * 65535).round().clamp(0, 65535).numpy().astype("<u2")
    return base64.b64encode(np.ascontiguousarray(rounded).tobytes()).decode()


def recorded(model: Any, tokenizer: Any, prompts: Sequence[str], adapter_name: str = "adapter") -> list[dict[str, Any]]:
    """Views of prompts for a page without a server (`explorer.fragment`): of the adapter, then of the base model."""
    task_ids = getattr(model, TASK_IDS, {})
    explorer = Explorer(model, tokenizer, {adapter_name: NamedAdapter(model.active_adapters[0], task_ids)})
    task = min(task_ids, default=None)
    asked = [(Prompt(text, task=task), Side(name)) for text in prompts for name in (adapter_name, BASE)]
    return [explorer.read(prompt, side).view for prompt, side in asked]


def load(paths: Sequence[str | Path], base: str | None = None) -> Explorer:
    """The adapters of one or two folders on their base model."""
    found, usage = load_adapters(paths, base), dict[str, Any]()
    for name, known in found.named.items():
        with suppress(ConfigError):  # there may be no record, or another one
            usage[name] = read_record(known.folder.parent / "record.json").metrics.get("usage", {}).get("loads")
    return Explorer(found.model, found.tokenizer, found.named, found.base_name, usage)
