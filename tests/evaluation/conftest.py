"""Fixtures of the evaluation tests."""

from __future__ import annotations

import pytest
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from monkeyjump.evaluation.run import EvaluationReport, evaluate
from monkeyjump.tasks import Example
from tests.evaluation.toys import TASKS, add_adapter, example, make_model, make_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture
def model() -> LlamaForCausalLM:
    return make_model()


@pytest.fixture(scope="session")
def examples() -> list[Example]:
    """Prompts of many lengths; two and three options, of one and of several tokens, of equal and unequal length."""
    options = [("no", "yes"), ("A", "B"), ("red", "green", "blue"), ("x", "a longer answer, much longer"), ("1", "1.5")]
    found = [example(number, options[number % len(options)]) for number in range(11)]
    return [*found, example(11, options[2], context="Some context. " * 6)]


@pytest.fixture(scope="session")
def report(tokenizer) -> EvaluationReport:
    """A whole evaluation, base and adapter. Tests that change it take a copy."""
    return evaluate(add_adapter(make_model()), tokenizer, TASKS, mode="text", progress=False)
