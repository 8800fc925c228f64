"""Tiny random models under the hub names that PEFT's tests ask for, in the layout of a Hugging Face cache.

The tests then load them by the ordinary `from_pretrained` in offline mode. Only the architecture of a name is kept; the
weights are random, and large enough that every part of a model matters.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as hf

VOCABULARY = 128
TOKENS: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SMALL: dict[str, Any] = {
    **{**TOKENS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64},
    **{"max_position_embeddings": 128, "initializer_range": 0.1},
}
DEEP = {**SMALL, "num_hidden_layers": 5}
GROUPED = {**SMALL, "num_key_value_heads": 2}
GPT: dict[str, Any] = {**TOKENS, "n_embd": 32, "n_layer": 5, "n_head": 4, "n_positions": 128, "initializer_range": 0.1}
OPT = {**DEEP, "ffn_dim": 64, "word_embed_proj_dim": 32, "init_std": 0.1}
BART_SIDE = {"layers": 2, "attention_heads": 4, "ffn_dim": 64}
BART: dict[str, Any] = {
    **{**TOKENS, "d_model": 32, "max_position_embeddings": 128, "init_std": 0.1, "decoder_start_token_id": 2},
    **{f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in BART_SIDE.items()},
}
T5: dict[str, Any] = {
    **{**TOKENS, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 3, "num_heads": 4},
    **{"eos_token_id": 1, "decoder_start_token_id": 0},
}
EXPERTS: dict[str, Any] = {
    **{**GROUPED, "head_dim": 8, "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2},
    "moe_intermediate_size": 16,
}
VISION: dict[str, Any] = {
    "text_config": {**GROUPED, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}},
    "vision_config": {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32},
}
HYBRID: dict[str, Any] = {
    **{**GROUPED, "head_dim": 8, "layers_block_type": ["mamba", "attention", "mlp"], "num_hidden_layers": 3},
    **{"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 4, "n_groups": 2},
}

# hub name, with @revision if it is not main -> (class of the saved model, settings of its configuration)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "peft-internal-testing/tiny-random-OPTForCausalLM": ("OPTForCausalLM", OPT),
    "peft-internal-testing/opt-125m": ("OPTForCausalLM", {**OPT, "num_hidden_layers": 12}),
    "peft-internal-testing/tiny-random-GPT2LMHeadModel": ("GPT2LMHeadModel", GPT),
    "peft-internal-testing/tiny-random-gpt2": ("GPT2LMHeadModel", GPT),
    "hf-internal-testing/tiny-random-gpt2": ("GPT2LMHeadModel", GPT),
    "gpt2": ("GPT2LMHeadModel", GPT),
    "peft-internal-testing/tiny-random-GPTJForCausalLM": ("GPTJForCausalLM", {**GPT, "rotary_dim": 4}),
    "peft-internal-testing/tiny-random-GPTNeoXForCausalLM": ("GPTNeoXForCausalLM", DEEP),
    "trl-internal-testing/tiny-random-LlamaForCausalLM": ("LlamaForCausalLM", GROUPED),
    "peft-internal-testing/tiny-random-LlamaForCausalLM": ("LlamaForCausalLM", GROUPED),
    "hf-internal-testing/tiny-random-LlamaForCausalLM": ("LlamaForCausalLM", GROUPED),
    "trl-internal-testing/tiny-LlamaForSequenceClassification-3.2": ("LlamaForSequenceClassification", GROUPED),
    "hf-internal-testing/tiny-random-MistralForCausalLM": ("MistralForCausalLM", GROUPED),
    "peft-internal-testing/tiny-dummy-qwen2": ("Qwen2ForCausalLM", GROUPED),
    "Qwen/Qwen2-0.5B": ("Qwen2ForCausalLM", GROUPED),
    "trl-internal-testing/tiny-Qwen2_5_VLForConditionalGeneration": ("Qwen2_5_VLForConditionalGeneration", VISION),
    "trl-internal-testing/tiny-Qwen3ForCausalLM": ("Qwen3ForCausalLM", {**GROUPED, "head_dim": 8}),
    "hf-internal-testing/tiny-random-Gemma3ForCausalLM": ("Gemma3ForCausalLM", {**GROUPED, "head_dim": 8}),
    "peft-internal-testing/tiny-random-BloomForCausalLM": ("BloomForCausalLM", DEEP),
    "peft-internal-testing/tiny-random-BertModel": ("BertModel", DEEP),
    "peft-internal-testing/tiny-random-BertModel@v2.0.0": ("BertLMHeadModel", DEEP),
    "hf-internal-testing/tiny-random-BertModel": ("BertModel", DEEP),
    "bert-base-uncased": ("BertModel", DEEP),
    "peft-internal-testing/tiny-random-BertForSequenceClassification": ("BertForSequenceClassification", DEEP),
    "peft-internal-testing/tiny-random-RobertaModel": ("RobertaModel", DEEP),
    "peft-internal-testing/tiny-random-RobertaForSequenceClassification": ("RobertaForSequenceClassification", DEEP),
    "peft-internal-testing/tiny-random-DebertaModel": ("DebertaModel", DEEP),
    "peft-internal-testing/tiny-random-DebertaV2Model": ("DebertaV2Model", DEEP),
    "peft-internal-testing/tiny-random-T5ForConditionalGeneration-calibrated": ("T5ForConditionalGeneration", T5),
    "peft-internal-testing/tiny-random-T5ForConditionalGeneration": ("T5ForConditionalGeneration", T5),
    "peft-internal-testing/tiny-random-t5": ("T5ForConditionalGeneration", T5),
    "google/flan-t5-small": ("T5ForConditionalGeneration", T5),
    "peft-internal-testing/tiny-random-BartForConditionalGeneration": ("BartForConditionalGeneration", BART),
    "peft-internal-testing/tiny-clip-text-2": ("CLIPTextModelWithProjection", {**SMALL, "projection_dim": 16}),
    "tiiuae/falcon-mamba-tiny-dev": ("FalconMambaForCausalLM", {**SMALL, "state_size": 4}),
    "trl-internal-testing/tiny-NemotronHForCausalLM-nano": ("NemotronHForCausalLM", HYBRID),
    "hf-internal-testing/Mixtral-tiny": ("MixtralForCausalLM", EXPERTS),
    "hf-internal-testing/tiny-qwen3-moe": ("Qwen3MoeForCausalLM", EXPERTS),
    "trl-internal-testing/tiny-Qwen3MoeForCausalLM": ("Qwen3MoeForCausalLM", EXPERTS),
}


def build_models(cache: Path) -> None:
    """Write every model that the cache does not have yet."""
    for number, (key, (kind, settings)) in enumerate(MODELS.items()):
        name, _, revision = key.partition("@")
        folder = cache / f"models--{name.replace('/', '--')}"
        reference = folder / "refs" / (revision or "main")
        if reference.exists():
            continue
        commit = f"{number if revision else 0:040}"  # a cache names snapshots by commits
        torch.manual_seed(int(commit))
        model_class = getattr(hf, kind)
        snapshot = folder / "snapshots" / commit
        model_class(_without_dropout(model_class.config_class(**settings))).save_pretrained(snapshot)
        _tokenizer().save_pretrained(snapshot)
        reference.parent.mkdir(parents=True, exist_ok=True)
        reference.write_text(commit)  # last: it says that the model is complete


def _without_dropout(config: Any) -> Any:
    """Some tests compare two forwards in training mode: dropout would change what is routed between them."""
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
