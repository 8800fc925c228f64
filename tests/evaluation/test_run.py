"""Whole evaluations: base beside adapter, means, tables, files, and adapters from disk."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model

from monkeyjump.errors import ConfigError
from monkeyjump.evaluation import metrics
from monkeyjump.evaluation.report import EvaluationReport, ReportRow, percent
from monkeyjump.evaluation.run import evaluate, load_adapter, task_score
from monkeyjump.evaluation.score import Prediction, predict
from monkeyjump.tasks import Example, GeneratedSource, Task, expand, load_examples
from monkeyjump.tasks.encode import Encoder
from tests.evaluation.test_score import naive_scores
from tests.evaluation.toys import add_adapter, make_model


def toy_task(name: str, family: str = "toys", options: tuple[str, ...] = ("no", "yes"), **changes: Any) -> Task:
    def render(row: Any) -> Example:
        return Example(question=row["text"], options=options, label=row["label"] % max(1, len(options)), **row["more"])

    def rows(split: str, seed: int) -> list[dict[str, Any]]:
        score = {"score": 0.0} if changes.get("metric") == "spearman" else {}
        return [
            {"text": f"{name} {n}{'!' * (n % 4)}", "label": n, "more": {**score, **({"score": n / 4} if score else {})}}
            for n in range(12)
        ]

    return Task(name, family, render, ("text",), GeneratedSource(rows), **changes)


TASKS = [
    toy_task("first"),
    toy_task("second", options=("red", "green", "blue")),
    toy_task("degree", "numbers", ("0", "1", "2", "3"), metric="spearman"),
]


@pytest.fixture
def report(tokenizer) -> EvaluationReport:
    return evaluate(add_adapter(make_model()), tokenizer, TASKS, mode="text", progress=False)


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


def test_json_csv_and_html_hold_the_same_numbers(report):
    data = json.loads(report.to_json())
    rows = {row["task"]: row for row in [*data["rows"], *data["families"], data["overall"]]}
    table = list(csv.DictReader(io.StringIO(report.to_csv())))
    assert len(table) == len(rows) == 6
    html = report.to_html()
    embedded = re.search(r'<script type="application/json" id="evaluation">(.*?)</script>', html, re.DOTALL)
    assert embedded is not None
    assert json.loads(embedded.group(1)) == data
    shown = html[: embedded.start()].replace("\u2212", "-")
    for line in table:
        row = rows[line["task"]]
        for side in ("base", "adapter", "difference"):
            assert float(line[side]) == row[side]
            assert float(line[f"{side}_low"]) == row[f"{side}_interval"]["low"]
            assert float(line[f"{side}_high"]) == row[f"{side}_interval"]["high"]
            assert f">{percent(row[side], signed=side == 'difference')}<" in shown
        assert f"{percent(row['adapter'])}" in str(report)


def test_html_is_self_contained_and_escaped(report):
    row = ReportRow("task", "<b>&x</b>", "f", "accuracy", 3, base=0.5, base_interval=metrics.wilson(1, 2))
    nasty = EvaluationReport([row], [row], row, {"model": "</script><script>alert(1)</script>"})
    for html in (report.to_html(), nasty.to_html()):
        assert "http" not in html
        assert "<link" not in html
        assert html.count("<script") == 1
    assert "&lt;b&gt;" in nasty.to_html()


def test_names_are_neither_markup_nor_formulas():
    from rich.console import Console

    row = ReportRow("task", "=1+1 [/red] [x]", "-f", "accuracy", 3, base=-0.5, base_interval=metrics.Interval(-0.5, 1))
    nasty = EvaluationReport([row], [row], row, {"model": "[/m]"})
    out = io.StringIO()
    Console(file=out, width=80).print(nasty.table())
    assert "=1+1 [/red] [x]" in out.getvalue()
    assert "[/m]" in out.getvalue()
    cells = list(csv.reader(io.StringIO(nasty.to_csv())))[1]
    assert cells[1:3] == ["'=1+1 [/red] [x]", "'-f"]
    assert cells[6:8] == ["-0.5", "-0.5"]  # numbers stay numbers


def test_text_fits_eighty_columns(report):
    from rich.console import Console

    long = ReportRow("task", "a-task-with-a-very-long-name", "glue", "exact_match", 123456, "text")
    interval = metrics.Interval(-0.9999, 1.0)
    measured = {"base": 1.0, "adapter": 1.0, "difference": -0.9999}
    wide = ReportRow(**{**vars(long), **measured, **{f"{name}_interval": interval for name in measured}})
    report.rows.append(wide)
    report.families.append(
        ReportRow("family", "mean of a-very-long-family-name", "glue", "mean", 1, base=0.1, adapter=0.2)
    )
    texts = [str(report)]
    for color in (True, False):
        out = io.StringIO()
        Console(file=out, width=80, force_terminal=color, no_color=not color).print(report.table())
        texts.append(re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue()))
    for text in texts:
        assert max(map(len, text.splitlines())) <= 80
        assert "degree" in text
        assert percent(report.overall.adapter) in text
        assert "-100.0..+100.0" in text


def test_saved_files(tmp_path, report):
    paths = report.save(tmp_path / "out" / "evaluation")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "evaluation.csv",
        "evaluation.html",
        "evaluation.json",
        "evaluation.predictions.jsonl",
    ]
    lines = [json.loads(line) for line in paths["predictions.jsonl"].read_text("utf-8").splitlines()]
    assert len(lines) == 3 * 2 * 12
    assert {"task", "side", "index", "predicted", "gold", "correct", "scores"} <= set(lines[0])


def test_limit_is_a_fixed_sample(tokenizer):
    model = make_model()
    found = [
        evaluate(model, tokenizer, TASKS[:1], limit=5, seed=seed, progress=False).predictions["first"]["base"]
        for seed in (0, 1)
    ]
    assert len(found[0]) == 5
    assert found[0] == found[1]
    assert [p.gold for p in found[0]] != [n % 2 for n in range(5)]  # not the beginning of the file


def test_a_free_answer_is_generated(tokenizer):
    def render(row: Any) -> Example:
        return Example(question=row["text"], free_answer=row["answer"])

    source = GeneratedSource(lambda split, seed: [{"text": "say", "answer": "x"}, {"text": "tell", "answer": "y"}])
    task = Task("free", "own", render, ("text", "answer"), source, metric="exact_match")
    report = evaluate(make_model(), tokenizer, [task], mode="letter", progress=False)
    assert report.rows[0].mode == "generate"
    assert report.rows[0].n == 2
    assert "scored in mode generate" in str(report)
    assert all(p.text is not None for p in report.predictions["free"]["base"])


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
    (folder / "recipe.json").write_text(json.dumps({"model": "no/such/thing", "tasks": ["boolq", "piqa"]}))
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
    examples = [item for task in expand("opinion,lineup") for item in load_examples(task, "test", limit=3)]
    encoder = Encoder(tokenizer, answer_format="text")
    for item, found in zip(examples, predict(model, encoder, examples, "text"), strict=True):
        assert found.scores == pytest.approx(naive_scores(model, encoder, item, "text", {}), abs=1e-3)
