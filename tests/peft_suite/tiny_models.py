"""Tiny random models under the hub names that PEFT's tests ask for, in the layout of a Hugging Face cache.

The tests then load them by the ordinary `from_pretrained` in offline mode. Only the architecture of a name is kept; the
weights are random, and large enough that every part of a model matters.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf

REVISION = "0" * 40  # a cache names snapshots by commits
VOCABULARY = 128
SMALL: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
WIDE: dict[str, Any] = {**SMALL, "intermediate_size": 64, "num_key_value_heads": 2, "initializer_range": 0.1}
TOKENS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def _opt(layers: int = 5, **changes: Any) -> hf.OPTConfig:
    sizes = {**SMALL, "num_hidden_layers": layers, "ffn_dim": 64, "word_embed_proj_dim": 32, "init_std": 0.1}
    return hf.OPTConfig(**{**sizes, "max_position_embeddings": 128, **TOKENS, **changes})


def _gpt2() -> hf.GPT2Config:
    return hf.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=5, n_head=4, n_positions=128, initializer_range=0.1, **TOKENS
    )


def _gptj() -> hf.GPTJConfig:
    sizes = {"n_embd": 32, "n_layer": 5, "n_head": 4, "n_positions": 128, "rotary_dim": 4}
    return hf.GPTJConfig(vocab_size=VOCABULARY, initializer_range=0.1, **sizes, **TOKENS)


def _llama(**changes: Any) -> hf.LlamaConfig:
    return hf.LlamaConfig(**{**WIDE, "max_position_embeddings": 128, **TOKENS, **changes})


def _gemma3() -> hf.Gemma3TextConfig:
    return hf.Gemma3TextConfig(**WIDE, head_dim=8, max_position_embeddings=128, **TOKENS)


def _encoder(kind: Callable[..., Any]) -> Callable[[], Any]:
    def config() -> Any:
        sizes = {**SMALL, "num_hidden_layers": 5, "intermediate_size": 64, "max_position_embeddings": 128}
        return kind(**sizes, initializer_range=0.1, pad_token_id=0)

    return config


def _t5() -> hf.T5Config:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 3, "num_heads": 4}
    return hf.T5Config(vocab_size=VOCABULARY, **sizes, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1)


def _bart() -> hf.BartConfig:
    sides = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in _BART_SIDE.items()}
    tokens = {**TOKENS, "decoder_start_token_id": 2, "forced_eos_token_id": 2}
    return hf.BartConfig(
        vocab_size=VOCABULARY, d_model=32, **sides, max_position_embeddings=128, init_std=0.1, **tokens
    )


_BART_SIDE = {"layers": 2, "attention_heads": 4, "ffn_dim": 64}


def _bloom() -> hf.BloomConfig:
    return hf.BloomConfig(
        vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.1, **TOKENS
    )


def _clip_text() -> hf.CLIPTextConfig:
    sizes = {**SMALL, "intermediate_size": 64, "max_position_embeddings": 77, "projection_dim": 16}
    return hf.CLIPTextConfig(**sizes, **TOKENS)


def _experts(kind: Callable[..., Any]) -> Callable[[], Any]:
    def config() -> Any:
        experts = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        return kind(**WIDE, **experts, head_dim=8, max_position_embeddings=128, **TOKENS)

    return config


# hub name -> (class of the saved model, its configuration)
MODELS: dict[str, tuple[str, Callable[[], Any]]] = {
    "peft-internal-testing/tiny-random-OPTForCausalLM": ("OPTForCausalLM", _opt),
    "peft-internal-testing/opt-125m": ("OPTForCausalLM", lambda: _opt(layers=12)),
    "peft-internal-testing/tiny-random-GPT2LMHeadModel": ("GPT2LMHeadModel", _gpt2),
    "peft-internal-testing/tiny-random-gpt2": ("GPT2LMHeadModel", _gpt2),
    "hf-internal-testing/tiny-random-gpt2": ("GPT2LMHeadModel", _gpt2),
    "peft-internal-testing/tiny-random-GPTJForCausalLM": ("GPTJForCausalLM", _gptj),
    "peft-internal-testing/tiny-random-GPTNeoXForCausalLM": ("GPTNeoXForCausalLM", _encoder(hf.GPTNeoXConfig)),
    "trl-internal-testing/tiny-random-LlamaForCausalLM": ("LlamaForCausalLM", _llama),
    "peft-internal-testing/tiny-random-LlamaForCausalLM": ("LlamaForCausalLM", _llama),
    "hf-internal-testing/tiny-random-LlamaForCausalLM": ("LlamaForCausalLM", _llama),
    "trl-internal-testing/tiny-LlamaForSequenceClassification-3.2": ("LlamaForSequenceClassification", _llama),
    "hf-internal-testing/tiny-random-MistralForCausalLM": (
        "MistralForCausalLM",
        lambda: hf.MistralConfig(**WIDE, max_position_embeddings=128, **TOKENS),
    ),
    "peft-internal-testing/tiny-dummy-qwen2": (
        "Qwen2ForCausalLM",
        lambda: hf.Qwen2Config(**WIDE, max_position_embeddings=128, **TOKENS),
    ),
    "trl-internal-testing/tiny-Qwen3ForCausalLM": (
        "Qwen3ForCausalLM",
        lambda: hf.Qwen3Config(**WIDE, head_dim=8, max_position_embeddings=128, **TOKENS),
    ),
    "hf-internal-testing/tiny-random-Gemma3ForCausalLM": ("Gemma3ForCausalLM", _gemma3),
    "peft-internal-testing/tiny-random-BloomForCausalLM": ("BloomForCausalLM", _bloom),
    "peft-internal-testing/tiny-random-BertModel": ("BertModel", _encoder(hf.BertConfig)),
    "hf-internal-testing/tiny-random-BertModel": ("BertModel", _encoder(hf.BertConfig)),
    "peft-internal-testing/tiny-random-BertForSequenceClassification": (
        "BertForSequenceClassification",
        _encoder(hf.BertConfig),
    ),
    "peft-internal-testing/tiny-random-RobertaModel": ("RobertaModel", _encoder(hf.RobertaConfig)),
    "peft-internal-testing/tiny-random-RobertaForSequenceClassification": (
        "RobertaForSequenceClassification",
        _encoder(hf.RobertaConfig),
    ),
    "peft-internal-testing/tiny-random-DebertaModel": ("DebertaModel", _encoder(hf.DebertaConfig)),
    "peft-internal-testing/tiny-random-DebertaV2Model": ("DebertaV2Model", _encoder(hf.DebertaV2Config)),
    "peft-internal-testing/tiny-random-T5ForConditionalGeneration-calibrated": ("T5ForConditionalGeneration", _t5),
    "peft-internal-testing/tiny-random-T5ForConditionalGeneration": ("T5ForConditionalGeneration", _t5),
    "peft-internal-testing/tiny-random-t5": ("T5ForConditionalGeneration", _t5),
    "peft-internal-testing/tiny-random-BartForConditionalGeneration": ("BartForConditionalGeneration", _bart),
    "peft-internal-testing/tiny-clip-text-2": ("CLIPTextModelWithProjection", _clip_text),
    "hf-internal-testing/Mixtral-tiny": ("MixtralForCausalLM", _experts(hf.MixtralConfig)),
    "hf-internal-testing/tiny-qwen3-moe": ("Qwen3MoeForCausalLM", _experts(hf.Qwen3MoeConfig)),
    "trl-internal-testing/tiny-Qwen3MoeForCausalLM": ("Qwen3MoeForCausalLM", _experts(hf.Qwen3MoeConfig)),
}


def build_models(cache: Path) -> None:
    """Write every model that the cache does not have yet."""
    for name, (kind, config) in MODELS.items():
        folder = cache / f"models--{name.replace('/', '--')}"
        if (folder / "refs" / "main").exists():
            continue
        snapshot = folder / "snapshots" / REVISION
        torch.manual_seed(0)
        getattr(hf, kind)(_without_dropout(config())).save_pretrained(snapshot)
        _tokenizer().save_pretrained(snapshot)
        (folder / "refs").mkdir(parents=True, exist_ok=True)
        (folder / "refs" / "main").write_text(REVISION)  # last: it says that the model is complete


def _without_dropout(config: Any) -> Any:
    """Some tests compare two forwards in training mode: what enters a block must not be drawn anew, or routing changes."""
    for name, value in vars(config).items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


def _tokenizer() -> hf.PreTrainedTokenizerFast:
    """One that knows single characters."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = [chr(code) for code in range(32, 127)]
    words = {token: index for index, token in enumerate(["<pad>", "<s>", "</s>", "<unk>", *letters])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
