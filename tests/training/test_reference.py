"""The reference page and the schemas for editors say what the loaders do, and every example of the page works."""

from __future__ import annotations

import itertools
import json
import re
import runpy
import shlex
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from monkeyjump import methods, tasks
from monkeyjump.checked import keys
from monkeyjump.cli.main import main as command_line
from monkeyjump.config import MonkeyJumpConfig
from monkeyjump.config_options import METHOD_OPTIONS
from monkeyjump.errors import ConfigError
from monkeyjump.registry import ADAPTERS
from monkeyjump.tasks.custom import simple_task
from monkeyjump.tasks.task_file import TaskFile
from monkeyjump.training.recipe import Recipe, load_recipe, names, recipe_from

# what the package itself does not need, so that a machine without it still runs all other tests
Draft202012Validator: Any = pytest.importorskip("jsonschema").Draft202012Validator
Table: Any = pytest.importorskip("pyarrow").Table
parquet: Any = pytest.importorskip("pyarrow.parquet")

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "reference.md").read_text(encoding="utf-8")
RECIPE_SCHEMA = json.loads((DOCS / "recipe.schema.json").read_text(encoding="utf-8"))
TASK_SCHEMA = json.loads((DOCS / "task.schema.json").read_text(encoding="utf-8"))


def test_the_files_of_docs_are_what_the_types_say(tmp_path: Path) -> None:
    empty = re.sub(r"(<!-- (?!end)\w+ -->\n).*?(<!-- end)", r"\1\2", PAGE, flags=re.DOTALL)
    (tmp_path / "reference.md").write_text(empty, encoding="utf-8")
    runpy.run_path(str(DOCS / "make_reference.py"))["write_documents"](tmp_path)
    for name in ("reference.md", "recipe.schema.json", "task.schema.json"):
        assert (tmp_path / name).read_text(encoding="utf-8") == (DOCS / name).read_text(encoding="utf-8"), (
            f"docs/{name} is not what the types say: run `python docs/make_reference.py`."
        )


def test_the_tables_have_every_key_and_five_columns() -> None:
    own_fields = [field.name for field in fields(MonkeyJumpConfig) if "problem" in field.metadata]
    options = [option for adapter in ADAPTERS if ADAPTERS.built_in(adapter) for option in ADAPTERS.get(adapter).options]
    rows = re.findall(r"^\| `[\w.]+` \|.*$", PAGE, re.MULTILINE)
    wanted = [*dict(keys(TaskFile)), *dict(keys(Recipe)), *own_fields, *options, *METHOD_OPTIONS, "layout"]
    assert {row.split("`")[1] for row in rows} == set(wanted)
    assert {len(re.split(r"(?<!\\)\|", row)) for row in rows} == {7}


def test_the_schemas_are_valid_and_take_the_recipes_of_the_package() -> None:
    for schema in (RECIPE_SCHEMA, TASK_SCHEMA):
        assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
        Draft202012Validator.check_schema(schema)
    for name in names():
        path = Path(sys.modules["monkeyjump"].__file__ or "").parent / "recipes" / f"{name}.yaml"
        Draft202012Validator(RECIPE_SCHEMA).validate(yaml.safe_load(path.read_text(encoding="utf-8")))


def complaints(schema: dict[str, Any], content: Any) -> str:
    return " ".join(f"{error.json_path} {error.message}" for error in Draft202012Validator(schema).iter_errors(content))


def read(text: str) -> None:
    """What `monkeyjump validate` checks of a recipe, without its tasks."""
    recipe = recipe_from(yaml.safe_load(text) or {})
    methods.build(recipe.method, recipe.preset, **recipe.adapter)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("lr: 1", "lr"),
        ("train: {lrr: 1}", "lrr"),
        ("data: 3", "data"),
        ("data:", "data"),
        ("model: 5", "model"),
        ("name: a/b", "name"),
        ("name: ..", "name"),
        ("seed: -1", "seed"),
        ("tasks: []", "tasks"),
        ("tasks: [no]", "tasks"),
        ("train: {batch_size: four}", "batch_size"),
        ("train: {batch_size: '4'}", "batch_size"),
        ("train: {batch_size: true}", "batch_size"),
        ("train: {lr: 0}", "lr"),
        ("train: {lr: -1e-3}", "lr"),
        ("train: {lr: yes}", "lr"),
        ("train: {lr: fast}", "lr"),
        ("train: {warmup: 1.5}", "warmup"),
        ("train: {max_steps: 0}", "max_steps"),
        ("train: {bf16: 1}", "bf16"),
        ("train: {compile: fast}", "compile"),
        ("train: {schedule: null}", "schedule"),
        ("data: {answer: word}", "answer"),
        ("data: {buckets: [0]}", "buckets"),
        ("data: {caps: {sst2: 0}}", "sst2"),
        ("data: {weights: {sst2: 0}}", "sst2"),
        ("evaluate: {mode: guess}", "mode"),
        ("method: mjlra", "mjlra"),
        ("preset: paper", "preset"),
        ("adapter: {rank: 4}", "rank"),
        ("adapter: {ema_interval: 0}", "ema_interval"),
        ("adapter: {init_tokens: many}", "init_tokens"),
        ("adapter: {top_k: 1.5}", "top_k"),
        ("adapter: {target_modules: 3}", "target_modules"),
        ("adapter: {shared_modules: [1]}", "shared_modules"),
        ("adapter: {layers_to_route: 0.5}", "layers_to_route"),
        ("adapter: {modules_to_save: lm_head}", "modules_to_save"),
        ("adapter: {experts: []}", "experts"),
        ("adapter: {dropout: 1}", "dropout"),
        ("adapter: {renormalize: maybe}", "renormalize"),
        ("adapter: {similarity: cosin}", "similarity"),
        ("adapter: {adapter: lroa}", "adapter"),
        ("adapter: {adapter: vera, adapter_options: {d_initial: 0}}", "d_initial"),
        ("adapter: {adapter: vera, adapter_options: {d_first: 1}}", "d_first"),
        ("method: moelora\nadapter: {aux_loss_weight: -1}", "aux_loss_weight"),
        ("method: moelora\nadapter: {method_options: {noise: loud}}", "noise"),
        ("method: moa\nadapter: {extra_experts: [parallel, parallel]}", "extra_experts"),
        ("method: moa\nadapter: {threshold: 2}", "threshold"),
    ],
)
def test_schema_and_loader_refuse_the_same_recipes(text: str, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        read(text)
    assert key in complaints(RECIPE_SCHEMA, yaml.safe_load(text))


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "tasks: sst2",
        "tasks: [glue, mine.yaml]\noutput: null\nseed: 4294967295",
        "train: {lr: 1e-4, epochs: 3, max_steps: null, bf16: null, report_to: wandb, compile: true}",
        "train: {lr: 0.001, warmup: 0, bf16: false, report_to: [wandb, tensorboard], compile: blocks, fused_loss: off}",
        "data: {folder: null, cap: null, caps: {sst2: 5}, weights: {sst2: 1e-1}, temperature: 2, buckets: [64, 128]}",
        "evaluate: {mode: null, validation_limit: null, test_limit: 5}",
        "adapter: {r: 8, alpha: 16, target_modules: all-linear, shared_modules: [], layers_to_route: 0}",
        "adapter: {target_modules: [q_proj, v_proj], layers_to_route: [0, 1], task_type: CAUSAL_LM}",
        "method: lora\nadapter: {adapter: vera, adapter_options: {d_initial: -0.2, projection_seed: 3}}",
        "method: adalora\nadapter: {r: 4, target_r: 2, total_step: 100, adapter_options: null}",
        "method: mola\nadapter: {experts: [2, 4], aux_loss_weight: 0.01, method_options: {noise: logit_mul}}",
        "method: moa\nadapter: {extra_experts: [parallel], threshold: 0.5, router_hidden: null, top_k: null}",
        "method: mixlora\npreset: published\nadapter: {layout: projection}",
    ],
)
def test_schema_and_loader_take_the_same_recipes(text: str) -> None:
    read(text)
    assert complaints(RECIPE_SCHEMA, yaml.safe_load(text)) == ""


TASK = {"name": "mine", "prompt": "{text}?", "answer": "gold", "data": "{test: rows.jsonl}"}


def task_file(folder: Path, changes: dict[str, str | None]) -> Path:
    (folder / "rows.jsonl").write_text('{"text": "a", "gold": "b"}\n', encoding="utf-8")
    lines = [
        f"{key}: {value}" for key, value in {**TASK, "prompt": "'{text}?'", **changes}.items() if value is not None
    ]
    (folder / "mine.yaml").write_text("\n".join(lines), encoding="utf-8")
    return folder / "mine.yaml"


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"promt": "x"}, "promt"),
        ({"name": None}, "name"),
        ({"answer": ""}, "answer"),
        ({"prompt": "[a, b]"}, "prompt"),
        ({"options": "[]"}, "options"),
        ({"options": "{}"}, "options"),
        ({"options": "[[a], [b]]"}, "options"),
        ({"metric": "f1"}, "metric"),
        ({"image": "{a: b}"}, "image"),
        ({"data": "rows.jsonl"}, "data"),
        ({"data": "{}"}, "data"),
        ({"data": "{validation: rows.jsonl}"}, "data"),
        ({"data": "{test: rows.jsonl, split: test}"}, "split"),
        ({"data": "{test: rows.jsonl, config: small}"}, "config"),
    ],
)
def test_schema_and_loader_refuse_the_same_task_files(tmp_path: Path, changes: dict[str, str | None], key: str) -> None:
    path = task_file(tmp_path, changes)
    with pytest.raises(ConfigError, match=key):
        tasks.get(str(path))
    assert key in complaints(TASK_SCHEMA, yaml.safe_load(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"name": "2024", "context": "", "metric": "null", "description": "5", "family": "~"},
        {"options": "[no, yes, 3]"},
        {"options": "{0: no, b: yes}", "metric": "accuracy"},
        {"options": "choices.text"},
        {"options": "", "metric": "exact_match"},
        {"data": "{train: rows.jsonl, validation: }"},
        {"data": "{hub: owner/name, config: small, revision: 1, test: validation}"},
        {"image": "photo"},
        {"image": "", "video": "[a, b]", "metric": "vqa_accuracy"},
    ],
)
def test_schema_and_loader_take_the_same_task_files(tmp_path: Path, changes: dict[str, str | None]) -> None:
    path = task_file(tmp_path, changes)
    tasks.get(str(path))
    assert complaints(TASK_SCHEMA, yaml.safe_load(path.read_text(encoding="utf-8"))) == ""


# -- the examples of the page -------------------------------------------------------------------

BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
YAML = [text for language, text in BLOCKS if language == "yaml"]
RECIPES = [text for text in YAML if "method:" in text]
TASKS = [text for text in YAML if text not in RECIPES]


def rows_below(example: str) -> list[str]:
    """The blocks of data that follow an example on the page."""
    below = BLOCKS[BLOCKS.index(("yaml", example)) + 1 :]
    return [rows for _, rows in itertools.takewhile(lambda block: block[0] in ("jsonl", "csv"), below)]


def write_example(folder: Path, example: str, rows: str) -> Path:
    content = yaml.safe_load(example)
    for file in (content["data"][split] for split in ("train", "test")):
        if file.endswith(".parquet"):
            parquet.write_table(Table.from_pylist([json.loads(row) for row in rows.splitlines()]), folder / file)
        else:
            (folder / file).write_text(rows, encoding="utf-8")
    (folder / f"{content['name']}.yaml").write_text(example, encoding="utf-8")
    return folder / f"{content['name']}.yaml"


def test_every_task_of_the_page_loads_and_reads_the_rows_below_it(tmp_path: Path) -> None:
    read = []
    for example in TASKS:
        assert complaints(TASK_SCHEMA, yaml.safe_load(example)) == ""
        for rows in rows_below(example):
            task = tasks.get(str(write_example(tmp_path, example, rows)))
            examples = tasks.load_examples(task, "test")
            assert not any("{" in example.prompt("text") for example in examples)
            read.append([example.answer for example in examples])
    assert read == [["yes", "no"], ["whale", "iron"], ["whale", "iron"], ["iron"], ["N'Djamena"]]
    (tmp_path / "hub.yaml").write_text(TASKS[-1], encoding="utf-8")
    splits = {split: split for split in ("train", "validation", "test")}
    assert tasks.get(str(tmp_path / "hub.yaml")).source == tasks.HubSource("allenai/ai2_arc", "ARC-Easy", splits=splits)


def test_every_recipe_of_the_page_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(RECIPES) == 3
    monkeypatch.chdir(tmp_path)
    write_example(tmp_path, TASKS[0], rows_below(TASKS[0])[0])
    for text in RECIPES:
        (tmp_path / "recipe.yaml").write_text(text, encoding="utf-8")
        recipe = load_recipe("recipe.yaml")
        methods.build(recipe.method, recipe.preset, **recipe.adapter)
        assert tasks.expand(recipe.tasks)
        assert complaints(RECIPE_SCHEMA, yaml.safe_load(text)) == ""


def test_every_command_of_the_page_has_settings_that_load() -> None:
    commands = [line for language, text in BLOCKS if language == "bash" for line in text.splitlines()]
    settings = [shlex.split(line)[3:] for line in commands if "--schema" not in line]
    assert sum(map(len, settings)) > 8
    for overrides in settings:
        recipe = load_recipe("quickstart", overrides)
        assert tasks.expand(recipe.tasks)
        methods.build(recipe.method, recipe.preset, **recipe.adapter)
    assert recipe.data.buckets == [160]
    assert recipe.train.max_steps is None


def test_answers_may_be_written_as_the_page_says(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").touch()
    table = re.findall(r"^\| `([\[{].*[\]}])` \| (.*) \| `(\w+)` \|$", PAGE, re.MULTILINE)
    assert len(table) == 4
    for options, cells, answer in table:
        parsed = yaml.load(options, yaml.BaseLoader)
        task = simple_task("t", prompt="?", answer="a", options=parsed, data={"test": tmp_path / "rows.jsonl"})
        for cell in re.findall(r"`([^`]+)`", cells):
            assert task.example({"a": json.loads(cell)}).answer == answer, (options, cell)


def test_validate_prints_the_schemas(capsys: pytest.CaptureFixture[str]) -> None:
    for kind, schema in (("recipe", RECIPE_SCHEMA), ("task", TASK_SCHEMA)):
        assert command_line(["validate", "--schema", kind]) == 0
        assert json.loads(capsys.readouterr().out) == schema
    assert command_line(["validate"]) == 2
    assert "name a recipe, such as `monkeyjump validate quickstart`" in capsys.readouterr().err
