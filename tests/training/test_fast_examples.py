"""The examples of docs/speed.md are run as they stand there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainingArguments

from monkeyjump.training import compile as compiling
from monkeyjump.training.fast import FastSettings
from tests import replay
from tests.helpers import adapted, lm_batch, settled
from tests.tiny_folder import save_tiny_model

PAGE = (Path(__file__).parents[2] / "docs" / "speed.md").read_text(encoding="utf-8")
LOOP, TRAINER, SFT = re.findall(
    r"^```python\n(.*?)^```", PAGE.split("### In your own loop")[1].split("### What is captured")[0], re.M | re.S
)


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is switched on, with a stand-in for CUDA graphs and a compiler that generates no code."""
    monkeypatch.setattr(compiling, "BACKEND", "eager")
    monkeypatch.setattr("monkeyjump.training.fast.captured", replay.replaying)
    on = FastSettings.on
    monkeypatch.setattr(FastSettings, "on", lambda self, gpu: on(self, True))


def test_a_loop(capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for code in (LOOP, LOOP.replace("with mj.fast(model, pads_last=True)", "if True")):
        model = adapted(ema_interval=2).train()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        batches = [lm_batch(2, 8, seed=n) for n in range(5)]
        exec(code, {"model": model, "optimizer": optimizer, "batches": batches})
        found.append(settled(model))
    for name, tensor in found[0].items():
        torch.testing.assert_close(tensor, found[1][name], atol=1e-4, rtol=1e-4, msg=name)
    assert "4 forwards replayed from 1 CUDA graph" in capsys.readouterr().out


def test_a_trainer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {name: tensor[0] for name, tensor in lm_batch(1, 8).items()}
    settings = {"max_steps": 4, "per_device_train_batch_size": 2, "report_to": "none", "use_cpu": True}
    arguments = TrainingArguments(str(tmp_path), save_strategy="no", **settings)  # type: ignore[arg-type]
    exec(TRAINER, {"model": adapted(init_tokens=20), "arguments": arguments, "rows": [row] * 16})
    assert "3 forwards replayed from 1 CUDA graph" in capsys.readouterr().out


def test_trl_with_lora_of_peft(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from monkeyjump.models import load_model

    datasets = pytest.importorskip("datasets")
    pytest.importorskip("trl")
    base, tokenizer = load_model(str(save_tiny_model(tmp_path / "tiny")))
    given: dict[str, Any] = {"base_model": base, "tokenizer": tokenizer, "folder": str(tmp_path / "run")}
    given["texts"] = datasets.Dataset.from_list([{"text": "one two three four five six"}] * 32)
    given["machine"] = {"use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no"}
    exec(SFT, given)
    assert "3 forwards replayed from 1 CUDA graph" in capsys.readouterr().out
    assert type(given["model"].base_model.model.model.layers[0].self_attn.q_proj).__name__ == "Linear"
