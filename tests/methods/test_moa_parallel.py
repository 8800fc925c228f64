"""MoA's further experts, the parallel bottleneck and the prompt, against plain code written here."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel, get_peft_model
from transformers import BertConfig, BertModel, GenerationConfig

import monkeyjump as mj
from monkeyjump.adapters.moa import AttentionPrompt, ParallelBottleneck
from monkeyjump.bench.variants import empty_model
from tests.helpers import PAD, assert_same, gradients, lm_batch, padded, tiny_llama, token_ids, wrap
from tests.methods.structures import adapted_moa, moa, parts

KINDS = [["parallel"], ["prompt"], ["parallel", "prompt"], ["prompt", "parallel"]]
IDS = ["+".join(kinds) for kinds in KINDS]


def test_golden_counts() -> None:
    """The full published mix: LoRA on q, k, v, o and down, bottleneck, prompt, and a SwiGLU router over seven gates.

    What it is without the further experts is counted in `test_counts.py`.
    """
    with torch.device("meta"):
        model = get_peft_model(empty_model("qwen2-0.5b", layers=1), moa())  # one of 24 blocks
    assert sum(p.numel() for m in parts(model, ParallelBottleneck) for p in m.parameters()) == 29_584
    assert sum(p.numel() for m in parts(model, AttentionPrompt) for p in m.parameters()) == 8_974
    count = mj.count_parameters(model)
    assert (24 * count.trainable, count.router) == (2_682_648, 50_435)


def test_nearly_the_identity_at_the_start() -> None:
    """The prompt is closed; the bottleneck starts at the authors' Xavier gain of 1e-4, which is not quite zero."""
    batch = lm_batch()
    expected = tiny_llama()(**batch).logits
    closed = wrap(tiny_llama(), moa(extra_experts=["prompt"]))(**batch).logits
    assert torch.equal(closed, expected)
    nearly = wrap(tiny_llama(), moa())(**batch).logits
    torch.testing.assert_close(nearly, expected, rtol=1e-5, atol=1e-5)


def reference_block(layer: Any, gates: torch.Tensor, kinds: list[str]) -> Any:
    """The attention and the feed-forward of one Llama block with the further experts written out."""
    attention, mlp = layer.self_attn, layer.mlp
    first = attention.q_proj
    extra = {kind: gates[..., 5 + i, None] for i, kind in enumerate(kinds)}

    def output(x: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
        if "prompt" not in kinds:
            return x
        expert = first.monkeyjump_prompt["default"]
        heads = []
        d, per_group = attention.head_dim, 4 // 2
        k, v = attention.k_proj.base_layer(expert.prompt), attention.v_proj.base_layer(expert.prompt)
        for head in range(4):
            q = queries[..., head * d : (head + 1) * d]
            group = slice(head // per_group * d, (head // per_group + 1) * d)
            weights = torch.softmax(q @ k[:, group].T / math.sqrt(d), -1)
            heads.append(torch.tanh(expert.head_gate[head]) * extra["prompt"] * (weights @ v[:, group]))
        return x + torch.cat(heads, -1)

    def feed_forward(x: torch.Tensor) -> torch.Tensor:
        y = mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x))
        if "parallel" in kinds:
            p = first.monkeyjump_parallel["default"]
            y = y + extra["parallel"] * (F.silu(x @ p.down.T + p.down_bias) @ p.up.T + p.up_bias)
        return y

    return output, feed_forward


@pytest.mark.parametrize("kinds", KINDS, ids=IDS)
def test_equals_plain_code(kinds: list[str]) -> None:
    """One block: outputs, and the gradients of everything in it, router included."""
    batch = lm_batch()
    model = adapted_moa(tiny_llama(1), extra_experts=kinds).double().train()
    other = copy.deepcopy(model)
    base: Any = other.get_base_model()
    layer = base.model.layers[0]
    router = layer.self_attn.q_proj.monkeyjump_router["default"]
    state: dict[str, Any] = {}
    for module in other.modules():  # take every hook of the extras off the copy, then write them out
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for key, hook in list(hooks.items()):
                if hook.__name__ in ("beside_feed_forward", "after_query", "before_output"):
                    del hooks[key]

    def enter(module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        gates = router(args[0] if args else kwargs["hidden_states"]).gates
        state["output"], state["ffn"] = reference_block(layer, gates, kinds)

    layer.register_forward_pre_hook(enter, with_kwargs=True)
    layer.self_attn.q_proj.register_forward_hook(lambda m, a, out: state.__setitem__("q", out))
    layer.self_attn.o_proj.register_forward_pre_hook(lambda m, a: (state["output"](a[0], state["q"]),))
    layer.mlp.register_forward_hook(lambda m, a, out: state["ffn"](a[0]))
    found, expected = model(**batch), other(**batch)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-9, atol=1e-9)
    found.loss.backward()
    expected.loss.backward()
    assert_same(gradients(model), gradients(other), rtol=1e-8, atol=1e-10)
    assert all(g.abs().sum() > 0 for g in gradients(model).values())
    plain = adapted_moa(tiny_llama(1), extra_experts=[]).double()
    assert not torch.allclose(plain(**batch).logits, found.logits, atol=1e-3)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(side: str) -> None:
    model = adapted_moa().eval()
    rows = [token_ids(1, n, seed=n)[0] for n in (4, 6)]
    ids = padded(rows, side, 9)
    mask = (ids != PAD).long()
    logits = model(input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp_min(0)).logits
    for i, row in enumerate(rows):
        alone = model(input_ids=row[None]).logits[0]
        torch.testing.assert_close(logits[i][mask[i].bool()], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_on_equals_off(reentrant: bool) -> None:
    found = []
    for checkpointing in (False, True):
        model = adapted_moa(dropout=0.2).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        torch.manual_seed(5)
        model(**lm_batch()).loss.backward()
        found.append(gradients(model))
    assert_same(found[0], found[1], rtol=1e-4, atol=1e-6)


def test_saved_equals_loaded(tmp_path: Path) -> None:
    model = adapted_moa().eval()
    model.save_pretrained(str(tmp_path))
    again = PeftModel.from_pretrained(tiny_llama(), tmp_path).eval()
    assert_same(dict(model.state_dict()), dict(again.state_dict()))
    with torch.no_grad():
        assert torch.equal(model(**lm_batch()).logits, again(**lm_batch()).logits)


def test_cached_equals_uncached_generation() -> None:
    model = adapted_moa().eval()
    ids = padded([token_ids(1, n, seed=n)[0] for n in (4, 6)], "left", 7)
    found = []
    for cache in (True, False):
        config = GenerationConfig(max_new_tokens=5, min_new_tokens=5, pad_token_id=PAD, use_cache=cache)
        found.append(model.generate(input_ids=ids, attention_mask=(ids != PAD).long(), generation_config=config))
    assert torch.equal(*found)


def test_deepcopy_and_unload_leave_nothing_behind() -> None:
    base, batch = tiny_llama(), lm_batch()
    before = base(**batch).logits
    model = adapted_moa(base).eval()
    expected = model(**batch).logits
    other = copy.deepcopy(model)
    with torch.no_grad():
        for module in [*parts(other, ParallelBottleneck), *parts(other, AttentionPrompt)]:
            for parameter in module.parameters():
                parameter.mul_(2)
    assert not torch.allclose(other(**batch).logits, expected, atol=1e-3)
    assert torch.equal(model(**batch).logits, expected)
    with model.disable_adapter():
        assert torch.equal(model(**batch).logits, before)
    plain = model.unload()
    assert torch.equal(plain(**batch).logits, before)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in plain.modules())


def test_a_second_adapter_takes_turns() -> None:
    model = adapted_moa().eval()
    one = model(**lm_batch()).logits
    model.add_adapter("other", moa(extra_experts=["prompt"]))
    model.set_adapter("other")
    assert torch.equal(model(**lm_batch()).logits, tiny_llama()(**lm_batch()).logits)
    model.set_adapter("default")
    assert torch.equal(model(**lm_batch()).logits, one)
    model.delete_adapter("other")
    assert torch.equal(model(**lm_batch()).logits, one)


def test_the_trace_names_them() -> None:
    model = adapted_moa().eval()
    with mj.record_routing(model) as trace:
        model(**lm_batch())
    assert trace.experts("0") == ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj", "parallel", "prompt"]
    assert trace.gates("0").shape[-1] == 7


def test_half_precision() -> None:
    model = adapted_moa(tiny_llama().bfloat16()).to(torch.bfloat16).train()
    out = model(**lm_batch())
    assert out.logits.dtype == torch.bfloat16
    out.loss.backward()
    assert {g.dtype for g in gradients(model).values()} == {torch.float32}


def test_bad_input() -> None:
    with pytest.raises(mj.ConfigError, match="each once at most"):
        moa(extra_experts=["paralel"])
    with pytest.raises(mj.ConfigError, match="needs placement='block' with router='sigmoid'"):
        mj.MonkeyJumpConfig(method_options={"extra_experts": ["parallel"]})
    with pytest.raises(mj.ConfigError, match="have no router"):
        moa(layers_to_route=[])
    bert = BertModel(
        BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
    )
    with pytest.raises(mj.ConfigError, match="not a module of its own") as error:
        get_peft_model(bert, moa(target_modules=["query", "key"], task_type=None))
    assert "it has no attention with q_proj" in str(error.value)
