"""How answers are decoded where a model waits for the host: Transformers' sampling, with every step one CUDA graph.

`generate` prepares prompts, settings and criteria as ever and hands over the loop (`custom_generate`). The prompt is
run as it comes; its keys and values are then copied to where the recorded step reads them. A step is recorded for the
adapters of the rows, since no Python runs when it is replayed.

Shapes: B prompts, P prompt tokens (padded on the left).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from monkeyjump.evaluation.forward import AnswerReader, Prefix
from monkeyjump.evaluation.recorded_step import GrowingStep, RecordedStep, new_graph, say_why
from monkeyjump.tuner.call import Generation, running

MOST = 8  # recordings that are kept; each holds the keys and values of its rows
LEAST_SLOTS = 256


class Decoding:
    """The recorded steps of one model. One thread at a time decodes with them."""

    def __init__(self, model: Any, pad_id: int) -> None:
        self.reader = AnswerReader(model, pad_id)
        self._new_graph = new_graph(self.reader)
        if self._new_graph is not None and any(map(_picks_rows, model.modules())):
            self._new_graph = None
            say_why("PEFT's own layers pick the rows of an adapter on the host")
        self._recorded: OrderedDict[tuple[Any, ...], RecordedStep] = OrderedDict()
        self._lock = threading.Lock()

    def arguments(self, adapter_names: Sequence[str], streamer: Any) -> dict[str, Any]:
        """What to tell `generate` for such rows; nothing where steps are not recorded."""
        if self._new_graph is None:
            return {}

        def loop(model: Any, input_ids: Tensor, **given: Any) -> Tensor:
            with self._lock:
                return self._loop(model, input_ids, tuple(adapter_names), streamer, **given)

        return {"custom_generate": loop}

    def _loop(
        self,
        model: Any,
        ids: Tensor,
        adapter_names: tuple[str, ...],
        streamer: Any,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **given: Any,
    ) -> Tensor:
        inputs = model.prepare_inputs_for_generation(ids, is_first_iteration=True, **given)
        output = model(**inputs, return_dict=True)
        shown = given.get("attention_mask")  # none where no row is padded
        mask = torch.ones_like(ids, dtype=torch.bool) if shown is None else shown.bool()
        generation = running().generation or Generation(ids.shape[1])
        prefix = Prefix(output.logits[:, -1:], output.past_key_values, mask, mask.sum(1), generation)
        after = self._steps(prefix, adapter_names, generation_config.max_length or 0)
        logits, ended = prefix.logits[:, -1], torch.zeros_like(mask[:, 0])
        while True:
            scores = logits_processor(ids, logits.float())  # type: ignore[arg-type]
            if generation_config.do_sample:
                tokens = torch.multinomial(scores.softmax(-1), 1).squeeze(1)
            else:
                tokens = scores.argmax(-1)
            tokens = tokens.masked_fill(ended, self.reader.pad_id)
            ids = torch.cat([ids, tokens.unsqueeze(1)], 1)
            if streamer is not None:
                streamer.put(tokens.cpu())
            ended = ended | stopping_criteria(ids, None)
            if bool(ended.all()):
                break
            logits = after(tokens)
        if streamer is not None:
            streamer.end()
        return ids

    def _steps(self, prefix: Prefix, adapter_names: tuple[str, ...], length: int) -> Callable[[Tensor], Tensor]:
        B, P = prefix.mask.shape  # rows are not filled up: each has its adapter's name
        S = max(LEAST_SLOTS, 1 << (max(length, P) - 1).bit_length())
        key = (adapter_names, S)
        recorded = self._recorded.pop(key, None)
        if recorded is None and self._new_graph is not None:
            while len(self._recorded) >= MOST:
                self._recorded.popitem(last=False)
            try:
                recorded = RecordedStep(self.reader, prefix, B, S, self._new_graph())
            except RuntimeError as error:
                if not isinstance(error, torch.OutOfMemoryError):  # else the next request may be shorter
                    self._new_graph = None
                self._recorded.clear()
                say_why(str(error).splitlines()[0])
        if recorded is None:
            return GrowingStep(self.reader, prefix).after
        self._recorded[key] = recorded
        recorded.start(prefix)
        return recorded.after


def _picks_rows(module: nn.Module) -> bool:
    """Whether it is a layer of PEFT, not ours, that computes the rows of each adapter by themselves."""
    return type(module).__module__.startswith("peft.") and hasattr(module, "_mixed_batch_forward")
