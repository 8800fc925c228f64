"""What continuous batching needs, and what is told where it cannot be had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from monkeyjump.errors import ConfigError

pytest.importorskip("openai")
pytest.importorskip("uvicorn")
pytest.importorskip("fastapi")

from monkeyjump.serving.answers import load
from monkeyjump.serving.batching import RaggedBatch, kept_tokens
from monkeyjump.serving.completions import Limits
from monkeyjump.serving.server import Api


def test_no_more_tokens_are_kept_than_fit() -> None:
    config = LlamaConfig(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8)
    each = 2 * 32 * 8 * 128 * 2  # keys and values of a token in bf16, 128 KiB
    assert kept_tokens(config, torch.bfloat16, 2**40) == 65_536
    assert kept_tokens(config, torch.bfloat16, 2 * 10_000 * each) == 9_984  # whole pages
    with pytest.raises(ConfigError, match=r"0.1 GiB of the GPU are free, and continuous batching needs 0.2 for"):
        kept_tokens(config, torch.bfloat16, 2**27)


def test_batches_that_cannot_be_made_are_told_before_anything_is_served(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("no memory for the cache")

    monkeypatch.setattr("transformers.generation.continuous_batching.continuous_api.PagedAttentionCache", no_memory)
    with pytest.raises(ConfigError, match=r"does not start \(no memory for the cache\)"):
        Api(load(folders[:1]), Limits(), together="first")


def test_a_batch_that_cannot_answer_is_told_before_anything_is_served(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    api = Api(load(folders[:1]), Limits(), together="first")

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(api.answerer.model.get_base_model().model.layers[0], "forward", fails)
    with pytest.raises(ConfigError, match=r"cannot answer \(.*no kernel"):
        api.warm_up()
    assert isinstance(api.state, RaggedBatch)
    assert not api.state.batches.is_running()  # else the process would not end
