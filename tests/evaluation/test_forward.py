"""One list of jobs for all tasks and both sides: how it is batched, padded and run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    BertConfig,
    BertLMHeadModel,
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Lfm2Config,
    Lfm2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from monkeyjump.errors import ConfigError, MonkeyJumpWarning
from monkeyjump.evaluation.forward import AnswerReader
from monkeyjump.evaluation.jobs import Job, make_batches, make_jobs, waves
from monkeyjump.evaluation.run import evaluate
from monkeyjump.evaluation.score import Prediction, Scorer, predict
from monkeyjump.tasks.encode import Encoder
from tests.evaluation.test_score import TASK_IDS, naive_scores
from tests.evaluation.toys import TASKS, add_adapter, example, free_task, make_model

SIZES: dict[str, Any] = {
    **{"vocab_size": 258, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3, "pad_token_id": 0},
}


def not_causal() -> Any:
    model = make_model()
    model.config.is_causal = False
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    return model


def build(model_class: Any, config: Any) -> Any:
    torch.manual_seed(0)
    return model_class(config).eval()


# where prompts are padded, alone and with answers behind them
ARCHITECTURES: dict[str, tuple[Any, str, str]] = {
    "llama": (make_model, "right", "right"),
    "routed by sequence": (lambda: add_adapter(make_model(), granularity="sequence"), "right", "right"),
    "routed by the mean": (
        lambda: add_adapter(make_model(), granularity="sequence", sequence_token="mean"),
        *("right", "right"),
    ),
    "routed by task": (lambda: add_adapter(make_model(), granularity="task"), "right", "right"),
    "gpt2": (
        lambda: build(
            GPT2LMHeadModel, GPT2Config(vocab_size=258, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3)
        ),
        *("right", "right"),
    ),
    # a window of cached tokens, a recurrent state, and positions that are counted from the keys: no place for padding
    "sliding": (
        lambda: build(MistralForCausalLM, MistralConfig(**SIZES, sliding_window=8)),
        *("right", "left"),
    ),
    "recurrent": (
        lambda: build(Lfm2ForCausalLM, Lfm2Config(**SIZES, layer_types=["conv", "full_attention"])),
        *("right", "left"),
    ),
    "alibi": (
        lambda: build(
            BloomForCausalLM, BloomConfig(vocab_size=258, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.3)
        ),
        *("right", "left"),
    ),
    "not causal": (not_causal, "left", "left"),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_padding_is_on_the_side_where_it_is_not_seen(name, tokenizer, examples):
    make, alone, continued = ARCHITECTURES[name]
    model = make()
    modes: list[tuple[Any, str]] = [("letter", alone), ("text", continued)]
    # three options in one batch with two
    examples = [*examples, *(example(n, ("may", "not", "yes"), task=("toy", "other")[n % 2]) for n in range(4))]
    for mode, side in modes:
        encoder = Encoder(tokenizer, TASK_IDS, answer_format=mode)
        batches = make_batches(make_jobs(encoder, examples, mode), 10_000)
        reader = AnswerReader(model, 0)
        with torch.no_grad():
            assert {reader.prepare(batch).left for batch in batches} == {side == "left"}
        assert any(len({len(job.answers) for job in batch.jobs}) > 1 for batch in batches)
        single = predict(model, encoder, examples, mode, batch_tokens=1)
        for item, found, other in zip(examples, predict(model, encoder, examples, mode), single, strict=True):
            assert found.scores == pytest.approx(other.scores, abs=2e-4)
            # A forward over prompt and answer says something else where the prompt is changed by what follows it.
            if name not in ("not causal", "routed by the mean"):
                extras = {"routed": True} if name.startswith("routed") else {}
                assert found.scores == pytest.approx(naive_scores(model, encoder, item, mode, extras), abs=2e-4)


def test_a_model_without_cache_is_refused(tokenizer, examples):
    config = BertConfig(
        vocab_size=258, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48
    )
    with pytest.raises(ConfigError, match="returns no KV cache"):
        predict(build(BertLMHeadModel, config), Encoder(tokenizer), examples, "letter")


def test_batches_mix_tasks_and_keep_to_the_budget(tokenizer):
    encoder = Encoder(tokenizer, answer_format="text")
    jobs = [job for task in TASKS for job in make_jobs(encoder, [task.example({"n": n}) for n in range(12)], "text")]
    jobs += make_jobs(encoder, [free_task().example({"text": "say", "answer": "x"})] * 3, "generate")
    for budget in (1, 3_000, 100_000):
        batches = make_batches(jobs, budget)
        assert sorted(map(id, jobs)) == sorted(id(job) for batch in batches for job in batch.jobs)
        for batch in batches:
            assert len({job.kind for job in batch.jobs}) == 1
            assert batch.cost <= budget or len(batch.jobs) == 1
    assert [batch.jobs[0].mode for batch in batches] == ["generate", "text", "text", "text"]  # by lengths of answers
    letters = [job for task in TASKS for job in make_jobs(encoder, [task.example({"n": 1})], "letter")]
    assert [len(batch.jobs) for batch in make_batches(letters, 1000)] == [3]  # two, three and four options


def test_waves_begin_early_and_keep_what_fills_no_batch(tokenizer):
    encoder = Encoder(tokenizer)
    lists = [
        make_jobs(encoder, [example(n, context="?" * (7 * n % 90)) for n in range(k, k + 30)], "letter")
        for k in range(9)
    ]
    asked: list[int] = []

    def coming() -> Any:
        for number, jobs in enumerate(lists):
            asked.append(number)
            yield jobs

    made = waves(coming(), 800)
    parts = [next(made)]
    assert len(asked) < 3
    parts += made
    assert len(parts) > 3
    assert sum(map(len, parts)) < sum(len(make_batches(jobs, 800)) for jobs in lists)
    assert all(batch.full for part in parts[1:-1] for batch in part)
    found = [job for part in parts for batch in part for job in batch.jobs]
    assert sorted(map(id, found)) == sorted(id(job) for jobs in lists for job in jobs)


def test_every_text_is_tokenized_once(monkeypatch, tokenizer):
    seen: list[list[str]] = []
    tokenize = Encoder._ids

    def counting(self: Encoder, texts: list[str]) -> list[list[int]]:
        seen.append(texts)
        return tokenize(self, texts)

    monkeypatch.setattr(Encoder, "_ids", counting)
    report = evaluate(add_adapter(make_model()), tokenizer, TASKS, mode="text", progress=False)
    assert {row.base is None or row.adapter is None for row in report.rows} == {False}
    # for both sides together: the options of each task, then its prompts
    assert [len(texts) for texts in seen] == [2, 12, 3, 12, 4, 12]
    assert len({text for texts in seen for text in texts}) == 45


def test_memory_that_runs_out_halves_the_batches(tokenizer, examples):
    model = make_model()
    encoder = Encoder(tokenizer, answer_format="text")
    expected = predict(model, encoder, examples, "text")
    sizes: list[int] = []

    def refuse(module: Any, args: Any, kwargs: Any) -> None:
        sizes.append(kwargs["input_ids"].numel())
        if sizes[-1] > 300:
            raise torch.OutOfMemoryError

    model.register_forward_pre_hook(refuse, with_kwargs=True)
    with pytest.warns(MonkeyJumpWarning, match="did not fit in memory") as said:
        found = predict(model, encoder, examples, "text", batch_tokens=4000)
    assert len(said) == 1
    refused = [size for size in sizes if size > 300]
    assert 0 < len(refused) < 4
    assert refused == sorted(refused, reverse=True)
    for one, other in zip(found, expected, strict=True):
        assert (one.index, one.predicted) == (other.index, other.predicted)
        assert one.scores == pytest.approx(other.scores, abs=2e-4)
    long = [example(1, context="word " * 80)]
    with pytest.raises(torch.OutOfMemoryError):
        predict(model, encoder, long, "text")


class Waits(TorchDispatchMode):
    """Counts how often a value of a tensor is asked for, which on a GPU waits for all that was started before."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", ["letter", "text"])
@pytest.mark.parametrize("granularity", [None, "token", "sequence"])
def test_nothing_waits_between_batches(tokenizer, mode, granularity):
    model = make_model() if granularity is None else add_adapter(make_model(), granularity=granularity)
    encoder = Encoder(tokenizer, {"toy": 0}, answer_format=mode)
    jobs = make_jobs(encoder, [example(n, ("not at all", "yes, very")) for n in range(12)], mode)
    scorer = Scorer(model, encoder)
    with torch.no_grad():
        batches, _ = scorer.run(make_batches(jobs, 400))
        with Waits() as waits:
            scorer.run(batches)
    assert len(batches) > 2
    assert waits.count == 0


def test_generation_stops_soon_after_all_rows_have_ended(tokenizer):
    model = make_model()
    forwards: list[int] = []
    model.register_forward_hook(lambda module, args, output: forwards.append(1))
    with torch.no_grad():
        model.model.norm.weight.zero_()
        model.model.norm.register_forward_hook(lambda module, args, output: torch.ones_like(output))
        model.lm_head.weight.zero_()
        model.lm_head.weight[tokenizer.eos_token_id] = 1.0
    items = [free_task().example({"text": "say", "answer": "x"})] * 3
    assert [p.text for p in predict(model, Encoder(tokenizer), items, "generate")] == ["", "", ""]
    assert len(forwards) < 12  # of 64


def test_the_bar_counts_every_example_of_every_side(monkeypatch, tokenizer):
    class Bar:
        def __init__(self, total: int, **settings: Any) -> None:
            self.total = total
            self.steps: list[int] = []
            self.sides: list[str] = []
            bars.append(self)

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *error: object) -> None: ...

        def update(self, n: int) -> None:
            self.steps.append(n)

        def set_description(self, text: str, refresh: bool) -> None:
            self.sides.append(text)

    bars: list[Any] = []
    monkeypatch.setattr("tqdm.tqdm", Bar)
    report = evaluate(add_adapter(make_model()), tokenizer, TASKS, mode="letter", max_length=66, batch_tokens=500)
    dropped = sum(row.dropped for row in report.rows)
    assert 0 < dropped < 36
    assert bars[0].steps[-1] == 2 * dropped
    assert sum(bars[0].steps) == bars[0].total == 72
    assert len(bars[0].sides) > 2
    assert bars[0].sides == ["base", "adapter"] * (len(bars[0].sides) // 2)  # wave by wave
    assert [row.n for row in report.rows] == [12 - row.dropped for row in report.rows]


def test_jobs_of_two_tasks_come_back_in_their_order(tokenizer, examples):
    model, encoder = make_model(), Encoder(tokenizer, answer_format="text")
    jobs: list[Job] = [*make_jobs(encoder, examples[:7], "text"), *make_jobs(encoder, examples[3:], "generate")]
    made = Scorer(model, encoder).score([jobs[:3], jobs[3:]], {"": torch.no_grad})[""]
    found = [made[job] for job in jobs]
    apart: list[Prediction] = [
        *predict(model, encoder, examples[:7], "text"),
        *predict(model, encoder, examples[3:], "generate"),
    ]
    for one, other in zip(found, apart, strict=True):
        assert (one.index, one.predicted, one.gold, one.text) == (other.index, other.predicted, other.gold, other.text)
        assert one.scores == (other.scores and pytest.approx(other.scores, abs=2e-4))
