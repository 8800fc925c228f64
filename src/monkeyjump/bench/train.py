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
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from monkeyjump.first_imports import uncollected

with uncollected():  # as the command does
    import torch
    from peft import get_peft_model
    from transformers import TrainerCallback

    from monkeyjump.bench.results import bytes_in_words, milliseconds, ratio
    from monkeyjump.bench.settings import Settings
    from monkeyjump.bench.turns import LOG_TAIL, Measurement, Row
    from monkeyjump.bench.variants import PEFT_LORA, adapter_settings, peft_lora, plain_model, variant_names
    from monkeyjump.models import load_tokenizer
    from monkeyjump.training import run as running
    from monkeyjump.training.recipe import Recipe, recipe_from

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
    """The variants, for which a model with a tokenizer is saved beside the record."""
    tokenizer, model = load_tokenizer(settings.tokenizer), plain_model(settings)
    if model.config.vocab_size < len(tokenizer):
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.config.pad_token_id = tokenizer.pad_token_id
    for part in (model, tokenizer):
        part.save_pretrained(settings.folder / "model")
    return [Measurement(TrainRun, name, settings) for name in settings.methods]


class TrainRun:
    """One variant: every row is another process."""

    def __init__(self, variant: str, settings: Settings) -> None:
        self.variant, self.settings = variant, settings
        self.folder = settings.folder / variant

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
        train: dict[str, Any] = {
            "batch_size": settings.batch,
            "accumulation": 1,
            "max_steps": settings.steps,
            "log_steps": 10,
        }
        train |= {"eval_steps": settings.steps, "fused_loss": "torch" if on_gpu else "auto"}
        data = {"folder": settings.data, "max_length": settings.tokens, "packing": settings.packing, "validation": 8}
        return {
            "model": str(settings.folder / "model"),
            "method": "lora" if method == PEFT_LORA else method,
            "adapter": adapter_settings(settings),
            "tasks": list(settings.tasks),
            "data": data,
            "train": train,
            "evaluate": {"validation_limit": 8},
            "fast": False if slow else "auto",
            "seed": settings.seed,
            "output": str(self.folder / "run"),
        }


# -- the process of one turn: it trains as `monkeyjump train` does and says when what was reached --


class Clock(TrainerCallback):
    """When what was reached, in seconds since the process was asked for.

    In a Trainer it waits for the device at the first and the last step, and once in the middle.
    """

    def __init__(self, started: float) -> None:
        self.started = started
        self.reached: dict[str, float] = {}

    def reach(self, name: str) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.reached[name] = round(time.time() - self.started, 3)

    def on_train_begin(self, args, state, control, **kwargs):
        self.reach("centres")  # it comes after the callback that places them

    def on_step_end(self, args, state, control, **kwargs):
        names = {1: "first step", state.max_steps // 2: "middle", state.max_steps: "last step"}
        if state.global_step in names:
            self.reach(names[state.global_step])


def main(order: dict[str, Any]) -> None:
    """Train as ordered, and write the result where it is wanted."""
    recipe, clock = recipe_from(order["recipe"]), Clock(order["started"])
    clock.reach("imported")
    with ExitStack() as stack:
        for name, stand_in in _stand_ins(recipe, clock, order["variant"]).items():
            stack.enter_context(patch.object(running, name, stand_in))
        result = running.run(recipe, overwrite=True, test=False)
    steps, reached = recipe.train.max_steps or 0, clock.reached
    found = {
        "step_ms": 1e3 * (reached["last step"] - reached["middle"]) / (steps - steps // 2),
        "first_step_s": reached["first step"],
        "wall_s": reached["last step"],
        "marks": reached,
        **{name: result.measurements.get(name) for name in ("final_loss", "compile_seconds", "graphs", "replayed")},
        "peak_bytes": result.measurements["peak_memory_bytes"],
    }
    Path(order["output"]).write_text(json.dumps(found))


def _stand_ins(recipe: Recipe, clock: Clock, variant: str) -> dict[str, Callable[..., Any]]:
    """What stands in for names of `training.run`: a clock around the data and in the Trainer, and PEFT's own LoRA."""
    make_data, make_trainer = running.training_data, running.TaskTrainer

    def data(*args: Any) -> Any:
        clock.reach("model")
        found = make_data(*args)
        clock.reach("data")
        return found

    def trainer(*args: Any) -> Any:
        made = make_trainer(*args)
        made.add_callback(clock)
        clock.reach("trainer")
        return made

    found: dict[str, Callable[..., Any]] = {"training_data": data, "TaskTrainer": trainer}
    if variant.startswith(PEFT_LORA):
        lora = peft_lora(recipe.adapter)
        found |= {
            "get_peft_model": lambda base, _: get_peft_model(base, lora),
            "MonkeyJumpCallback": lambda **_: TrainerCallback(),
            "save_adapter": lambda result, *_: result.model.save_pretrained(result.folder / "adapter"),
        }
    return found


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
