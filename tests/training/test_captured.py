"""Replayed training forwards against the model as it is; a graph is here one that runs its work again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from monkeyjump.training import captured
from monkeyjump.training import compile as compiling
from monkeyjump.training.captured import CapturedCall, _Recorded
from monkeyjump.training.fast import fast
from tests.helpers import ADAPTER_NAMES, adapted, assert_same, lm_batch


class RunAgain:
    """Does recorded work when it is replayed, into the tensors of its recording, as a CUDA graph does."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.recorded: _Recorded | None = None

    def record(self, work: Callable[[], None]) -> None:
        buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        with torch.random.fork_rng():
            work()
        for buffer, before in buffers:  # recording does nothing
            buffer.copy_(before)
        self.recorded = work.__closure__[-1].cell_contents  # type: ignore[index]
        self.work = work

    def replay(self) -> None:
        recorded = self.recorded
        assert recorded is not None
        output, flat = recorded.output, recorded.flat
        self.work()
        output.loss.copy_(recorded.output.loss)
        for kind, values in flat.items():
            values.copy_(recorded.flat[kind])
        recorded.output, recorded.flat = output, flat


def replaying(model: Any) -> CapturedCall:
    call = CapturedCall(model, lambda: RunAgain(model))
    model._compiled_call_impl = call
    return call


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def train(model: Any, batches: list[list[dict[str, Any]]]) -> list[Tensor]:
    """Optimiser steps of several micro-batches; a look at the model in evaluation between them."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    torch.manual_seed(3)
    for step in batches:
        for batch in step:
            loss = model(**batch).loss / len(step)
            loss.backward()
            losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        losses.append(model(**step[0]).loss.detach())
        model.train()
    return losses


@pytest.mark.parametrize("adapter", ADAPTER_NAMES)
def test_twenty_replayed_steps_are_twenty_ordinary_ones(adapter: str) -> None:
    shapes = [(2, 8), (3, 6), (2, 8), (1, 10)]
    batches = [[lm_batch(*shapes[(n + m) % 4], seed=7 * n + m) for m in range(2)] for n in range(20)]
    models = [adapted(adapter=adapter, ema_interval=2, dropout=0.1).train() for _ in range(2)]
    call = replaying(models[1])
    assert_same(*[{str(n): loss for n, loss in enumerate(train(model, batches))} for model in models])
    assert_same(*[dict(model.state_dict()) for model in models])
    assert call.report.graphs == 3
    assert call.report.replayed == 40 - 3 * captured.WARM_UP


def test_a_replay_before_the_last_backward_changes_nothing() -> None:
    model = adapted(ema_stop=0).train()
    batches = [lm_batch(2, 8, seed=n) for n in range(2)]
    (2 * model(**batches[0]).loss + model(**batches[1]).loss).backward()
    expected = gradients(model)
    model.zero_grad()
    call = replaying(model)
    for _ in range(captured.WARM_UP):
        model(**batches[0])
    (2 * model(**batches[0]).loss + model(**batches[1]).loss).backward()
    assert call.report.replayed == 2
    assert_same(gradients(model), expected)


def test_the_number_of_tokens_is_no_shape_and_what_cannot_be_replayed_runs_as_it_is() -> None:
    model = adapted(ema_stop=0).train()
    call = replaying(model)
    for count in range(5, 10):
        model(**lm_batch(2, 8), num_items_in_batch=count)
    assert call.report.graphs == 1
    assert call.report.replayed == 3
    batch = lm_batch(2, 8)
    assert torch.equal(model(batch.pop("input_ids"), **batch).loss, model(**lm_batch(2, 8)).loss)
    assert call.report.others["arguments without names"] == 1
    batch = lm_batch(2, 8)
    del batch["labels"]
    for _ in range(captured.WARM_UP + 1):
        assert model(**batch).loss is None
    assert call.report.others["cannot be captured"] == 1


def test_without_memory_the_run_goes_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    model = adapted().train()
    call = replaying(model)

    def full(*args: Any) -> None:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(RunAgain, "record", full)
    for _ in range(4):
        model(**lm_batch(2, 8)).loss.backward()
    assert call.report.replayed == 0
    assert capsys.readouterr().out.count("no memory to capture batches of shape (2, 8)") == 1


def test_fast_trains_the_same_and_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [[lm_batch(2, 8, seed=n)] for n in range(5)]
    models = [adapted(ema_interval=2).train() for _ in range(2)]
    traces = [{name: set(vars(module)) for name, module in models[1].named_modules()}]
    expected = train(models[0], batches)
    monkeypatch.setattr(captured, "CudaGraph", lambda pool: RunAgain(models[1]))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(compiling, "BACKEND", "eager")
    with fast(models[1], compile=True, capture=True, fused_loss="torch") as report:
        found = train(models[1], batches)
    assert report.captured is not None
    assert report.captured.replayed == 3
    assert report.fused_loss == "torch"
    traces.append({name: set(vars(module)) for name, module in models[1].named_modules()})
    assert traces[0] == traces[1]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    states = [{k: v for k, v in model.state_dict().items() if "staged" not in k} for model in models]
    assert_same(*states, atol=1e-4, rtol=1e-4)  # what is staged and never committed is not the same
