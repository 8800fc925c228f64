"""A byte-level tokenizer and tiny random models: real code paths, no downloads, milliseconds."""

from __future__ import annotations

from typing import Any

import torch
from peft import get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import monkeyjump as mj
from monkeyjump.tasks import Example, GeneratedSource, Task

TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(["<pad>", "<eos>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", chat_template=TEMPLATE
    )


def make_model(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=258,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,  # random models with opinions: scores far enough apart to compare
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def add_adapter(model: Any, seed: int = 1, **changes: Any) -> Any:
    """A Monkey Jump adapter that is no longer the identity, with random centres."""
    settings: dict[str, Any] = {
        "r": 2,
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
        "shared_modules": ["o_proj"],
        "temperature": 0.05,
        "dropout": 0.0,
        "center_init": "random",
        "task_type": "CAUSAL_LM",
        **changes,
    }
    peft_model = get_peft_model(model, mj.MonkeyJumpConfig(**settings))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if parameter.requires_grad and "monkeyjump" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return peft_model.eval()


def example(number: int, options: tuple[str, ...] = ("no", "yes"), **changes: Any) -> Example:
    settings: dict[str, Any] = {"label": number % len(options), "task": "toy", **changes}
    return Example(question=f"Question {number}{'?' * (number % 5)}", options=options, **settings)


def toy_task(name: str, family: str = "toys", options: tuple[str, ...] | None = ("no", "yes"), **changes: Any) -> Task:
    """Twelve rows; the first option is right in most of them. Without `options` every row has three of its own."""

    def render(row: Any) -> Example:
        n = row["n"]
        own = options or (f"{n} apples", f"{n} pears", f"{n} plums")
        score = n / 4 if changes.get("metric") == "spearman" else None
        return Example(f"{name} {n}{'!' * (n % 4)}", options=own, label=max(0, n % (len(own) + 1) - 1), score=score)

    source = GeneratedSource(lambda split, seed: [{"n": n} for n in range(12)])
    return Task(name, family, render, ("n",), source, options=options, **changes)


def free_task() -> Task:
    def render(row: Any) -> Example:
        return Example(question=row["text"], free_answer=row["answer"])

    rows = [{"text": "say", "answer": "x  y"}, {"text": "tell", "answer": "z"}, {"text": "speak", "answer": "X y."}]
    source = GeneratedSource(lambda split, seed: rows)
    return Task("free", "own", render, ("text", "answer"), source, metric="exact_match")


TASKS = [
    toy_task("first"),
    toy_task("second", options=("red", "green", "blue")),
    toy_task("degree", "numbers", ("0", "1", "2", "3"), metric="spearman"),
]
