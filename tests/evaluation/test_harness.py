"""The bridge to lm-evaluation-harness, against a stand-in for the package."""

from __future__ import annotations

import re
import sys
import types
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from monkeyjump.cli import evaluate
from monkeyjump.cli.main import main
from monkeyjump.errors import ConfigError
from monkeyjump.evaluation.harness import run_harness
from monkeyjump.models import load_model
from tests.evaluation.toys import add_adapter, make_model
from tests.helpers import adapted
from tests.tiny_folder import save_tiny_model


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


def test_the_model_is_wrapped_and_results_are_printed(calls, tokenizer, capsys):
    model = add_adapter(make_model())
    assert evaluate._harness(model, tokenizer, Namespace(tasks="arc_easy, piqa", limit=5)) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["arc_easy", "acc,none", "0.5000"],
        ["piqa", "acc,none", "0.5000"],
    ]
    assert calls[0]["model"].pretrained is model
    assert calls[0]["model"].tokenizer is tokenizer
    assert calls[0]["limit"] == 5


def test_without_the_package_the_error_says_how_to_get_it(monkeypatch, tokenizer):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ConfigError, match=r'pip install "monkeyjump\[harness\]"'):
        run_harness(make_model(), tokenizer, ["piqa"])


@pytest.mark.parametrize("granularity", ["sequence", "task"])
def test_adapters_the_harness_cannot_serve(calls, tokenizer, granularity):
    with pytest.raises(ConfigError, match=f"granularity='{granularity}'"):
        run_harness(add_adapter(make_model(), granularity=granularity), tokenizer, ["piqa"])
    assert calls == []


def test_a_task_of_the_page_is_run_by_the_harness(tmp_path, monkeypatch, capsys):
    """With the package itself, where it is installed."""
    pytest.importorskip("lm_eval")
    pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "evaluate.md").read_text(encoding="utf-8")
    code = dict(re.findall(r"^```(yaml|jsonl)\n(.*?)^```", page, re.M | re.S))
    Path("capitals.yaml").write_text(code["yaml"])
    Path("capitals.jsonl").write_text(code["jsonl"])
    base = save_tiny_model(tmp_path / "tiny")
    adapted(load_model(str(base))[0]).save_pretrained("adapter")
    command = ["evaluate", "adapter", "--base", str(base), "--harness", "--tasks", "capitals.yaml"]
    assert main(command) == 0
    assert re.search(r"capitals +acc,none +[01]\.\d+", capsys.readouterr().out)


def test_a_file_that_is_no_task(calls, tokenizer, tmp_path):
    with pytest.raises(ConfigError, match=r"missing\.yaml.*cannot be read"):
        run_harness(make_model(), tokenizer, [str(tmp_path / "missing.yaml")])
