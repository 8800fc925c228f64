"""Recipes: one typed configuration, every mistake named."""

from __future__ import annotations

from pathlib import Path

import pytest

from monkeyjump import methods
from monkeyjump.cli.train import RECIPES
from monkeyjump.errors import ConfigError
from monkeyjump.training.recipe import load_recipe, names, parse_value, recipe_from


def test_the_papers_hyper_parameters_are_in_the_paper_recipes() -> None:
    text, visual = (2, 4, 4, 1024), (1, 1, 8, 2048)  # rank, batch size, accumulation, length
    expected = dict.fromkeys(("glue", "commonsense", "text14"), text)
    for name, settings in (expected | dict.fromkeys(("image", "video", "mmt47"), visual)).items():
        recipe = load_recipe(name)
        config = methods.build(recipe.method, recipe.preset, **recipe.adapter)
        assert (config.alpha, config.dropout, config.top_k, config.temperature) == (5, 0.05, 2, 1.0)
        assert config.target_modules == ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj"]
        assert config.shared_modules == ["o_proj", "gate_proj"]
        assert (config.init_tokens, config.ema_momentum) == (None, 0.5)  # 50,000 where there is a GPU
        assert (config.ema_interval, config.ema_stop) == (2, 5_000)
        train = recipe.train
        assert (config.r, train.batch_size, train.accumulation, recipe.data.max_length) == settings
        assert (train.lr, train.epochs) == (1e-4, 2.0)
        assert (train.schedule, train.warmup, train.weight_decay) == ("cosine", 0.1, 0.1)


def test_every_recipe_that_comes_with_the_package_loads() -> None:
    assert set(names()) == set(RECIPES.split(", "))  # what `monkeyjump train --help` says
    for name in names():
        assert load_recipe(name).name == name


def test_overrides_reach_nested_settings_with_their_types() -> None:
    recipe = load_recipe("quickstart", ["train.lr=1e-3", "tasks=sst2,qnli", "adapter.r=4", "train.max_steps=none"])
    assert recipe.train.lr == 1e-3
    assert recipe.tasks == ["sst2", "qnli"]
    assert recipe.adapter["r"] == 4
    assert recipe.train.max_steps is None


def test_all_mistakes_are_reported_at_once_with_suggestions(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("modle: x\ntrain: {lrr: 1, batch_size: four}\ndata: 3\ntasks: [no]\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_recipe(str(path))
    text = str(caught.value)
    assert len(caught.value.problems) == 5
    assert "'modle'" in text
    assert "Did you mean 'model'?" in text
    assert "'train.lrr'" in text
    assert "Did you mean 'lr'?" in text
    assert "train.batch_size='four' must be a whole number" in text
    assert "data=3 must be a section" in text
    assert "tasks.0=False must be text; put words such as no in quotes" in text


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("train.lr=0", "train.lr=0 must be above 0: learning rate"),
        ("train.warmup=1.5", "train.warmup=1.5 must be below 1: share of all steps"),
        ("data.answer=word", "data.answer='word' must be letter or text"),
        ("evaluate.mode=guess", "evaluate.mode='guess' must be letter, text or generate, or null"),
        ("train.epochs=0", "train.epochs=0 must be above 0"),
        ("train.epochs=Infinity", "train.epochs=inf must be finite"),
        ("train.lr=nan", "train.lr='nan' must be"),
        ("train.weight_decay=nan", "train.weight_decay='nan' must be"),
        ("train.max_grad_norm=inf", "train.max_grad_norm='inf' must be finite"),
        ("train.save_steps=0", "train.save_steps=0 must be at least 1"),
        ("seed=-1", "seed=-1 must be at least 0"),
        ("data.cap=-3", "data.cap=-3 must be at least 1"),
        ('data.caps={"sst2": 0}', "data.caps.sst2=0 must be at least 1"),
        ("data.weights.sst2=inf", "data.weights.sst2='inf' must be finite"),
        ("evaluate.test_limit=-1", "evaluate.test_limit=-1 must be at least 1, or null"),
        ("evaluate.validation_limit=0", "evaluate.validation_limit=0 must be at least 1"),
        ("evaluate.batch_tokens=0", "evaluate.batch_tokens=0 must be at least 1"),
        ("name=..", "name='..' must be the name of one folder"),
        ("name=../x", "name='../x' must be the name of one folder"),
        ("train.schedule=cosin", "must be linear, cosine, cosine_with_restarts"),
        ("train.schedule=cosin", "Did you mean 'cosine'?"),
        ("lr=1e-3", "unknown key 'lr'. Did you mean 'train.lr'?"),
        ("train.seed=1", "unknown key 'train.seed'. Did you mean 'seed'?"),
        ("train.bf16=maybe", "train.bf16='maybe' must be true or false, or null"),
        ("tasks=", "tasks=[] must not be empty: task names"),
    ],
)
def test_values_out_of_range_name_field_value_and_rule(override: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe("quickstart", [override])
    assert part in str(caught.value)


def test_an_unknown_recipe_suggests_a_known_one() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'quickstart'"):
        load_recipe("quikstart")


def test_a_recipe_survives_its_own_dictionary() -> None:
    recipe = load_recipe("text14", ["seed=3"])
    assert recipe_from(recipe.to_dict()) == recipe


def test_streaming_needs_a_number_of_steps() -> None:
    with pytest.raises(ConfigError, match=r"streaming=true needs train\.max_steps"):
        load_recipe("text14", ["data.streaming=true"])


BOMB = "adapter:\n  a0: &a0 [x, x]\n" + "".join(f"  a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 60))


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"name: caf\xe9\n", "is not UTF-8 text"),
        (b"adapter: " + b"[" * 5000, "is nested too deeply"),
        (b"name: 2024-99-99\n", "is not valid YAML: month must be in 1..12"),
        (BOMB.encode(), "it refers to another place with *a0; write the value out"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_message(content: bytes, part: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_recipe(str(path))
    assert part in str(caught.value)
    assert str(path) in str(caught.value)


def test_text_on_the_command_line_stays_text() -> None:
    given = ["data.folder=none", "name=2024", "output=true", "tasks=7,none", "evaluate.mode=null", "train.compile=true"]
    recipe = load_recipe("quickstart", given)
    assert (recipe.data.folder, recipe.name, recipe.output) == ("none", "2024", "true")
    assert (recipe.tasks, recipe.evaluate.mode, recipe.train.compile) == (["7", "none"], None, True)


@pytest.mark.parametrize("text", ["sst2,qnli", "[sst2,qnli]", "[sst2, qnli]", '["sst2", "qnli"]', "['sst2', 'qnli']"])
def test_ways_to_write_a_list(text: str) -> None:
    assert load_recipe("quickstart", [f"tasks={text}"]).tasks == ["sst2", "qnli"]
    assert load_recipe("quickstart", ["data.buckets=[64,128]"]).data.buckets == [64, 128]
    assert load_recipe("quickstart", [f"adapter.target_modules={text}"]).adapter["target_modules"] == ["sst2", "qnli"]


def test_command_line_values() -> None:
    assert [parse_value(text) for text in ("1e-4", "3", "true", "null", "a,b", "a b", '{"x": 1}')] == [
        1e-4,
        3,
        True,
        None,
        ["a", "b"],
        "a b",
        {"x": 1},
    ]
