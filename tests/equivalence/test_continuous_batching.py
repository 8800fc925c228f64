"""Transformers' continuous batching: ragged rows of many sequences, routed token by token as in plain generation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from monkeyjump.serving.answers import small_batches
from tests.helpers import adapted, disturb, mj_config, tiny_llama, token_ids, wrap
from tests.methods.common import config_of, spread

LENGTHS = (4, 9, 30, 7, 3, 17, 12, 5)
# few tokens at once: prompts are read in parts, beside others that are already being answered
SMALL = {"page": 16, "pages": 64, "tokens": 24}
HOW = GenerationConfig(max_new_tokens=9, do_sample=False, eos_token_id=100, pad_token_id=0)


def batched(model: Any, recorded: bool = False) -> list[Any]:
    config = small_batches(**SMALL)
    if recorded:
        config.use_cuda_graph, config.q_padding_interval_size, config.kv_padding_interval_size = True, 8, 64
    prompts = [token_ids(1, length, seed=50 + length)[0].tolist() for length in LENGTHS]
    found = model.get_base_model().generate_batch(
        prompts,
        generation_config=HOW,
        continuous_batching_config=config,
        progress_bar=False,
    )
    return list(found.values())


@pytest.mark.parametrize(
    "config",
    [
        mj_config(temperature=0.2),
        mj_config(route_space="raw", top_k=1, adapter="propulsion"),
        mj_config(layers_to_route=[]),
        *(config_of(method) for method in ("hydralora", "moelora", "mixlora published", "moa published")),
    ],
    ids=["mjlora", "mjpropulsion", "lora", "hydralora", "moelora", "mixlora", "moa"],
)
def test_token_routing_is_that_of_plain_generation(config: Any) -> None:
    model = wrap(tiny_llama(2), config).eval()
    disturb(model)
    spread(model)
    found = [output.generated_tokens for output in batched(model)]
    expected = []
    for length in LENGTHS:
        ids = token_ids(1, length, seed=50 + length)
        expected.append(model.generate(ids, generation_config=HOW)[0, length:].tolist())
    assert found == expected
    with model.disable_adapter():
        assert [output.generated_tokens for output in batched(model)] != expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("method", ["mjlora", "lora", "hydralora"])
def test_recorded_forwards_write_the_same(method: str) -> None:
    model = wrap(tiny_llama(2), config_of(method)).eval().cuda()
    disturb(model)
    spread(model)
    found = [output.generated_tokens for output in batched(model, recorded=True)]
    assert found == [output.generated_tokens for output in batched(model)]
    ids = token_ids(1, LENGTHS[2], seed=50 + LENGTHS[2]).cuda()
    assert found[2] == model.generate(ids, generation_config=HOW)[0, LENGTHS[2] :].tolist()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (mj_config(granularity="sequence"), "granularity='sequence'"),
        (mj_config(granularity="task"), "granularity='task'"),
        (config_of("more"), "placement='nested'"),
    ],
)
def test_decisions_for_rows_are_refused(config: Any, said: str) -> None:
    """Transformers gives the reason as the error of every request."""
    outputs = batched(wrap(tiny_llama(2), config).eval())
    assert all(said in output.error and not output.generated_tokens for output in outputs)


def test_afterwards_the_model_is_as_before() -> None:
    model, ids = adapted(granularity="sequence").eval(), token_ids()
    with torch.no_grad():
        expected = model(ids).logits
        batched(model)
        assert torch.equal(model(ids).logits, expected)
