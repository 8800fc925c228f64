"""A model folder small enough to train in a second, for tests that go through recipes and the command line."""

from __future__ import annotations

from pathlib import Path

from tests.helpers import tiny_llama
from tests.tasks.conftest import make_tokenizer


def save_tiny_model(folder: Path) -> Path:
    """A random Llama over bytes, with a tokenizer, as `save_pretrained` leaves them."""
    tokenizer = make_tokenizer()
    size = max(tokenizer.get_vocab().values()) + 1
    model = tiny_llama(layers=2, vocab_size=size, max_position_embeddings=1024, pad_token_id=tokenizer.pad_token_id)
    model.config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


RECIPE = """
name: small
model: {model}
method: mjlora
tasks: [opinion, tense]
adapter: {{init_tokens: 200}}
data: {{answer: letter, cap: 24, validation: 6, max_length: 512}}
train:
  {{lr: 1.0e-2, max_steps: 8, batch_size: 4, accumulation: 1, eval_steps: 4, save_steps: 4, log_steps: 1,
    keep_checkpoints: 5}}
evaluate: {{validation_limit: 4, test_limit: 6}}
"""


def write_recipe(folder: Path, model: Path) -> Path:
    path = folder / "small.yaml"
    path.write_text(RECIPE.format(model=model), encoding="utf-8")
    return path
