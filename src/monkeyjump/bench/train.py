"""`monkeyjump train` from its start to its end, with PEFT's LoRA in the same recipe, data and Trainer.

Every turn is a process of its own. In the mode `cold` its compilers find empty caches, in `warm` those that the cold
turn has filled. Weights are random; texts are those of real tasks, or made up.

| variant | |
|---|---|
| `mjlora`, or another method | as the command trains it by default |
| `mjlora+plain` | with `fast=false` |
| `peft-lora` | PEFT's layers, eager, with the fused loss |
| `peft-lora+fast` | the same layers inside `monkeyjump.fast` |
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from monkeyjump.bench.results import bytes_in_words, milliseconds, output_folder, ratio
from monkeyjump.bench.settings import Settings
from monkeyjump.bench.turns import LOG_TAIL, Measurement, Row
from monkeyjump.bench.variants import PEFT_LORA, plain_model, variant_names

FAST, PLAIN = "+fast", "+plain"
TITLE = "Bench train, {shape}, {batch} texts of up to {tokens} tokens, {steps} steps"
COLUMNS = [
    ("variant", "variant", str),
    ("steps/s", "median_ms", lambda value: f"{1e3 / value:.1f}"),
    ("ms", "median_ms", milliseconds),
    ("/peft", "time_vs_peft", ratio),
    ("first step", "each", lambda each: f"{median(turn['first_step_s'] for turn in each):.1f} s"),
    ("wall", "each", lambda each: f"{median(turn['wall_s'] for turn in each):.1f} s"),
    ("memory", "peak_bytes", bytes_in_words),
]


def variants(words: tuple[str, ...], alone: bool) -> list[str]:
    """The variants of a command line; PEFT's LoRA in both forms comes first."""
    asked = [*words] if alone else [PEFT_LORA, PEFT_LORA + FAST, *words]
    variant_names([word.removesuffix(FAST).removesuffix(PLAIN) for word in asked], alone=True)
    return list(dict.fromkeys(asked))


def measurements(settings: Settings) -> list[Measurement]:
    folder = output_folder(settings)
    _save_model(settings, folder / "model")
    return [Measurement(TrainRun, name, settings) for name in settings.methods]


def _save_model(settings: Settings, folder: Path) -> None:
    from monkeyjump.models import load_tokenizer

    tokenizer = load_tokenizer(settings.tokenizer)
    model = plain_model(settings)
    if model.config.vocab_size < len(tokenizer):
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


class TrainRun:
    """One variant: every row is another process."""

    def __init__(self, variant: str, settings: Settings) -> None:
        self.variant, self.settings = variant, settings
        self.folder = output_folder(settings) / variant

    def warm_up(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)

    def row(self, mode: str) -> Row:
        caches = {"TORCHINDUCTOR_CACHE_DIR": self.folder / "inductor", "TRITON_CACHE_DIR": self.folder / "triton"}
        caches["MONKEYJUMP_CACHE"] = self.folder / "cache"
        if mode == "cold":
            for cache in caches.values():
                shutil.rmtree(cache, ignore_errors=True)
        environment = os.environ | {name: str(path.resolve()) for name, path in caches.items()}
        output, log = self.folder / "result.json", self.folder / f"{mode}.log"
        output.unlink(missing_ok=True)
        order = {"recipe": self._recipe(), "variant": self.variant, "started": time.time(), "output": str(output)}
        with log.open("a") as file:
            command = [sys.executable, "-m", "monkeyjump.bench.train_process", json.dumps(order)]
            done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environment, check=False)
        if done.returncode or not output.exists():
            raise RuntimeError(f"training failed, see {log}: {log.read_text()[-LOG_TAIL:]}")
        found = json.loads(output.read_text())
        return {
            "status": "ok",
            "median_ms": found["step_ms"],
            "times_ms": [found["step_ms"]],
            "peak_bytes": found.pop("peak_bytes"),
            "each": [found],
        }

    def _recipe(self) -> dict[str, Any]:
        settings, method = self.settings, self.variant.removesuffix(FAST).removesuffix(PLAIN)
        on_gpu = settings.device.startswith("cuda")
        slow = self.variant == PEFT_LORA or self.variant.endswith(PLAIN)
        adapter = {"target_modules": list(settings.targets), "dropout": settings.dropout}
        if settings.rank is not None:
            adapter |= {"r": settings.rank, "alpha": 2.5 * settings.rank}
        train: dict[str, Any] = {
            "batch_size": settings.batch,
            "accumulation": 1,
            "max_steps": settings.steps,
            "log_steps": 10,
        }
        train |= {"eval_steps": settings.steps, "fused_loss": "torch" if on_gpu else "auto"}
        data = {"folder": settings.data, "max_length": settings.tokens, "packing": settings.packing, "validation": 8}
        return {
            "model": str(output_folder(settings) / "model"),
            "method": "lora" if method == PEFT_LORA else method,
            "adapter": adapter,
            "tasks": list(settings.tasks),
            "data": data,
            "train": train,
            "evaluate": {"validation_limit": 8},
            "fast": False if slow else "auto",
            "seed": settings.seed,
            "output": str(self.folder / "run"),
        }
