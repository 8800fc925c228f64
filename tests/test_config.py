"""MonkeyJumpConfig: the paper's defaults, JSON, and one clear error for everything that is wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from peft import PeftConfig

import monkeyjump as mj
from tests.helpers import TARGETS


def test_the_defaults_are_the_papers() -> None:
    config = mj.MonkeyJumpConfig()
    paper = {
        "adapter": "lora", "r": 2, "alpha": 5.0, "dropout": 0.05, "top_k": 2, "temperature": 1.0,
        "similarity": "cosine", "renormalize": False, "jitter": 0.0, "granularity": "token",
        "sequence_token": "prompt", "route_space": "raw", "center_init": "kmeans", "init_tokens": None,
        "ema_momentum": 0.5, "ema_interval": 2, "ema_stop": 5_000, "ema_assign": "topk", "ema_space": "normalized",
    }  # fmt: skip
    assert {name: getattr(config, name) for name in paper} == paper
    assert config.peft_type == "MONKEYJUMP"
    assert getattr(config.peft_type, "value", None) == "MONKEYJUMP"


def test_json_round_trip(tmp_path: Path) -> None:
    loose: dict[str, Any] = {"target_modules": {"v_proj", "q_proj"}, "layers_to_route": range(2)}
    config = mj.MonkeyJumpConfig(**loose, top_k=1)
    json.dumps(config.to_dict())
    config.save_pretrained(str(tmp_path))
    again = PeftConfig.from_pretrained(str(tmp_path))
    assert isinstance(again, mj.MonkeyJumpConfig)
    assert again.to_dict() == config.to_dict()
    assert again.target_modules == ["q_proj", "v_proj"]  # a set has no order: sorted, so that runs agree


# field -> (bad values, words of the rule, words of the fix)
BAD: dict[str, tuple[list[Any], str, str]] = {
    "adapter": (["lorra", "", None], "not known", "choose one of lora, lora_fa, adalora, propulsion"),
    "similarity": (["cos", "l2"], "not known", "choose one of cosine"),
    "granularity": (["tokens", "prompt_lengths"], "not known", "choose one of token, sequence, task"),
    "sequence_token": (["prompt_lengths", "first"], "not known", "choose one of prompt, last, mean, max"),
    "route_space": (["centred"], "not known", "choose one of raw, centered"),
    "center_init": (["k-means"], "not known", "choose one of kmeans"),
    "ema_assign": (["all"], "not known", "choose one of topk, top1"),
    "ema_space": (["unit"], "not known", "choose one of normalized, raw"),
    "r": ([0, -1, 2.5, "2", True], "an integer >= 1", "use 1 or more"),
    "top_k": ([0, -2, 1.0], "an integer >= 1", "layers_to_route=\\[\\]"),
    "alpha": ([0, -1.0, float("nan"), float("inf")], "a number > 0", "the paper uses 5"),
    "dropout": ([-0.1, 1.0, float("nan")], r"in \[0, 1\)", "0 switches dropout off"),
    "temperature": ([0, -1.0, 0.0, float("nan"), "1"], "a number > 0", "the paper uses 1"),
    "jitter": ([-0.1], "a number >= 0", "0 switches the noise off"),
    "ema_momentum": ([1.0, -0.5, 1.5, float("nan")], r"in \[0, 1\)", "ema_stop=0"),
    "ema_interval": ([0, -1], "an integer >= 1", "after every training forward"),
    "ema_stop": ([-1, 0.5], "an integer >= 0", "never moves the centres"),
    "init_tokens": ([0], "an integer >= 1", "50000"),
    "layers_to_route": ([[-1], ["a"], 0.5, True], "block numbers >= 0", "count blocks from 0"),
    "layers_to_transform": ([[-2], -1, "", {}], "block numbers >= 0", "count blocks from 0"),
    "task_experts": ([[], [-1], ["q"], -1, "q"], "one expert position >= 0 per task id", "e.g."),
    "target_modules": ([3, True, [1], {"q_proj": 1}], "a list of names or a text", "all-linear"),
    "exclude_modules": ([0, ["a", None]], "a list of names or a text", "all-linear"),
    "shared_modules": ([1, {}, [None]], "a list of names", "write"),
    "layers_pattern": ([2, [2]], "a name or a list of them", "layers"),
    "modules_to_save": (["lm_head", 1], "a list of names", "lm_head"),
    "experts": ([0, [], [[1]], None], "an integer >= 1, or a list", "4 is the default"),
    "method_options": ([[], ""], "a dict", "name"),
    "task_type": (["CAUSAL"], "Must be one of", "CAUSAL_LM"),
}  # fmt: skip
# the settings that read an option, then as for fields
BAD_OPTIONS: list[tuple[dict[str, Any], str, list[Any], str, str]] = [
    ({"adapter": "propulsion"}, "degree", [0, 1.5], "an integer >= 1", "15"),
    ({"adapter": "adalora"}, "orth_reg_weight", [-1.0], "a number >= 0", "switches the orthogonality loss off"),
    ({"adapter": "adalora"}, "beta1", [1.0], r"in \[0, 1\)", "0.85"),
    ({"adapter": "adalora"}, "score_per_token", ["no"], "True or False", "leave it out"),
    ({"router": "linear"}, "noise", ["uniform", None], "not known", "choose one of gaussian, logit_mul, input_mul"),
    ({"router": "linear"}, "aux_loss_weight", [-1, "1"], "a number >= 0", "0 switches the loss off"),
    ({"router": "uniform"}, "uniform_gate", [0], "a number > 0", "1 is plain PEFT"),
    ({"router": "sigmoid"}, "threshold", [2.0], r"in \(0, 1\]", "0.5"),
    ({"router": "sigmoid"}, "extra_experts", [["paralel"], ["prompt"] * 2], "parallel and prompt", "None or"),
    ({"placement": "nested"}, "tasks", [0], "an integer >= 1", "8"),
]


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, (values, _, _) in BAD.items() for v in values])
def test_a_bad_value_names_field_value_rule_and_fix(field: str, value: Any) -> None:
    _, rule, fix = BAD[field]
    with pytest.raises(mj.ConfigError, match=rf"(?s){field}=.*{rule}.*{fix}") as caught:
        mj.MonkeyJumpConfig(**{"target_modules": ["q_proj", "v_proj"], field: value})
    assert len(caught.value.problems) == 1
    shown = [value] if field.startswith("layers_to") and isinstance(value, int) else value
    assert repr(shown) in str(caught.value)


@pytest.mark.parametrize("pattern", ["layers", ["h", "layers"]])
def test_a_name_of_the_block_list_needs_block_numbers(pattern: Any) -> None:
    with pytest.raises(mj.ConfigError, match="has no effect without layers_to_transform: give the block numbers, or"):
        mj.MonkeyJumpConfig(target_modules=["q_proj", "v_proj"], layers_pattern=pattern)
    mj.MonkeyJumpConfig(target_modules=["q_proj", "v_proj"], layers_pattern=pattern, layers_to_transform=0)


@pytest.mark.parametrize(("settings", "name", "values", "rule", "fix"), BAD_OPTIONS)
def test_a_bad_option_names_itself_its_value_the_rule_and_the_fix(
    settings: dict[str, Any], name: str, values: list[Any], rule: str, fix: str
) -> None:
    for value in values:
        field = "adapter_options" if "adapter" in settings else "method_options"
        for given in ({name: value}, {field: {name: value}}):  # by keyword, and where it belongs
            with pytest.raises(mj.ConfigError, match=rf"(?s){name}=.*{rule}.*{fix}") as caught:
                mj.MonkeyJumpConfig(**settings, **given)
            assert len(caught.value.problems) == 1
            assert repr(value) in str(caught.value)


def test_options_of_another_kind_or_with_a_misspelt_name() -> None:
    with pytest.raises(mj.ConfigError) as caught:
        mj.MonkeyJumpConfig(
            router="linear", adapter_options={"degree": 3}, method_options={"aux_los_weight": 1.0, "tasks": 3}, r=0
        )
    for words in (
        "r=0 must be",
        "which adapter 'lora' does not have (its settings are (none)): use adapter='propulsion', or drop it",
        "'aux_los_weight', which router='linear' with placement='block' does not have",
        "Did you mean 'aux_loss_weight'?",
        "tasks=3 needs placement='nested', not router='linear' with placement='block'",
    ):
        assert words in str(caught.value)
    assert len(caught.value.problems) == 4
    with pytest.raises(mj.ConfigError, match=r"method_options=\['a'\] must be a dict"):
        mj.MonkeyJumpConfig(method_options=["a"], threshold=0.5)  # type: ignore[call-arg, arg-type]


def test_options_as_keywords(tmp_path: Path) -> None:
    """They go where they belong, on top of what is there; a default of another kind says nothing."""
    options = {"aux_loss_weight": 0.5, "lb_norm": "mixtral"}
    config = mj.MonkeyJumpConfig(
        router="linear", adapter="adalora", beta1=0.5, tasks=8, degree=15, lb_norm="mixtral",
        method_options={"aux_loss_weight": 0.5, "lb_norm": "switch"},
    )  # type: ignore[call-arg]  # fmt: skip
    assert config.adapter_options == {"beta1": 0.5}
    assert config.method_options == options
    assert (config.learned.aux_loss_weight, config.learned.lb_norm, config.more.tasks) == (0.5, "mixtral", 8)
    changed = replace(config, aux_loss_weight=0.25)  # type: ignore[call-arg]
    assert (changed.learned.aux_loss_weight, changed.learned.lb_norm) == (0.25, "mixtral")
    config.save_pretrained(str(tmp_path))
    assert json.loads((tmp_path / "adapter_config.json").read_text())["method_options"] == options
    assert PeftConfig.from_pretrained(str(tmp_path)) == config
    with pytest.raises(mj.ConfigError, match="tasks=3 needs placement='nested'"):
        replace(config, tasks=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'aux_los_weight'"):
        mj.MonkeyJumpConfig(aux_los_weight=0.1)  # type: ignore[call-arg]


def test_all_problems_at_once() -> None:
    with pytest.raises(mj.ConfigError) as caught:
        mj.MonkeyJumpConfig(
            adapter="lorra", r=0, temperature=-1, ema_momentum=1.0, top_k=0, target_modules=["q_proj"],
            shared_modules=["up_proj"],
        )  # fmt: skip
    assert len(caught.value.problems) == 6
    assert "6 problems" in str(caught.value)
    assert "Did you mean 'lora'?" in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_shared_modules_that_make_no_sense() -> None:
    with pytest.raises(mj.ConfigError, match=r"'gate_prj'.*not among target_modules.*Did you mean 'gate_proj'"):
        mj.MonkeyJumpConfig(target_modules=TARGETS, shared_modules=["gate_prj"])
    with pytest.raises(mj.ConfigError, match=r"holds every target.*layers_to_route=\[\]"):
        mj.MonkeyJumpConfig(target_modules=TARGETS, shared_modules=TARGETS)
    with pytest.raises(mj.ConfigError, match=r"must be a list of names: write \['o_proj'\]"):
        mj.MonkeyJumpConfig(target_modules=TARGETS, shared_modules="o_proj")  # type: ignore[arg-type]
    mj.MonkeyJumpConfig(target_modules=TARGETS, shared_modules=TARGETS, layers_to_route=[])


def test_nothing_targeted() -> None:
    with pytest.raises(mj.ConfigError, match=r"target_modules=\[\] names no module"):
        mj.MonkeyJumpConfig(target_modules=[])


def schedule(**options: int) -> mj.MonkeyJumpConfig:
    return mj.MonkeyJumpConfig(adapter="adalora", r=4, adapter_options=options)


def test_rank_allocation_needs_a_schedule() -> None:
    with pytest.raises(mj.ConfigError, match="total_step=None must be given when target_r < r"):
        schedule(target_r=2)
    with pytest.raises(mj.ConfigError, match=r"tinit \+ tfinal = 12 must be smaller than total_step=10"):
        schedule(target_r=2, total_step=10, tinit=6, tfinal=6)
    with pytest.raises(mj.ConfigError, match=r"target_r=5 must be in 1..r \(4\)"):
        schedule(target_r=5, total_step=10)
