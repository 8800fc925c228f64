"""Recorded steps of generation on a GPU against steps as they come."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

from monkeyjump.evaluation import decode
from monkeyjump.evaluation.decode import Decoder
from monkeyjump.evaluation.forward import AnswerReader, evaluating
from monkeyjump.evaluation.jobs import Job, make_batches
from monkeyjump.evaluation.run import evaluate, without_adapter
from tests.evaluation.test_decode import ENDS, MODELS, jobs, until_end
from tests.evaluation.toys import TASKS, add_adapter, free_task, make_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def answers(reader: AnswerReader) -> list[list[int]]:
    """Up to the end of each row, in the order of the jobs."""
    decoder, listed = Decoder(reader, ENDS), jobs(19)
    found: dict[Job, list[int]] = {}
    for batch in make_batches(listed, 80):
        found |= dict(zip(batch.jobs, decoder.answers(batch).tolist(), strict=True))
    return [until_end(found[job]) for job in listed]


@pytest.mark.parametrize("name", MODELS)
def test_recorded_steps_give_the_same_tokens(name, monkeypatch):
    model = MODELS[name]().cuda()
    with evaluating(model):
        base: list[Any] = [partial(without_adapter, model)] if hasattr(model, "disable_adapter") else []
        for side in [nullcontext, *base]:
            with side():
                found = answers(AnswerReader(model, 0))
                with monkeypatch.context() as patch:
                    patch.setattr(decode, "new_graph", lambda reader: None)
                    assert found == answers(AnswerReader(model, 0))


def test_an_evaluation_is_the_same_and_gives_its_memory_back(monkeypatch, tokenizer):
    model, tasks = add_adapter(make_model(), granularity="sequence").cuda(), [*TASKS[:2], free_task()]
    evaluate(model, tokenizer, tasks, mode="generate", progress=False)  # libraries take what they keep
    gc.collect()
    before = torch.cuda.memory_allocated()
    replayed = evaluate(model, tokenizer, tasks, mode="generate", progress=False)
    assert torch.cuda.memory_allocated() <= before
    monkeypatch.setattr(decode, "new_graph", lambda reader: None)
    expected = evaluate(model, tokenizer, tasks, mode="generate", progress=False)
    for task, sides in replayed.predictions.items():
        for side, predictions in sides.items():
            assert [p.text for p in predictions] == [p.text for p in expected.predictions[task][side]]
