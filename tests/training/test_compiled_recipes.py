"""Recipes that compile: an epoch has the losses of an uncompiled one, and as many graphs as were promised."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from monkeyjump.training.fast import FastSettings
from monkeyjump.training.recipe import load_recipe
from monkeyjump.training.run import RunResult, run
from tests.helpers import COMPILING
from tests.replay import replaying
from tests.tiny_folder import save_tiny_model, write_recipe

pytestmark = COMPILING


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return write_recipe(folder, save_tiny_model(folder / "tiny"))


EPOCH = (
    "train.max_steps=none", "train.epochs=1", "train.eval_steps=100", "train.save_steps=100",
    "adapter.dropout=0", "data.cap=11", 'adapter.target_modules=["q_proj", "k_proj", "o_proj"]',
    'adapter.shared_modules=["o_proj"]', "fast=false", "train.bf16=false",
)  # fmt: skip


CLOSE = 1e-3 if torch.cuda.is_available() else 1e-5
EVERYTHING = FastSettings("blocks", True, "torch", pads_last=True)


def trained(path: Path, output: Path, *overrides: str) -> tuple[RunResult, list[float]]:
    """An epoch of 22 texts, the last batch incomplete, and its losses step by step."""
    result = run(load_recipe(str(path), [f"output={output}", *EPOCH, *overrides]), test=False)
    logs = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    return result, [log["loss"] for log in logs if "loss" in log]


def test_a_compiled_recipe_trains_the_same(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected, losses = trained(recipe_file, tmp_path / "eager")
    assert len(losses) == 6
    assert "graphs" not in expected.measurements
    monkeypatch.setattr("monkeyjump.training.compile.BACKEND", "eager")
    for what, buckets, graphs in [("true", "[120, 128]", 1), ("model", "[128]", 1)]:
        settings = (f"train.compile={what}", f"data.buckets={buckets}", "train.fused_loss=torch")
        result, found = trained(recipe_file, tmp_path / what, *settings)
        assert found == pytest.approx(losses, rel=CLOSE)
        assert result.measurements["graphs"] == graphs
        assert result.measurements["fused_loss"] == "torch"
        assert 0 < result.measurements["compile_seconds"] < result.measurements["train_seconds"]
        said = capsys.readouterr().out
        assert f"{graphs} graph" in said
        assert "compiled in" in said
        assert all(part._compiled_call_impl is None for part in result.model.modules())


def test_packed_rows_compile_once(recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monkeyjump.training.compile.BACKEND", "eager")
    packed = ("data.packing=true", "data.max_length=128")
    _, losses = trained(recipe_file, tmp_path / "eager", *packed)
    result, found = trained(recipe_file, tmp_path / "model", *packed, "train.compile=model")
    assert len(losses) > 3
    assert found == pytest.approx(losses, rel=CLOSE)
    assert result.measurements["graphs"] == 1


def test_a_captured_recipe_trains_the_same(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With accumulation, packed and padded, and validated in between. A graph is here one that runs its work again."""
    for packing in ("true", "false"):
        settings = [f"data.packing={packing}", "train.accumulation=2", "train.epochs=3", "train.eval_steps=4"]
        settings += ["train.save_steps=4", "data.max_length=128", "data.buckets=[]"]
        _, losses = trained(recipe_file, tmp_path / f"eager-{packing}", *settings)
        with monkeypatch.context() as patched:
            patched.setattr("monkeyjump.training.compile.BACKEND", "eager")
            patched.setattr("monkeyjump.training.fast.captured", replaying)
            patched.setattr(FastSettings, "of_recipe", lambda *_: EVERYTHING)
            result, found = trained(recipe_file, tmp_path / f"fast-{packing}", *settings)
        assert found == pytest.approx(losses, rel=CLOSE)
        assert result.measurements["replayed"] > len(losses)
        assert result.measurements["attention"] == "monkeyjump_pads_last"
        assert "forwards replayed from" in capsys.readouterr().out
