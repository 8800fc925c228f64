"""MixLoRA, a mixture of whole feed-forwards: its balance loss, every promise, and bad input."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model
from transformers import BertConfig, BertModel, GenerationConfig

import monkeyjump as mj
from monkeyjump.tuner.routers.mixlora import FeedForwardExperts
from tests.helpers import (
    PAD,
    REORDERED,
    assert_same,
    disturb,
    gradients,
    layers_of,
    lm_batch,
    padded,
    tiny_llama,
    token_ids,
    wrap,
)
from tests.methods.structures import (
    EXPERTS,
    K,
    adapted_mixlora,
    disturb_all,
    feed_forwards,
    mixlora,
    routers,
    spread_routers,
)
from tests.tuner.test_count import ATTENTION


def test_the_two_layouts() -> None:
    published, matched = mj.methods.build("mixlora"), mj.methods.build("mixlora", preset="mj_paper")
    assert (published.placement, published.experts, published.renormalize) == ("ffn", 8, True)
    assert matched.placement == "projection"
    assert matched.experts == 4


@pytest.mark.parametrize(
    ("dtype", "close"), [(torch.float32, REORDERED), (torch.bfloat16, {"rtol": 2**-6, "atol": 2**-6})], ids=str
)
def test_identity_at_the_start(dtype: torch.dtype, close: dict[str, Any]) -> None:
    found = wrap(tiny_llama().to(dtype), mixlora())(**lm_batch()).logits
    torch.testing.assert_close(found, tiny_llama().to(dtype)(**lm_batch()).logits, **close)


def test_balance_loss_equals_its_definition() -> None:
    """Mixtral's form, k N sum_n f_n P_n over real tokens, the mean over blocks, times the weight."""
    batch = lm_batch()
    batch["attention_mask"][0, :3] = 0
    model = adapted_mixlora(aux_loss_weight=0.5).train()
    inputs: list[torch.Tensor] = []
    for mlp in feed_forwards(model):
        mlp.register_forward_pre_hook(lambda _, args: inputs.append(args[0]), prepend=True)
    loss = model(**batch).loss
    without = adapted_mixlora(aux_loss_weight=0.0).train()(**batch).loss
    terms = []
    for mlp, x in zip(feed_forwards(model), inputs, strict=True):
        (router,) = routers(mlp).values()
        p = torch.softmax(x @ router.weight.T, -1)[batch["attention_mask"].bool()]
        f = torch.nn.functional.one_hot(p.topk(K, -1).indices, EXPERTS).float().mean((0, 1))
        terms.append(K * EXPERTS * (f * p.mean(0)).sum())
    torch.testing.assert_close(loss - without, 0.5 * torch.stack(terms).mean(), rtol=1e-4, atol=1e-5)


def test_balance_loss_reaches_the_router_of_a_model_without_feed_forward_targets() -> None:
    model = wrap(tiny_llama(), mixlora(target_modules=ATTENTION))
    disturb_all(model)
    model.train()(**lm_batch()).loss.backward()
    assert all(gradient.abs().sum() > 0 for gradient in gradients(model).values())
    silent = wrap(tiny_llama(), mixlora(target_modules=ATTENTION, aux_loss_weight=0.0)).train()
    silent(**lm_batch()).loss.backward()
    assert all(name in gradients(silent) for name in gradients(model))  # zero, not missing: DDP asks for that
    frozen = wrap(tiny_llama(), mixlora(target_modules=ATTENTION)).eval()  # no balance in evaluation mode
    frozen(**lm_batch()).loss.backward()
    assert gradients(frozen).keys() == gradients(model).keys()
    plain = wrap(
        tiny_llama(), mj.methods.build("lora", r=2, alpha=mixlora().alpha, dropout=0.0, target_modules=ATTENTION)
    )
    disturb(plain)
    assert torch.equal(model.eval()(**lm_batch()).logits, plain.eval()(**lm_batch()).logits)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(side: str) -> None:
    model = adapted_mixlora().eval()
    rows = [token_ids(1, n, seed=n)[0] for n in (4, 6)]
    ids = padded(rows, side, 9)
    mask = (ids != PAD).long()
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    for i, row in enumerate(rows):
        alone = model(input_ids=row[None]).logits[0]
        torch.testing.assert_close(logits[i][mask[i].bool()], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_checkpointing_on_equals_off(dropout: float) -> None:
    found = []
    for checkpointing in (False, True):
        model = adapted_mixlora(dropout=dropout, aux_loss_weight=0.1).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(5)
        padded_batch = lm_batch(seed=2)
        padded_batch["attention_mask"][0, :2] = 0
        first, second = model(**lm_batch(seed=1)).loss, model(**padded_batch).loss
        (first - 0.5 * second).backward()
        found.append(gradients(model))
    assert_same(found[0], found[1], rtol=1e-4, atol=1e-6)


def test_saved_equals_loaded(tmp_path: Path) -> None:
    model = adapted_mixlora().eval()
    model.save_pretrained(str(tmp_path))
    again = PeftModel.from_pretrained(tiny_llama(), tmp_path).eval()
    assert_same(dict(model.state_dict()), dict(again.state_dict()))
    with torch.no_grad():
        assert torch.equal(model(**lm_batch()).logits, again(**lm_batch()).logits)


@pytest.mark.parametrize("beams", [1, 2])
def test_cached_equals_uncached_generation(beams: int) -> None:
    model = adapted_mixlora().eval()
    ids = padded([token_ids(1, n, seed=n)[0] for n in (4, 6)], "left", 7)
    found = []
    for cache in (True, False):
        config = GenerationConfig(
            max_new_tokens=5, min_new_tokens=5, pad_token_id=PAD, use_cache=cache, num_beams=beams
        )
        found.append(model.generate(input_ids=ids, attention_mask=(ids != PAD).long(), generation_config=config))
    assert torch.equal(*found)


def hooks_of(model: torch.nn.Module) -> list[Any]:
    return [hook for m in model.modules() for hook in [*m._forward_hooks.values(), *m._forward_pre_hooks.values()]]


def test_deepcopy_and_unload_leave_nothing_behind() -> None:
    base_model, batch = tiny_llama(), lm_batch()
    before = base_model(**batch).logits
    model = adapted_mixlora(base_model).eval()
    expected = model(**batch).logits
    other = copy.deepcopy(model)
    owners = {id(h.__self__) for h in hooks_of(other) if isinstance(getattr(h, "__self__", None), FeedForwardExperts)}
    assert owners
    assert not owners & {id(getattr(h, "__self__", None)) for h in hooks_of(model)}
    spread_routers(other, seed=50)
    assert not torch.equal(other(**batch).logits, expected)
    assert torch.equal(model(**batch).logits, expected)
    plain = model.unload()
    assert torch.equal(plain(**batch).logits, before)
    assert not hooks_of(plain)


def test_disabled_is_the_base_model_and_a_failed_forward_leaves_no_state() -> None:
    base_model, batch = tiny_llama(), lm_batch()
    before = base_model(**batch).logits
    model = adapted_mixlora(base_model).eval()
    expected = model(**batch).logits
    with model.disable_adapter():
        assert torch.equal(model(**batch).logits, before)
    down = feed_forwards(model)[1].down_proj
    handle = down.base_layer.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("stop")))
    with pytest.raises(RuntimeError, match="stop"):
        model(**batch)
    handle.remove()
    assert torch.equal(model(**batch).logits, expected)


def test_two_adapters_take_turns() -> None:
    model = adapted_mixlora().eval()
    one = model(**lm_batch()).logits
    model.add_adapter("other", mixlora(experts=3))
    model.set_adapter("other")
    torch.testing.assert_close(model(**lm_batch()).logits, tiny_llama()(**lm_batch()).logits, **REORDERED)
    model.set_adapter("default")
    assert torch.equal(model(**lm_batch()).logits, one)
    model.delete_adapter("other")
    assert torch.equal(model(**lm_batch()).logits, one)


def test_half_precision() -> None:
    model = adapted_mixlora(tiny_llama().bfloat16()).train()
    out = model(**lm_batch())
    assert out.logits.dtype == torch.bfloat16
    out.loss.backward()
    assert {g.dtype for g in gradients(model).values()} == {torch.float32}


def test_bad_settings() -> None:
    with pytest.raises(mj.ConfigError, match="top_k=5 exceeds"):
        mixlora(top_k=5)
    with pytest.raises(mj.ConfigError, match="renormalize"):
        mixlora(renormalize=False)
    with pytest.raises(mj.ConfigError, match="sigmoid"):
        mixlora(router="sigmoid", aux_loss_weight=0.0)


def test_a_model_whose_feed_forward_is_no_module() -> None:
    bert = BertModel(
        BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
    )
    both = mixlora(target_modules=["query", "intermediate.dense", "output.dense"], task_type=None)
    with pytest.raises(mj.ConfigError, match="have only the block in common"):
        get_peft_model(bert, both)
    assert not layers_of(bert)
    half = get_peft_model(bert, mixlora(target_modules=["query", "intermediate.dense"], task_type=None))
    with pytest.raises(mj.ConfigError, match="one state per token"):
        half(input_ids=torch.ones(1, 4, dtype=torch.long))
