from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from monkeyjump.errors import ConfigError
from monkeyjump.tasks.collate import PackingCollator, PaddingCollator
from monkeyjump.tasks.encode import IGNORE, Encoded

EOS = 1  # also the pad token, as in many models
ITEMS = [
    Encoded(np.array([5, 6, 7, 8, EOS]), 3, 2),
    Encoded(np.array([9, 4, EOS]), 1, 0),
    Encoded(np.array([3, 3, 9, 9, 9, 2, EOS]), 6, 1),
]


def test_padded_batch() -> None:
    batch = PaddingCollator(EOS)(ITEMS)
    assert batch["input_ids"].shape == batch["labels"].shape == batch["attention_mask"].shape == (3, 7)
    assert batch["attention_mask"].sum(1).tolist() == [5, 3, 7]
    assert batch["labels"][0].tolist() == [IGNORE, IGNORE, IGNORE, 8, EOS, IGNORE, IGNORE]  # eos learned, pads not
    assert batch["task_ids"].tolist() == [2, 0, 1]
    assert batch["prompt_lengths"].tolist() == [3, 1, 6]


def test_fixed_widths() -> None:
    assert PaddingCollator(EOS, multiple_of=8)(ITEMS)["input_ids"].shape == (3, 8)
    assert PaddingCollator(EOS, buckets=(32, 4, 16))(ITEMS)["labels"].shape == (3, 16)
    assert PaddingCollator(EOS, buckets=(32, 4, 16))(ITEMS[1:2])["labels"].shape == (1, 4)


def test_packed_row_holds_the_same_tokens() -> None:
    batch = PackingCollator(EOS, length=20, max_sequences=4)(ITEMS)
    assert "attention_mask" not in batch
    for name in ("input_ids", "labels", "position_ids", "seq_idx"):
        assert batch[name].shape == (1, 20)
    for index, item in enumerate(ITEMS):
        own = batch["seq_idx"][0] == index
        assert batch["input_ids"][0, own].tolist() == item.input_ids.tolist()
        learned = item.input_ids[item.prompt_length :].tolist()
        assert batch["labels"][0, own].tolist() == [IGNORE] * item.prompt_length + learned
        assert batch["position_ids"][0, own].tolist() == list(range(len(item)))
    tail = batch["seq_idx"][0] == -1
    assert tail.sum() == 5
    assert (batch["labels"][0, tail] == IGNORE).all()
    assert batch["task_ids"].tolist() == [2, 0, 1, -1]
    assert batch["prompt_lengths"].tolist() == [3, 1, 6, -1]


@pytest.mark.parametrize("most", [None, 6])
@pytest.mark.parametrize(("length", "tail"), [(15, []), (20, [15]), (24, [15, 22])])  # none, one, in two pieces
def test_boundaries_are_the_segments_of_the_row(length: int, tail: list[int], most: int | None) -> None:
    batch = PackingCollator(EOS, length=length, max_sequences=most, boundaries=7)(ITEMS)
    ends = batch["cu_seq_lens_q"]
    assert ends.dtype == torch.int32
    assert len(ends) == (len(ITEMS) + len(tail) + 1 if most is None else most + 2)
    assert torch.equal(ends, batch["cu_seq_lens_k"])
    assert batch["max_length_q"] == batch["max_length_k"] == 7
    starts = torch.where(batch["position_ids"][0] == 0)[0]
    assert ends.unique().tolist() == [*starts.tolist(), length]  # every position that starts at 0, none besides
    for index, (begin, end) in enumerate(pairwise(ends)):
        assert (batch["seq_idx"][0, begin:end] == (index if index < len(ITEMS) else -1)).all()
    assert ends[len(ITEMS) : len(ITEMS) + len(tail)].tolist() == tail
    assert ends.diff().max() <= 7


def test_boundaries_that_do_not_hold() -> None:
    with pytest.raises(ConfigError, match=r"max_sequences=3 leaves no room for a tail in pieces of boundaries=7"):
        PackingCollator(EOS, length=24, max_sequences=3, boundaries=7)(ITEMS)


def test_packed_and_padded_give_a_model_the_same_logits_and_loss() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=12)
    ).eval()
    padded, packed = PaddingCollator(EOS)(ITEMS), PackingCollator(EOS, length=20)(ITEMS)
    with torch.no_grad():
        one = model(**{name: padded[name] for name in ("input_ids", "attention_mask", "labels")})
        other = model(**{name: packed[name] for name in ("input_ids", "position_ids", "labels")}, use_cache=False)
    for index, item in enumerate(ITEMS):
        own = packed["seq_idx"][0] == index
        torch.testing.assert_close(other.logits[0, own], one.logits[index, : len(item)], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(other.loss, one.loss)
