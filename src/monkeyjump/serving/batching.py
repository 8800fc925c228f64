"""Where requests are computed: in turns on one thread, or those of one adapter together in ragged batches."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import torch
from transformers import ContinuousBatchingConfig
from transformers.cli.serving.utils import BaseGenerateManager, GenerationState

from monkeyjump.config import MonkeyJumpConfig
from monkeyjump.errors import ConfigError
from monkeyjump.evaluation.recorded_step import why_not
from monkeyjump.serving.answers import Answerer, Question, Sampling, small_batches
from monkeyjump.tuner.block_list import by_row

# Of all requests together, for which keys and values are kept where Transformers would take most of the memory: on a
# CPU, and on a GPU without flash attention, where every forward has a mask of so many columns.
TOKENS, TOKENS_AT_ONCE, PAGE = 65_536, 1024, 64
# Forwards are recorded by size: the tokens that one computes are rounded up to WIDTH, those in the cache to COLUMNS.
WIDTH, COLUMNS = 64, 4096
WARM_UP = 300  # seconds for the first answer: kernels are compiled


class OneThread(GenerationState):
    """One thread for all adapters of the model, where Transformers has one for each model name."""

    def get_manager(self, model_id: str, use_cb: bool = False) -> BaseGenerateManager:
        return super().get_manager("", use_cb)

    def warm_up(self, answerer: Answerer) -> None:
        """Answer once for every name, so that no client waits for kernels to be compiled."""
        manager: Any = self.get_manager("")
        for name in answerer.names:
            tasks = answerer.adapters[name].task_ids if name in answerer.adapters else {}
            question = Question([{"role": "user", "content": "Hi"}], task=next(iter(tasks), None))
            with suppress(ConfigError):  # of an adapter that can answer nothing: whoever asks it is told why
                manager.submit(answerer.answers, [question], name, Sampling(2)).result()

    def end(self) -> None:
        """End what runs. Requests on the thread look for that themselves, between two tokens."""

    def shutdown(self) -> None:
        """Wait for the thread to come to its end: a process that ends under it may crash."""
        for manager in self._generate_managers.values():
            manager.submit(lambda: None).result(timeout=5)


class RaggedBatch(OneThread):
    """Continuous batching for one name. Its thread knows no calls of ours, so the model is switched once and stays."""

    def __init__(self, answerer: Answerer, name: str) -> None:
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
        config = _batches(answerer)
        self.recorded = config is not None and bool(config.use_cuda_graph)
        super().__init__(continuous_batching=True, cb_config=config)
        if adapter is None:
            model.base_model.disable_adapter_layers()
        else:
            model.set_adapter(peft_name)
        settings = answerer.settings(Sampling(), answerer.prompts.limit)
        settings.use_cache = False
        manager: Any = self.get_manager("", use_cb=True)
        manager.init_cb(base, settings)
        self.batches, self.ended = manager._cb, False
        while self.batches.batch_processor is None and self.batches.is_running():  # before that it cannot be stopped
            time.sleep(0.01)
        if (error := self.batches.background_thread_status.fatal_error) is not None:
            raise ConfigError(
                f"adapter {name!r}: continuous batching does not start ({error}); leave --continuous-batching out.",
                title="model cannot be served",
            )

    def warm_up(self, answerer: Answerer) -> None:
        """Read a prompt of every width for which forwards are recorded, or one where none are."""
        for width in range(WIDTH, (TOKENS_AT_ONCE if self.recorded else WIDTH) + 1, WIDTH):
            ids = [(width + place) % answerer.model.config.vocab_size for place in range(width)]  # no two begin alike
            self.batches.add_request(ids[: answerer.prompts.limit - 2], max_new_tokens=2, eos_token_id=-1)
            found = self.batches.get_result(timeout=WARM_UP)
            if found is None or found.error:
                error = self.batches.background_thread_status.fatal_error if found is None else found.error
                raise ConfigError(
                    f"continuous batching cannot answer ({error or 'no answer in time'}): leave it out.",
                    title="model cannot be served",
                )

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


def _batches(answerer: Answerer) -> ContinuousBatchingConfig | None:
    """How many tokens are kept and computed at once; None where Transformers knows better."""
    attention = answerer.model.config._attn_implementation or ""
    if answerer.device.type == "cuda" and "flash" in attention:
        return None
    tokens = TOKENS
    if answerer.device.type == "cuda":
        tokens = kept_tokens(answerer.model.config, answerer.model.dtype, torch.cuda.mem_get_info(answerer.device)[0])
    answerer.prompts.limit = min(answerer.prompts.limit, tokens)  # a longer request would never fit
    config = small_batches(page=PAGE, pages=-(-tokens // PAGE), tokens=TOKENS_AT_ONCE)
    if answerer.device.type == "cuda" and why_not(answerer.decoding.reader) is None:
        config.use_cuda_graph = True  # else no forward with a mask is recorded
        config.q_padding_interval_size, config.kv_padding_interval_size = WIDTH, COLUMNS
    return config


def kept_tokens(config: Any, dtype: torch.dtype, free: int) -> int:
    """The tokens whose keys and values are kept: as many as are wanted, or as half of the free bytes hold."""
    config = config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    each = 2 * config.num_hidden_layers * heads * width * dtype.itemsize
    fitting = free // 2 // each // PAGE * PAGE
    if fitting < TOKENS_AT_ONCE:
        needed = 2 * TOKENS_AT_ONCE * each / 2**30
        raise ConfigError(
            f"{free / 2**30:.1f} GiB of the GPU are free, and continuous batching needs {needed:.1f} for the keys and "
            f"values of {TOKENS_AT_ONCE:,} tokens: leave --continuous-batching out.",
            title="model cannot be served",
        )
    return min(TOKENS, fitting)
