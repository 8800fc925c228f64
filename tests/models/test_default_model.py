"""The real default model."""

from __future__ import annotations

import pytest
import torch

from monkeyjump.models import DEFAULT_MODEL, load_model

pytestmark = pytest.mark.model


def test_it_answers_through_its_chat_template() -> None:
    model, tokenizer = load_model(DEFAULT_MODEL)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        output = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    said = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert said == "The capital of France is Paris."
    assert tokenizer.pad_token_id is not None
    assert output[0, -1] == tokenizer.eos_token_id
    assert getattr(model.config, "quantization_config", None) is None  # plain weights: they can be trained and saved
    assert model.num_parameters() == 134_515_008
