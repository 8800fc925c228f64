"""Generation by recorded steps gives the tokens of `model.generate`, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from monkeyjump import methods, record_routing
from monkeyjump.errors import MonkeyJumpWarning
from monkeyjump.evaluation import decode
from monkeyjump.evaluation.decode import Decoder
from monkeyjump.evaluation.forward import AnswerReader, evaluating, padded
from monkeyjump.evaluation.jobs import Batch, Job, make_batches
from monkeyjump.evaluation.run import evaluate, without_adapter
from monkeyjump.models.vlm_tiny import VlmTiny, VlmTinyConfig
from monkeyjump.tuner.call import running
from tests.evaluation.test_forward import Waits, build
from tests.evaluation.toys import TASKS, add_adapter, example, free_task, make_model
from tests.replay import RunAgain

ENDS = {1, 7, 21, 33, 90, 140, 200, 251}  # so many that most rows end at different steps


def learned(method: str) -> Any:
    """A method of the comparison that is no longer the identity."""
    model = get_peft_model(make_model(), methods.build(method, r=2))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model.eval()


def gpt2() -> Any:
    return build(GPT2LMHeadModel, GPT2Config(vocab_size=258, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3))


MODELS: dict[str, Callable[[], Any]] = {
    "plain": make_model,
    "learned positions": gpt2,
    "reads pictures": lambda: build(VlmTiny, VlmTinyConfig(text_config=make_model().config, initializer_range=0.3)),
    "PEFT's LoRA": lambda: get_peft_model(make_model(), LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False)),
    "token": lambda: add_adapter(make_model()),
    "sequence": lambda: add_adapter(make_model(), granularity="sequence"),
    "mean": lambda: add_adapter(make_model(), granularity="sequence", sequence_token="mean"),
    "task": lambda: add_adapter(make_model(), granularity="task"),
    "learned router": lambda: learned("moelora"),
    "whole feed-forwards": lambda: learned("mixlora"),
    "nested ranks": lambda: learned("more"),
}


class Counted(RunAgain):
    """Stands for a CUDA graph, and counts."""

    made = 0
    replays = 0

    def record(self, work: Callable[[], list[Tensor]]) -> list[Tensor]:
        Counted.made += 1
        return super().record(work)

    def replay(self) -> None:
        Counted.replays += 1
        super().replay()


@pytest.fixture
def graphs(monkeypatch):
    Counted.made = Counted.replays = 0
    monkeypatch.setattr(decode, "new_graph", lambda reader: lambda: Counted(reader.model))
    return Counted


def jobs(count: int, limit: int = 20, seed: int = 0) -> list[Job]:
    """Prompts of different lengths; a job's only answer sets how much is generated."""
    generator = torch.Generator().manual_seed(seed)
    item = example(0)
    found = []
    for index in range(count):
        prompt = torch.randint(2, 258, (3 + 4 * index % 17,), generator=generator).tolist()
        found.append(Job(index, item, "generate", prompt, [[1] * (limit - 8)], index % 3))
    return found


def generated(model: Any, listed: list[Job], routed: bool) -> list[list[int]]:
    """What `generate` says to all jobs, up to the end of each row."""
    rows, lengths = padded([job.prompt for job in listed], 0, left=True)
    ids = torch.from_numpy(rows)
    mask = (torch.arange(ids.shape[1]) >= ids.shape[1] - torch.from_numpy(lengths)[:, None]).long()
    extras = {"task_ids": torch.tensor([job.task_id for job in listed])} if routed else {}
    settings: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": sorted(ENDS)}
    out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=listed[0].limit, **settings, **extras)
    return [until_end(row) for row in out[:, ids.shape[1] :].tolist()]


def until_end(row: list[int]) -> list[int]:
    end = next((place for place, token in enumerate(row) if token in ENDS), len(row))
    return row[: end + 1]


def test_batches_that_generate_have_few_numbers_of_rows():
    batches = make_batches(jobs(150), 400)
    assert sorted(job.index for batch in batches for job in batch.jobs) == list(range(150))
    shapes = [(len(batch.jobs), len(batch.jobs[0].prompt)) for batch in batches[:-1]]
    full = [rows for rows, width in shapes if rows == 1 << (400 // width).bit_length() - 1]
    assert len(full) >= len(shapes) - 4  # others end where prompts get much shorter
    assert max(len(batch.jobs) for batch in make_batches(jobs(600), 10**6)) == 256


@pytest.mark.parametrize("name", MODELS)
def test_recorded_steps_give_the_tokens_of_generate(name, graphs):
    model = MODELS[name]()
    routed = name not in ("plain", "learned positions", "reads pictures", "PEFT's LoRA")
    listed = jobs(11)
    batches = make_batches(listed, 80)  # several shapes, and shapes that come again
    attributes = {path: set(vars(module)) for path, module in model.named_modules()}
    buffers = {path: buffer.clone() for path, buffer in model.named_buffers()}
    sides: list[Any] = [nullcontext, partial(without_adapter, model)] if routed else [nullcontext]
    answers: list[list[tuple[Job, list[int]]]] = []
    with evaluating(model):
        for side in sides:
            decoder = Decoder(AnswerReader(model, 0), ENDS)
            with side():
                pairs = (zip(batch.jobs, decoder.answers(batch).tolist(), strict=True) for batch in batches)
                answers.append([*chain.from_iterable(pairs)])
    assert getattr(AnswerReader(model, 0).base, "_can_compile_fullgraph", False)
    assert 0 < graphs.made < len(batches) * len(sides)
    assert graphs.replays > 0
    assert {path: set(vars(module)) for path, module in model.named_modules()} == attributes
    for path, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[path]), path
    assert (running().call, running().blocks, running().generation) == (None, None, None)
    for side, found in zip(sides, answers, strict=True):
        with side():
            expected = generated(model, [job for job, _ in found], routed)
        assert [until_end(row) for _, row in found] == expected
        assert all(set(row[len(until_end(row)) :]) <= {0} for _, row in found)
    assert len(sides) == 1 or answers[0] != answers[1]


@pytest.mark.parametrize("name", ["plain", "token", "sequence", "mean", "learned router", "whole feed-forwards"])
def test_a_step_waits_for_nothing(name, graphs):
    """A recording that looks at a value on the host fails on a GPU. (Task ids are looked at, but on a CPU only.)"""
    model = MODELS[name]()
    with evaluating(model):
        decoder = Decoder(AnswerReader(model, 0), ENDS)
        decoder.answers(Batch(jobs(3), 0))
        assert decoder._recorded is not None
        with Waits() as waits:
            decoder._recorded._step()
    assert waits.count == 0


def test_rows_end_at_once_and_late(graphs):
    """Not a step more than the looks allow, and rows that end first are padded while others go on."""
    model, listed = make_model(), jobs(6, limit=40)
    with evaluating(model):
        found = Decoder(AnswerReader(model, 0), ENDS).answers(Batch(listed, 0))
        lengths = [len(until_end(row)) for row in found.tolist()]
        assert len(set(lengths)) > 2
        assert found.shape[1] <= max(lengths) + 8
        everything = Decoder(AnswerReader(model, 0), set(range(258))).answers(Batch(listed, 0))
    assert everything.shape == (6, 8)
    assert set(everything[:, 1:].flatten().tolist()) == {0}


def test_what_cannot_be_recorded_runs_as_it_is(monkeypatch):
    class Refuses(RunAgain):
        def record(self, work: Callable[[], list[Tensor]]) -> list[Tensor]:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")

    model, listed = add_adapter(make_model()), jobs(5)
    with evaluating(model):
        expected = Decoder(AnswerReader(model, 0), ENDS).answers(Batch(listed, 0))
        monkeypatch.setattr(decode, "new_graph", lambda reader: lambda: Refuses(reader.model))
        decoder = Decoder(AnswerReader(model, 0), ENDS)
        with pytest.warns(MonkeyJumpWarning, match=r"without CUDA graphs: operation not permitted .* capturing\.$"):
            assert torch.equal(decoder.answers(Batch(listed, 0)), expected)
        assert torch.equal(decoder.answers(Batch(listed, 0)), expected)  # without a word


REASONS = ["its attention is 'eager'", "not one of all tokens", "looks at the routing", "gates are shuffled"]


@pytest.mark.parametrize("reason", REASONS)
def test_models_that_cannot_be_recorded_are_named(reason):
    changes: dict[str, Any] = {"router": "shuffled"} if "shuffled" in reason else {}
    model = add_adapter(make_model(), **changes)
    reader = AnswerReader(model, 0)
    reader.device = torch.device("cuda")
    reader.base.config._attn_implementation = "eager" if "attention" in reason else "sdpa"
    reader.takes_any_cache = "tokens" not in reason
    looking = record_routing(model) if "routing" in reason else nullcontext()
    with looking, pytest.warns(MonkeyJumpWarning, match=reason):
        assert decode.new_graph(reader) is None


def test_an_evaluation_is_the_same_with_recorded_steps(graphs, monkeypatch, tokenizer):
    model, tasks = add_adapter(make_model(), granularity="sequence"), [*TASKS[:2], free_task()]
    replayed = evaluate(model, tokenizer, tasks, mode="generate", progress=False)
    assert graphs.replays > 0
    monkeypatch.undo()
    assert evaluate(model, tokenizer, tasks, mode="generate", progress=False).predictions == replayed.predictions
