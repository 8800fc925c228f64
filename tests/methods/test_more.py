"""MoRE, nested ranks chosen by task: the promises every method keeps, and bad input."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import GenerationConfig

import monkeyjump as mj
from tests.helpers import PAD, assert_same, gradients, lm_batch, padded, tiny_llama, token_ids, wrap
from tests.methods.structures import adapted_more, batch_of, more, selectors, spread_selectors


def test_identity_at_the_start() -> None:
    batch = batch_of([0, 1, 2])
    base = tiny_llama()
    expected = base(input_ids=batch["input_ids"]).logits
    model = wrap(tiny_llama(), more())
    assert torch.equal(model(**batch).logits, expected)


def test_packed_rows_take_one_task_per_sequence() -> None:
    model = adapted_more(tiny_llama(attn_implementation="eager"), contrastive_weight=0.0).eval()
    ids, tasks = token_ids(2, 5), torch.tensor([2, 0])
    packed = {"input_ids": ids.reshape(1, -1), "position_ids": torch.arange(5).repeat(1, 2)}
    seq_idx = torch.arange(2).repeat_interleave(5)[None].int()
    logits = model(**packed, seq_idx=seq_idx, task_ids=tasks, use_cache=False).logits.reshape(2, 5, -1)
    torch.testing.assert_close(logits, model(input_ids=ids, task_ids=tasks).logits, rtol=1e-4, atol=1e-4)
    with_loss = adapted_more(contrastive_weight=0.1).train()
    with pytest.raises(mj.ConfigError, match="do not pack"):
        with_loss(**packed, seq_idx=seq_idx, task_ids=tasks, labels=packed["input_ids"])


def test_padding_changes_nothing() -> None:
    model = adapted_more().eval()
    rows = [token_ids(1, n, seed=n)[0] for n in (4, 6)]
    for side in ("left", "right"):
        ids = padded(rows, side, 9)
        mask = (ids != PAD).long()
        positions = (mask.cumsum(1) - 1).clamp_min(0)
        tasks = torch.tensor([2, 1])
        logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, task_ids=tasks).logits
        for i, row in enumerate(rows):
            alone = model(input_ids=row[None], task_ids=tasks[i : i + 1]).logits[0]
            torch.testing.assert_close(logits[i][mask[i].bool()], alone, rtol=1e-4, atol=1e-4)


def test_padding_does_not_enter_the_task_loss() -> None:
    losses = []
    for width in (8, 11):
        model = adapted_more(contrastive_weight=0.1).train()
        ids = padded([token_ids(1, 8, seed=4)[0]], "left", width)
        mask = (ids != PAD).long()
        labels = ids.clone()
        labels[:, : width - 4] = -100
        positions = (mask.cumsum(1) - 1).clamp_min(0)
        out = model(
            input_ids=ids, attention_mask=mask, labels=labels, position_ids=positions, task_ids=torch.tensor([1])
        )
        losses.append(out.loss)
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-5)


def test_checkpointing_on_equals_off() -> None:
    found = []
    for checkpointing in (False, True):
        model = adapted_more(contrastive_weight=0.1).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        losses = [model(**batch_of([0, 1, 2], seed=1)).loss, model(**batch_of([2, 2, 0], seed=2, prompt=2)).loss]
        (losses[0] - 0.5 * losses[1]).backward()  # the first is recomputed after the second forward
        found.append(gradients(model))
    assert_same(found[0], found[1], rtol=1e-4, atol=1e-6)


def test_saved_equals_loaded(tmp_path: Path) -> None:
    model = adapted_more().eval()
    batch = batch_of([2, 1, 0])
    model.save_pretrained(str(tmp_path))
    again = PeftModel.from_pretrained(tiny_llama(), tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(model(**batch).logits, again(**batch).logits)
    assert_same(dict(model.state_dict()), dict(again.state_dict()))


@pytest.mark.parametrize("how", [{"num_beams": 1}, {"num_beams": 2}], ids=["greedy", "beam"])
@pytest.mark.parametrize("told", [True, False], ids=["task ids", "nearest task"])
@pytest.mark.filterwarnings("ignore:.*routes by task but got no.*")
@pytest.mark.parametrize("task_rep", ["mean", "prompt", "first"])
def test_cached_equals_uncached_generation(how: dict[str, int], told: bool, task_rep: str) -> None:
    model = adapted_more(task_rep=task_rep).eval()
    ids = padded([token_ids(1, n, seed=n)[0] for n in (4, 6)], "left", 7)
    extra = {"task_ids": torch.tensor([2, 0])} if told else {}
    results = []
    for cache in (True, False):
        config = GenerationConfig(max_new_tokens=5, min_new_tokens=5, pad_token_id=PAD, use_cache=cache, **how)
        results.append(
            model.generate(input_ids=ids, attention_mask=(ids != PAD).long(), generation_config=config, **extra)
        )
    assert torch.equal(*results)


def test_deepcopy_and_unload_leave_nothing_behind() -> None:
    base = tiny_llama()
    batch = batch_of([0, 1, 2])
    before = base(input_ids=batch["input_ids"]).logits
    model = adapted_more(base).eval()
    expected = model(**batch).logits
    other = copy.deepcopy(model)
    spread_selectors(other, seed=50)
    assert not torch.equal(other(**batch).logits, expected)
    assert torch.equal(model(**batch).logits, expected)
    plain = model.unload()
    assert torch.equal(plain(input_ids=batch["input_ids"]).logits, before)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in plain.modules())


def test_bad_input() -> None:
    model = adapted_more().train()
    with pytest.raises(mj.ConfigError, match="needs `task_ids` in training"):
        model(**lm_batch())
    with pytest.raises(mj.ConfigError, match=r"must lie in 0..2"):
        model(**batch_of([0, 1, 3]))
    with pytest.raises(mj.ConfigError, match="2 entries for a batch of 3 rows"):
        model(**{**lm_batch(3), "task_ids": torch.tensor([0, 1])})
    with pytest.raises(mj.ConfigError, match="has no ranks"):
        more(adapter="propulsion")
    with pytest.raises(mj.ConfigError, match="task_width=8"):
        more(task_width=8, contrastive_weight=0.1)
    narrow = adapted_more(task_width=8, contrastive_weight=0.0).eval()
    with pytest.raises(mj.ConfigError, match="pass task_ids"):
        narrow(input_ids=token_ids())
    assert narrow(**batch_of([0, 1, 2])).loss.isfinite()


def test_half_precision_keeps_selectors_in_fp32() -> None:
    model = adapted_more(tiny_llama().bfloat16()).to(torch.bfloat16).eval()
    assert all(p.dtype == torch.float32 for s in selectors(model).values() for p in s.parameters())
    assert model(**batch_of([0, 1, 2])).logits.dtype == torch.bfloat16
