"""One Trainer run per adapter, and the rest of them all in a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import Trainer, TrainingArguments

import monkeyjump as mj
from tests.contract.common import state_of
from tests.helpers import ADAPTER_NAMES, lm_batch, mj_config, tiny_llama, wrap

STEPS = 7
SAVED = 3  # between two commits of the centres: statistics are staged, the counter is odd


def rows(count: int = 24, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    data = lm_batch(batch=count, seed=seed)
    return [{key: value[i] for key, value in data.items()} for i in range(count)]


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": 1,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 11,
        "dataloader_pin_memory": False,
        **changes,
    }
    return TrainingArguments(**settings)


def callback() -> mj.MonkeyJumpCallback:
    return mj.MonkeyJumpCallback(num_tokens=60, progress=False)


def model_for(adapter: str, **changes: Any) -> PeftModel:
    settings = {"center_init": "kmeans", "dropout": 0.2, **changes}
    if adapter == "adalora":
        settings = {"r": 4, "target_r": 2, "tinit": 1, "tfinal": 2, "total_step": STEPS, **settings}
    return wrap(tiny_llama(), mj_config(adapter=adapter, **settings))


def run(adapter: str, folder: Path, checkpoint: Path | None = None) -> dict[str, Any]:
    """Train; the final state of the adapter and the losses by step."""
    torch.manual_seed(3)  # the adapters' start; a resumed run replaces it
    model = model_for(adapter)
    trainer = Trainer(
        model=model,
        args=arguments(folder, save_strategy="steps", save_steps=SAVED),
        train_dataset=rows(),
        callbacks=[callback()],
    )
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    losses = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
    return {"state": state_of(model), "losses": losses}


def resume(_: int, out: Path, checkpoints: Path) -> None:
    """From the checkpoints on; what `run` gives for every adapter is written to `out`."""
    results = {
        adapter: run(adapter, out.parent / "resumed" / adapter, checkpoints / adapter / f"checkpoint-{SAVED}")
        for adapter in ADAPTER_NAMES
    }
    torch.save(results, out)
