"""The bridge to lm-evaluation-harness, against a stand-in for the package."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from monkeyjump.errors import ConfigError
from monkeyjump.evaluation.harness import run_harness
from tests.evaluation.toys import add_adapter, make_model


@pytest.fixture
def calls(monkeypatch) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []

    class HFLM:
        def __init__(self, pretrained: Any, tokenizer: Any, batch_size: int) -> None:
            self.pretrained, self.tokenizer, self.batch_size = pretrained, tokenizer, batch_size

    def simple_evaluate(**arguments: Any) -> dict[str, Any]:
        found.append(arguments)
        return {"results": {name: {"acc,none": 0.5} for name in arguments["tasks"]}, "config": {}}

    package, models, wrapper = (
        types.ModuleType(name) for name in ("lm_eval", "lm_eval.models", "lm_eval.models.huggingface")
    )
    package.simple_evaluate = simple_evaluate  # type: ignore[attr-defined]
    wrapper.HFLM = HFLM  # type: ignore[attr-defined]
    for module in (package, models, wrapper):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return found


def test_the_model_is_wrapped_and_results_come_back(calls, tokenizer):
    model = add_adapter(make_model())
    results = run_harness(model, tokenizer, "arc_easy, piqa", limit=5, num_fewshot=2, batch_size=3, seed=9)
    assert results == {"arc_easy": {"acc,none": 0.5}, "piqa": {"acc,none": 0.5}}
    assert calls[0]["model"].pretrained is model
    assert calls[0]["model"].tokenizer is tokenizer
    assert (calls[0]["limit"], calls[0]["num_fewshot"], calls[0]["random_seed"]) == (5, 2, 9)


def test_without_the_package_the_error_says_how_to_get_it(monkeypatch, tokenizer):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ConfigError, match=r"pip install 'monkeyjump\[harness\]'"):
        run_harness(make_model(), tokenizer, ["piqa"])


@pytest.mark.parametrize("granularity", ["sequence", "task"])
def test_adapters_the_harness_cannot_serve(calls, tokenizer, granularity):
    with pytest.raises(ConfigError, match=f"granularity='{granularity}'"):
        run_harness(add_adapter(make_model(), granularity=granularity), tokenizer, ["piqa"])
    assert calls == []
