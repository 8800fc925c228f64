"""Compiled decoding over a static cache, and compiled scoring: the tokens and scores of eager mode."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch._dynamo
from peft import PeftModel
from torch._dynamo.utils import counters
from transformers import CompileConfig, GenerationConfig

from monkeyjump.evaluation.score import predict
from monkeyjump.tasks.encode import Encoder
from tests.evaluation.toys import add_adapter, example, make_model, make_tokenizer
from tests.helpers import PAD, adapted, padded, tiny_llama, token_ids

NEW = 6
FEW: dict[str, Any] = {"target_modules": ["q_proj", "k_proj"], "shared_modules": None}  # quick to trace
MODES: dict[str, dict[str, Any]] = {
    "token": {"granularity": "token"},
    "sequence": {"granularity": "sequence"},
    "task": {"granularity": "task"},
}

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def prompts(seed: int) -> torch.Tensor:
    return padded([token_ids(1, length, seed=seed + i)[0] for i, length in enumerate((4, 7, 6))], "left", 8)


def generate(model: PeftModel, seed: int, mode: str, **how: Any) -> torch.Tensor:
    ids = prompts(seed)
    extra = {"task_ids": torch.tensor([0, 1, 0])} if mode == "task" else {}
    config = GenerationConfig(max_new_tokens=NEW, min_new_tokens=NEW, pad_token_id=PAD, do_sample=False, **how)
    return model.generate(input_ids=ids, attention_mask=(ids != PAD).long(), generation_config=config, **extra)


def compiling() -> CompileConfig:
    """What `generate` does by itself on a GPU with a static cache, here on a CPU and without a C++ compiler."""
    settings: dict[str, Any] = {"backend": "aot_eager", "fullgraph": True, "dynamic": False, "mode": None}
    config: Any = CompileConfig(**settings)
    config._compile_all_devices = True
    return config


def graphs_of_generations(mode: str, generations: int) -> list[int]:
    """How many graphs there are after each of some generations, whose tokens must be those of eager mode."""
    model = adapted(tiny_llama(1), temperature=0.2, top_k=1, **FEW, **MODES[mode]).eval()
    found = []
    counters.clear()
    for seed in range(0, 10 * generations, 10):
        static = generate(model, seed, mode, cache_implementation="static", compile_config=compiling())
        found.append(counters["stats"]["unique_graphs"])
        assert torch.equal(static, generate(model, seed, mode))
        assert len(static[:, 8:].unique()) > 1  # a model that repeats one token would prove nothing
    return found


@pytest.mark.parametrize("mode", MODES)
def test_one_graph_decodes_every_prompt(mode: str) -> None:
    assert graphs_of_generations(mode, 2) == [1, 1]


def test_compiled_scoring() -> None:
    """Prompts of all widths: the second width makes the graphs dynamic, after which nothing is compiled."""
    model: Any = add_adapter(make_model(), target_modules=["q_proj", "k_proj"], shared_modules=None)
    twin = copy.deepcopy(model)
    encoder = Encoder(make_tokenizer(), {"toy": 0}, answer_format="letter")
    examples = [example(number) for number in range(10)]
    model.get_base_model().model.compile(backend="eager", fullgraph=True)
    counters.clear()
    scores, graphs = [], []
    for one in (model, model, twin):
        predictions = predict(one, encoder, examples, "letter", batch_tokens=300)
        scores.append(torch.tensor([prediction.scores for prediction in predictions]))
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[1] > 0
    torch.testing.assert_close(scores[0], scores[2], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(scores[1], scores[2], rtol=1e-4, atol=1e-4)
