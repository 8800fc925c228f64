"""Whole evaluations: base beside adapter, means, tables, files, and adapters from disk."""

from __future__ import annotations

import gc
import json
import math
from dataclasses import replace
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model

from monkeyjump.errors import ConfigError
from monkeyjump.evaluation import metrics
from monkeyjump.evaluation.answers import normalize
from monkeyjump.evaluation.report import NO_ANSWER, EvaluationReport
from monkeyjump.evaluation.rows import task_score
from monkeyjump.evaluation.run import evaluate, load_adapter
from monkeyjump.evaluation.score import Prediction, predict
from monkeyjump.tasks import expand, load_examples
from monkeyjump.tasks.encode import Encoder
from tests.evaluation.test_score import naive_scores
from tests.evaluation.toys import TASKS, add_adapter, free_task, make_model, toy_task


def scores(report: EvaluationReport, side: str) -> list[float]:
    """Everything predicted, as one list."""
    found = [p for row in report.rows for p in report.predictions[row.task][side]]
    return [value for p in found for value in (p.predicted, *(p.scores or ()))]


@pytest.mark.parametrize("mode", ["letter", "text", "generate"])
@pytest.mark.parametrize("kind", ["token", "sequence", "task", "peft"])
def test_base_column_is_the_base_model(tokenizer, mode, kind):
    alone = evaluate(make_model(), tokenizer, TASKS, mode=mode, progress=False)
    if kind == "peft":
        config = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], init_lora_weights=False)
        model = get_peft_model(make_model(), config)
    else:
        model = add_adapter(make_model(), granularity=kind)
    both = evaluate(model, tokenizer, TASKS, mode=mode, progress=False)
    assert [row.base for row in both.rows] == [row.base for row in alone.rows]
    assert scores(both, "base") == pytest.approx(scores(alone, "base"), abs=1e-5)
    assert alone.overall.adapter is None
    assert alone.mean == alone.overall.base
    only = evaluate(model, tokenizer, TASKS, mode=mode, progress=False, compare_base=False)
    assert [row.adapter for row in only.rows] == [row.adapter for row in both.rows]
    assert scores(only, "adapter") == pytest.approx(scores(both, "adapter"), abs=1e-5)
    assert only.overall.base is None
    if mode != "generate":
        assert scores(both, "adapter") != pytest.approx(scores(both, "base"), abs=0.1)


def test_options_without_letters_are_scored_by_their_text(tokenizer):
    """Also where letters were asked for, beside a task that has them."""
    classes = tuple(f"class {n}" for n in range(30))
    many, few = toy_task("many", options=classes), toy_task("few")
    found = evaluate(make_model(), tokenizer, [many, few], mode="letter", progress=False)
    by_text = evaluate(make_model(), tokenizer, [many], mode="text", answer_format="letter", progress=False)
    assert [row.mode for row in found.rows] == ["text", "letter"]
    assert len(found.predictions["many"]["base"][0].scores or ()) == 30
    assert [p.predicted for p in found.predictions["many"]["base"]] == [
        p.predicted for p in by_text.predictions["many"]["base"]
    ]
    assert found.rows[0].base_top_answer in classes


def test_tasks_without_the_split_are_passed_over(tokenizer):
    only_train = replace(toy_task("first"), absent=("test",))
    found = evaluate(make_model(), tokenizer, [only_train, toy_task("second")], progress=False)
    assert [row.task for row in found.rows] == ["second"]


def test_rows_are_what_the_predictions_say(report):
    for row in report.rows:
        for side in ("base", "adapter"):
            found = report.predictions[row.task][side]
            if row.metric == "spearman":
                expected = metrics.spearman([p.value for p in found], [p.gold_value for p in found])
            else:
                expected = sum(p.correct for p in found) / len(found)
                assert getattr(row, f"{side}_interval") == metrics.wilson(sum(p.correct for p in found), row.n)
            assert getattr(row, side) == pytest.approx(expected)
            interval = getattr(row, f"{side}_interval")
            assert interval.low <= getattr(row, side) <= interval.high
        assert row.difference == row.adapter - row.base
        assert row.difference_interval.low <= row.difference <= row.difference_interval.high


def test_means_weigh_tasks_not_examples(report):
    by_name = {row.task: row for row in report.rows}
    toys, numbers = report.families
    assert (toys.family, toys.n, numbers.n) == ("toys", 2, 1)
    assert toys.adapter == pytest.approx((by_name["first"].adapter + by_name["second"].adapter) / 2)
    assert numbers.base == by_name["degree"].base
    assert report.overall.adapter == pytest.approx(sum(row.adapter for row in report.rows) / 3)
    assert report.mean == report.overall.adapter
    assert report.overall.difference == pytest.approx(report.overall.adapter - report.overall.base)


def test_evaluation_is_deterministic(tokenizer, report):
    again = evaluate(add_adapter(make_model()), tokenizer, TASKS, mode="text", progress=False)
    assert again.to_json() == report.to_json()
    assert again.to_html() == report.to_html()


def test_limit_is_a_fixed_sample(tokenizer):
    model = make_model()
    found = [
        evaluate(model, tokenizer, TASKS[:1], limit=5, seed=seed, progress=False).predictions["first"]["base"]
        for seed in (0, 1)
    ]
    assert len(found[0]) == 5
    assert found[0] == found[1]
    assert [p.gold for p in found[0]] != [max(0, n % 3 - 1) for n in range(5)]  # not the beginning of the file


def test_a_free_answer_is_generated(tokenizer):
    report = evaluate(make_model(), tokenizer, [free_task()], mode="letter", progress=False)
    row = report.rows[0]
    assert row.mode == "generate"
    assert row.n == 3
    assert any("scored in mode generate: free" in note for note in report.notes())
    texts = [normalize(p.text or "") for p in report.predictions["free"]["base"]]
    assert row.base_top == max(texts.count(text) for text in texts) / 3
    assert [text == row.base_top_answer for text in texts].count(True) == 3 * row.base_top
    assert (row.majority_answer, row.majority) == ("x y", 2 / 3)  # spelled in two ways


@pytest.mark.parametrize("mode", ["letter", "generate"])
def test_frequent_answers_are_counted_from_the_predictions(tokenizer, mode):
    varied = toy_task("varied", options=None)
    report = evaluate(add_adapter(make_model()), tokenizer, [*TASKS, varied], mode=mode, progress=False)
    for task, row in zip([*TASKS, varied], report.rows, strict=True):
        names = task.options or "ABC"  # options that differ from row to row are counted by their letters
        for side in ("base", "adapter"):
            counts: dict[str, int] = {}
            for p in report.predictions[task.name][side]:
                number = NO_ANSWER if p.value is None else f"{p.value:g}"
                answer = names[p.predicted] if p.predicted >= 0 else number
                counts[answer] = counts.get(answer, 0) + 1
            assert getattr(row, f"{side}_top") == max(counts.values()) / row.n
            assert counts[getattr(row, f"{side}_top_answer")] == max(counts.values())
        gold = [names[p.gold] for p in report.predictions[task.name]["base"]]
        if task.metric == "spearman":
            assert (row.majority, row.majority_answer) == (None, None)
        else:
            assert row.majority == max(gold.count(name) for name in names) / row.n
            assert [name == row.majority_answer for name in gold].count(True) == row.majority * row.n
    toys, numbers = report.families
    members = [row.majority for row in report.rows if row.majority is not None]
    assert toys.majority == pytest.approx(sum(members) / 3)
    assert (numbers.majority, report.overall.majority, report.overall.base_top) == (None, None, None)


def test_constant_and_missing_numbers():
    gold = [0.0, 1.0, 2.0]
    constant = [Prediction(i, 0, 0, False, value=3.0, gold_value=g) for i, g in enumerate(gold)]
    silent = [Prediction(i, -1, 0, False, value=None, gold_value=g) for i, g in enumerate(gold)]
    assert task_score("spearman", constant) == task_score("spearman", silent) == 0.0
    partly = [
        Prediction(i, 0, 0, False, value=v, gold_value=g)
        for i, (v, g) in enumerate(zip([0, None, 4], gold, strict=True))
    ]
    assert task_score("spearman", partly) == pytest.approx(1.0)  # the missing one counts as 2
    assert math.isnan(task_score("accuracy", []))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "leter"}, "Did you mean 'letter'"),
        ({"answer_format": "word"}, "answer_format='word'"),
        ({"limit": 0}, "limit=0"),
        ({"batch_token": 5}, "Did you mean 'batch_tokens'"),
        ({"split": "tset"}, "split='tset'"),
    ],
)
def test_bad_settings(tokenizer, changes, message):
    with pytest.raises(ConfigError, match=message):
        evaluate(make_model(), tokenizer, TASKS, progress=False, **changes)


def test_unknown_tasks(tokenizer):
    with pytest.raises(ConfigError, match="Did you mean 'boolq'"):
        evaluate(make_model(), tokenizer, "bolq", progress=False)
    with pytest.raises(ConfigError, match="none named"):
        evaluate(make_model(), tokenizer, [], progress=False)


def test_task_ids_follow_the_training(tokenizer):
    model = add_adapter(make_model(), granularity="task")
    second = evaluate(model, tokenizer, TASKS, progress=False).predictions["second"]["adapter"]
    alone = evaluate(model, tokenizer, TASKS[1:2], progress=False, task_ids={"first": 0, "second": 1})
    for p, q in zip(alone.predictions["second"]["adapter"], second, strict=True):
        assert p.scores == pytest.approx(q.scores, abs=1e-5)
    other = evaluate(model, tokenizer, TASKS[1:2], progress=False, task_ids={"second": 0})
    assert other.predictions["second"]["adapter"][0].scores != pytest.approx(second[0].scores, abs=0.01)
    with pytest.raises(ConfigError, match="not trained on second"):
        evaluate(model, tokenizer, TASKS[1:2], progress=False, task_ids={"first": 0})


# -- adapters from disk -------------------------------------------------------------------------


@pytest.fixture
def folders(tmp_path, tokenizer):
    """A base model and an adapter for it, saved."""
    base = tmp_path / "base"
    model = make_model()
    model.save_pretrained(base)
    tokenizer.save_pretrained(base)
    model.name_or_path = str(base)  # what PEFT remembers as the base
    adapted = add_adapter(model)
    adapted.save_pretrained(tmp_path / "adapter")
    return base, tmp_path / "adapter", adapted


def test_load_adapter(folders, tokenizer):
    _, folder, adapted = folders
    (folder / "recipe.json").write_text(
        json.dumps({"model": "no/such/thing", "origin": {"task_ids": {"boolq": 0, "piqa": 1}}})
    )
    model, loaded_tokenizer = load_adapter(folder)
    assert model.monkeyjump_task_ids == {"boolq": 0, "piqa": 1}
    assert not model.training
    before = evaluate(adapted, tokenizer, TASKS[:1], progress=False)
    after = evaluate(model, loaded_tokenizer, TASKS[:1], progress=False)
    assert scores(after, "adapter") == pytest.approx(scores(before, "adapter"), abs=1e-5)


def test_unreadable_adapters_say_why(folders, tmp_path):
    base, folder, _ = folders

    def fails(path: Any, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            load_adapter(path)

    fails(tmp_path / "nowhere", "does not exist")
    fails(base, "holds a whole model")
    fails(base / "config.json", "is a file")
    fails(tmp_path, "Did you mean .*adapter")
    weights = folder / "adapter_model.safetensors"
    good = weights.read_bytes()
    weights.write_bytes(good[:100])
    fails(folder, "does not load onto base model")
    weights.unlink()
    fails(folder, "no weights")
    weights.write_bytes(good)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "./gone"}))
    fails(folder, "base model of .* is missing")
    (folder / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": None}))
    fails(folder, "does not say which base model")
    (folder / "adapter_config.json").write_text("{")
    fails(folder, "damaged")


@pytest.mark.model
def test_the_default_model_scores_like_a_plain_loop():
    from monkeyjump.models import load_model

    model, tokenizer = load_model("smollm2-135m")
    examples = [item for task in expand("opinion,place") for item in load_examples(task, "test", limit=3)]
    encoder = Encoder(tokenizer, answer_format="text")
    for item, found in zip(examples, predict(model, encoder, examples, "text"), strict=True):
        assert found.scores == pytest.approx(naive_scores(model, encoder, item, "text", {}), abs=1e-3)


def test_the_collector_leaves_old_objects_alone_while_a_model_is_scored(tokenizer):
    model, counts, frozen = make_model(), list[int](), gc.get_freeze_count()
    model.register_forward_hook(lambda module, args, output: counts.append(gc.get_freeze_count()))
    gc.unfreeze()  # the whole suite runs with old objects left alone
    try:
        evaluate(model, tokenizer, TASKS[:1], progress=False)
        assert min(counts) > 1000
        assert gc.get_freeze_count() == 0
    finally:
        if frozen:
            gc.freeze()
    evaluate(model, tokenizer, TASKS[:1], progress=False)
    assert bool(gc.get_freeze_count()) == bool(frozen)
