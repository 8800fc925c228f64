"""A tiny model that writes letters, with two adapters in folders of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from monkeyjump.models import load_model
from monkeyjump.serving.answers import Answerer, load
from tests.helpers import disturb, mj_config, tiny_llama, wrap
from tests.tasks.conftest import TEMPLATE

LONGEST = 8192  # tokens that the model reads: to write so many takes it half a minute


def letters() -> PreTrainedTokenizerFast:
    """A token for each printable byte and none for others: whatever the model writes is whole text."""
    alphabet = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ"]
    backend = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    fast.chat_template = TEMPLATE
    return fast


def save_model(folder: Path) -> Path:
    tokenizer = letters()
    size = max(tokenizer.get_vocab().values()) + 1
    model: Any = tiny_llama(2, vocab_size=size, max_position_embeddings=LONGEST, pad_token_id=tokenizer.pad_token_id)
    model.lm_head.weight.data[tokenizer.eos_token_id] = 0  # it never ends by itself
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_adapter(base: Path, folder: Path, seed: int, **changes: Any) -> Path:
    model = wrap(load_model(str(base))[0], mj_config(**changes))
    disturb(model, seed=seed)
    model.save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def folders(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """One routed by token, one by sequence."""
    home = tmp_path_factory.mktemp("adapters")
    return [
        save_adapter(base, home / "first" / "adapter", 1),
        save_adapter(base, home / "second", 2, granularity="sequence"),
    ]


@pytest.fixture(scope="session")
def answerer(folders: list[Path]) -> Answerer:
    return load(folders)
