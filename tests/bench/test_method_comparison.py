"""benchmarks/method_comparison.py writes what PEFT's method comparison reads."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_folder import save_tiny_model, write_recipe

MODULE = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "method_comparison.py"))
# the keys of a result of method_comparison/MetaMathQA in PEFT's repository
KEYS = {
    "run_info": "created_at error_msg experiment_name peft_branch peft_config total_time train_config",
    "train_info": "accelerator_memory_max accelerator_memory_reserved_99th accelerator_memory_reserved_avg file_size "
    "metrics num_total_params num_trainable_params status train_time",
    "meta_info": "dataset_info model_info package_info pytorch_info system_info",
}
TRAIN_CONFIG = (
    "attn_implementation autocast_adapter_dtype batch_size batch_size_eval compile dtype eval_steps generation_kwargs "
    "grad_norm_clip init_kv_cache_prefix lr_scheduler max_seq_length max_steps model_id optimizer_kwargs "
    "optimizer_type query_template seed use_amp use_gc"
)
METRICS = {
    *("step", "valid accuracy", "train loss", "train samples", "train time", "eval time", "tokens / sec"),
    *("mem allocated avg", "mem reserved avg", "elapsed time"),
}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write_recipe(tmp_path, save_tiny_model(tmp_path / "tiny"))


def written(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def test_a_run_has_the_keys_of_the_suite(recipe: Path, tmp_path: Path) -> None:
    command = ["mjlora", "--recipe", str(recipe), "--experiment", "tiny", "--output", str(tmp_path / "results")]
    assert MODULE["main"]([*command, f"output={tmp_path / 'run'}", "train.log_steps=1"]) == 0
    record = written(tmp_path / "results" / "mjlora--tiny.json")
    assert {part: " ".join(sorted(record[part])) for part in record} == KEYS
    assert " ".join(sorted(record["run_info"]["train_config"])) == TRAIN_CONFIG
    *validations, test = record["train_info"]["metrics"]
    assert [entry["step"] for entry in validations] == [4, 8]
    assert all(set(entry) == METRICS for entry in validations)
    assert test["step"] == 8
    assert test["train samples"] == 8 * 4
    assert 0 <= test["test accuracy"] <= 1
    report = written(tmp_path / "run" / "evaluation.json")
    assert test["test accuracy"] == pytest.approx(report["overall"]["adapter"])
    assert record["run_info"]["peft_config"]["peft_type"] == "MONKEYJUMP"
    assert record["train_info"]["status"] == "success"
    size = (tmp_path / "run" / "adapter" / "adapter_model.safetensors").stat().st_size
    assert record["train_info"]["file_size"] == size
    assert test["train total tokens"] > 0


def test_a_run_that_fails_is_a_record_too(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setitem(MODULE["compared"].__globals__, "run", fails)
    command = ["lora", "--recipe", str(recipe), "--output", str(tmp_path / "results")]
    assert MODULE["main"](command) == 1
    record = written(tmp_path / "results" / "lora--default.json")
    assert record["run_info"]["error_msg"] == "OutOfMemoryError: no room"
    assert record["train_info"]["status"] == "failed"
