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
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

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
            command = [sys.executable, "-m", "monkeyjump.bench.train", json.dumps(order)]
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
        train = {"batch_size": settings.batch, "accumulation": 1, "max_steps": settings.steps, "log_steps": 10}
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


# -- in the process that trains ------------------------------------------------------------------


def main(order: dict[str, Any]) -> None:
    """Train as ordered, and write down when what was reached."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import TrainerCallback

    from monkeyjump.training import run as running
    from monkeyjump.training.recipe import recipe_from

    recipe = recipe_from(order["recipe"])
    marks = {"imported": time.time()}

    def reached(name: str) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        marks[name] = time.time()

    class Clock(TrainerCallback):
        """Looks at the clock where it waits for the device anyway, and once in the middle."""

        def on_train_begin(self, args, state, control, **kwargs):
            reached("centres")  # it comes after the callback that places them

        def on_step_end(self, args, state, control, **kwargs):
            middle = state.max_steps // 2
            if state.global_step in (1, middle, state.max_steps):
                reached({1: "first step", middle: "middle"}.get(state.global_step, "last step"))

    def data(*args: Any) -> Any:
        reached("model")
        found = running_data(*args)
        reached("data")
        return found

    running_data = running.training_data
    with ExitStack() as stack:
        stack.enter_context(patch.object(running, "training_data", data))
        if order["variant"].startswith(PEFT_LORA):
            settings = recipe.adapter
            rank = settings.get("r", 2)
            lora = LoraConfig(
                r=rank,
                lora_alpha=5 * rank / 2,  # type: ignore[arg-type]
                lora_dropout=settings["dropout"],
                target_modules=settings["target_modules"],
                task_type="CAUSAL_LM",
            )
            for name, stand_in in {
                "get_peft_model": lambda base, _: get_peft_model(base, lora),
                "MonkeyJumpCallback": lambda **_: TrainerCallback(),
                "save_adapter": lambda result, *_: result.model.save_pretrained(result.folder / "adapter"),
            }.items():
                stack.enter_context(patch.object(running, name, stand_in))
        callbacks = running.TaskTrainer.__init__
        stack.enter_context(patch.object(running.TaskTrainer, "__init__", _with(callbacks, Clock)))
        result = running.run(recipe, overwrite=True, test=False)
    half = recipe.train.max_steps - recipe.train.max_steps // 2
    step = (marks["last step"] - marks["middle"]) / half
    peak = result.measurements["peak_memory_bytes"]
    found = {
        "step_ms": 1e3 * step,
        "first_step_s": marks["first step"] - order["started"],
        "wall_s": marks["last step"] - order["started"],
        "peak_bytes": peak,
        "marks": {name: round(mark - order["started"], 3) for name, mark in marks.items()},
        "final_loss": result.measurements["final_loss"],
        "fast": {name: result.measurements.get(name) for name in ("compile_seconds", "graphs", "replayed")},
    }
    Path(order["output"]).write_text(json.dumps(found))


def _with(init: Any, clock: Any) -> Any:
    def initialized(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.add_callback(clock)

    return initialized


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
