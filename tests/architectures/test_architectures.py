"""Every kind of block list: identity at the start, gates and projections by hand, save and load, training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from peft import PeftModel, get_peft_model
from transformers import PreTrainedModel

import monkeyjump as mj
from tests.helpers import VOCAB, assert_same, centers, disturb, layers_of, routed_layers, routing_state, token_ids

SIZE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "initializer_range": 0.2, "pad_token_id": 0,
}  # fmt: skip
GROUPED = {**SIZE, "num_key_value_heads": 2, "max_position_embeddings": 64}
LLAMA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj"]


def config(kind: Any, **settings: Any) -> Any:
    """A configuration whose every field the type stubs of Transformers do not know."""
    return kind(**settings)


def t5() -> PreTrainedModel:
    return tf.T5ForConditionalGeneration(
        config(
            tf.T5Config,
            vocab_size=VOCAB,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            pad_token_id=0,
        )
    )


# name -> (how to make it, targets, shared, the experts of its first block)
MODELS: dict[str, tuple[Callable[[], PreTrainedModel], list[str], list[str] | None, list[str]]] = {
    "llama": (lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**GROUPED)), LLAMA_TARGETS, ["o_proj", "gate_proj"],
              ["q_proj", "k_proj", "v_proj"]),
    "qwen2": (lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**GROUPED)), LLAMA_TARGETS, None, LLAMA_TARGETS),
    "qwen3": (lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**GROUPED, head_dim=8)), LLAMA_TARGETS, ["gate_proj"],
              ["q_proj", "k_proj", "v_proj", "o_proj"]),
    "mistral": (lambda: tf.MistralForCausalLM(tf.MistralConfig(**GROUPED, sliding_window=4)),
                ["q_proj", "v_proj", "down_proj"], None, ["q_proj", "v_proj", "down_proj"]),
    "gemma": (lambda: tf.GemmaForCausalLM(tf.GemmaConfig(**GROUPED, head_dim=8)), LLAMA_TARGETS, ["o_proj"],
              ["q_proj", "k_proj", "v_proj", "gate_proj"]),
    "phi3": (lambda: tf.Phi3ForCausalLM(tf.Phi3Config(**GROUPED, bos_token_id=1, eos_token_id=2)),
             ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"], ["o_proj"],
             ["qkv_proj", "gate_up_proj", "down_proj"]),
    "gpt2": (lambda: tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64,
                                                      initializer_range=0.2, resid_pdrop=0.0, embd_pdrop=0.0,
                                                      attn_pdrop=0.0)),
             ["c_attn", "c_proj", "c_fc"], None, ["c_attn", "attn.c_proj", "c_fc", "mlp.c_proj"]),
    "bert": (lambda: tf.BertForSequenceClassification(tf.BertConfig(**SIZE, hidden_dropout_prob=0.0,
                                                                    attention_probs_dropout_prob=0.0)),
             ["query", "key", "value"], None, ["query", "key", "value"]),
    "modernbert": (lambda: tf.ModernBertForSequenceClassification(
                       config(tf.ModernBertConfig, **SIZE, global_attn_every_n_layers=2, local_attention=8,
                                           reference_compile=False, attn_implementation="eager")),
                   ["Wqkv", "Wo", "Wi"], None, ["Wqkv", "attn.Wo", "Wi", "mlp.Wo"]),
    "t5": (t5, ["q", "k", "v", "o"], None, ["q", "k", "v", "o"]),
}  # fmt: skip
CAUSAL = ["llama", "qwen2", "qwen3", "mistral", "gemma", "phi3", "gpt2"]


def base_of(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return MODELS[name][0]().eval()


def task_type(name: str) -> str:
    return "CAUSAL_LM" if name in CAUSAL else "SEQ_2_SEQ_LM" if name == "t5" else "SEQ_CLS"


def config_of(name: str, **changes: Any) -> mj.MonkeyJumpConfig:
    _, targets, shared, _ = MODELS[name]
    settings: dict[str, Any] = {
        "target_modules": targets, "shared_modules": shared, "dropout": 0.0, "center_init": "random_normalized",
        "task_type": task_type(name), "ema_interval": 1,
    }  # fmt: skip
    if name == "t5":
        settings["exclude_modules"] = r".*EncDecAttention\.[kv]"
    settings |= changes
    return mj.MonkeyJumpConfig(**settings)


def wrapped(name: str, **changes: Any) -> PeftModel:
    model = get_peft_model(base_of(name), config_of(name, **changes))
    assert isinstance(model, PeftModel)
    return model


def batch_of(name: str) -> dict[str, torch.Tensor]:
    ids = token_ids(3, 7)
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    if name in CAUSAL:
        labels = ids.masked_fill(mask == 0, -100)
        labels[:, :2] = -100
    elif name == "t5":
        labels = token_ids(3, 5, seed=1)
    else:
        labels = torch.tensor([0, 1, 1])
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@pytest.mark.parametrize("name", MODELS)
def test_identity_at_the_start(name: str) -> None:
    base = base_of(name)
    with torch.no_grad():
        expected = base(**batch_of(name)).logits
        model = get_peft_model(base, config_of(name))
        assert torch.equal(model.eval()(**batch_of(name)).logits, expected)


@pytest.mark.parametrize("name", MODELS)
def test_gates_and_a_projection_by_hand(name: str) -> None:
    model = wrapped(name, temperature=0.5).eval()
    disturb(model)
    context = next(iter(layers_of(model).values())).context
    entering: dict[str, torch.Tensor] = {}
    calls: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for router in context.routers():
        model.get_base_model().get_submodule(router.path).register_forward_pre_hook(
            lambda m, args, kwargs, key=router.key: entering.__setitem__(
                key, args[0] if args else kwargs["hidden_states"]
            ),
            with_kwargs=True,
        )
    for path, layer in layers_of(model).items():
        layer.register_forward_hook(lambda m, args, out, path=path: calls.__setitem__(path, (args[0], out)))
    with torch.no_grad(), mj.record_routing(model) as trace:
        model(**batch_of(name))
    routers = list(context.routers())
    assert [router.key for router in routers] == trace.blocks()
    assert trace.experts(routers[0].key) == MODELS[name][3]
    for router in routers:
        h = entering[router.key].float()
        layers = router.layers["default"]
        c = torch.stack([layer.monkeyjump_center["default"] for layer in layers])
        cosines = (h @ c.T) / (h.norm(dim=-1, keepdim=True) * c.norm(dim=-1))
        p = torch.softmax(cosines / 0.5, -1)
        kept = torch.zeros_like(p).scatter(-1, cosines.topk(2, -1).indices, 1.0)
        torch.testing.assert_close(trace.gates(router.key), p * kept, rtol=1e-4, atol=1e-6)
        for position, layer in enumerate(layers):
            path = next(path for path, other in layers_of(model).items() if other is layer)
            x, out = calls[path]
            adapter: Any = layer.monkeyjump_adapter["default"]
            gate = (p * kept)[..., position : position + 1]
            with torch.no_grad():
                expected = layer.base_layer(x) + gate * 2.5 * (x @ adapter.A.T @ adapter.B.T)
            torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_training_moves_centres_and_a_loaded_model_is_the_same(name: str, tmp_path: Path) -> None:
    model = wrapped(name).train()
    disturb(model)
    start = centers(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for _ in range(2):
        model(**batch_of(name)).loss.backward()
        optimizer.step()
    moved = [path for path, center in centers(model).items() if not torch.equal(center, start[path])]
    assert len(moved) >= len(start) // 2
    assert all(torch.isfinite(center).all() for center in centers(model).values())
    for path, layer in routed_layers(model).items():
        parameters = list(layer.monkeyjump_adapter["default"].parameters())
        assert all(p.grad is not None for p in parameters), path
    model.save_pretrained(str(tmp_path))
    again = PeftModel.from_pretrained(base_of(name), tmp_path)
    assert_same(routing_state(model), routing_state(again))
    with torch.no_grad():
        assert torch.equal(model.eval()(**batch_of(name)).logits, again.eval()(**batch_of(name)).logits)


@pytest.mark.parametrize("name", MODELS)
def test_kmeans_and_default_targets(name: str) -> None:
    """`target_modules=None` knows the architecture, and the centres come from its data."""
    changes: dict[str, Any] = {"target_modules": None, "shared_modules": None, "center_init": "kmeans", "top_k": 1}
    model = wrapped(name, **changes)
    data = [{k: v for k, v in batch_of(name).items() if k != "labels" or name == "t5"}]
    report = mj.initialize_centers(model, data, progress=False, restarts=2)
    # real tokens only; the decoder of an encoder-decoder brings its own 15
    assert report.tokens_kept == 19
    for center in centers(model).values():
        torch.testing.assert_close(center.norm(), torch.tensor(1.0))


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("granularity", ["token", "sequence"])
def test_generation_with_and_without_a_cache(name: str, granularity: str) -> None:
    model = wrapped(name, granularity=granularity, temperature=0.2).eval()
    disturb(model)
    ids = token_ids(2, 5)
    out = [
        model.generate(input_ids=ids, max_new_tokens=5, min_new_tokens=5, do_sample=False, use_cache=cache,
                       pad_token_id=0)
        for cache in (True, False)
    ]  # fmt: skip
    assert torch.equal(out[0], out[1])


def test_t5_cross_attention_cannot_be_routed_token_by_token() -> None:
    with pytest.raises(mj.ConfigError) as caught:
        wrapped("t5", exclude_modules=None)
    assert len(caught.value.problems) == 4  # k and v of two decoder blocks
    for problem in caught.value.problems:
        assert "EncDecAttention" in problem
        assert "reads the encoder's tokens" in problem
        assert "granularity='sequence'" in problem


def test_t5_cross_attention_can_be_routed_by_sequence() -> None:
    model = wrapped("t5", exclude_modules=None, granularity="sequence").train()
    disturb(model)
    batch = batch_of("t5")
    with mj.record_routing(model) as trace:
        model(**batch).loss.backward()
    assert "EncDecAttention.k" in trace.experts("decoder.block.0")
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("training", [True, False])
def test_t5_answers_do_not_set_the_routing_of_the_decoder(training: bool) -> None:
    """The decoder is taught by the answer; what decides for it is its first token, as in generation."""
    gates = []
    for seed in (1, 2):
        model = wrapped("t5", granularity="sequence").train(training)
        disturb(model)
        batch = {**batch_of("t5"), "labels": token_ids(3, 5, seed=seed)}
        with mj.record_routing(model) as trace:
            model(**batch)
        gates.append({key: trace.gates(key) for key in trace.blocks()})
    assert set(gates[0]) == {f"{side}.block.{i}" for side in ("encoder", "decoder") for i in (0, 1)}
    assert_same(gates[0], gates[1])


@pytest.mark.parametrize("granularity", ["token", "sequence"])
def test_t5_generation_with_and_without_a_cache(granularity: str) -> None:
    model = wrapped("t5", granularity=granularity, temperature=0.2).eval()
    disturb(model)
    batch = {k: v for k, v in batch_of("t5").items() if k != "labels"}
    out = [
        model.generate(**batch, max_new_tokens=6, min_new_tokens=6, do_sample=False, use_cache=cache)
        for cache in (True, False)
    ]
    assert torch.equal(out[0], out[1])
