"""The process of one turn of `bench train`: it trains as `monkeyjump train` does and says when what was reached."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

from monkeyjump.first_imports import uncollected
from monkeyjump.training.recipe import Recipe, recipe_from

with uncollected():  # as the command does
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import TrainerCallback

    from monkeyjump.bench.variants import PEFT_LORA
    from monkeyjump.training import run as running


class Marks:
    """When what was reached, in seconds since the process was asked for."""

    def __init__(self, started: float) -> None:
        self.started = started
        self.reached: dict[str, float] = {}

    def reach(self, name: str) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.reached[name] = round(time.time() - self.started, 3)


class Clock(TrainerCallback):
    """Waits for the device at the first and the last step, and once in the middle."""

    def __init__(self, marks: Marks) -> None:
        self.marks = marks

    def on_train_begin(self, args, state, control, **kwargs):
        self.marks.reach("centres")  # it comes after the callback that places them

    def on_step_end(self, args, state, control, **kwargs):
        names = {1: "first step", state.max_steps // 2: "middle", state.max_steps: "last step"}
        if state.global_step in names:
            self.marks.reach(names[state.global_step])


def main(order: dict[str, Any]) -> None:
    """Train as ordered, and write the result where it is wanted."""
    recipe, marks = recipe_from(order["recipe"]), Marks(order["started"])
    marks.reach("imported")
    with ExitStack() as stack:
        for name, stand_in in _stand_ins(recipe, marks, order["variant"]).items():
            stack.enter_context(patch.object(running, name, stand_in))
        result = running.run(recipe, overwrite=True, test=False)
    steps, reached = recipe.train.max_steps or 0, marks.reached
    found = {
        "step_ms": 1e3 * (reached["last step"] - reached["middle"]) / (steps - steps // 2),
        "first_step_s": reached["first step"],
        "wall_s": reached["last step"],
        "marks": reached,
        **{name: result.measurements.get(name) for name in ("final_loss", "compile_seconds", "graphs", "replayed")},
        "peak_bytes": result.measurements["peak_memory_bytes"],
    }
    Path(order["output"]).write_text(json.dumps(found))


def _stand_ins(recipe: Recipe, marks: Marks, variant: str) -> dict[str, Callable[..., Any]]:
    """What stands in for names of `training.run`: a clock around the data and in the Trainer, and PEFT's own LoRA."""
    make_data, make_trainer = running.training_data, running.TaskTrainer

    def data(*args: Any) -> Any:
        marks.reach("model")
        found = make_data(*args)
        marks.reach("data")
        return found

    def trainer(*args: Any) -> Any:
        made = make_trainer(*args)
        made.add_callback(Clock(marks))
        marks.reach("trainer")
        return made

    found: dict[str, Callable[..., Any]] = {"training_data": data, "TaskTrainer": trainer}
    if variant.startswith(PEFT_LORA):
        rank = recipe.adapter.get("r", 2)
        lora = LoraConfig(
            r=rank,
            lora_alpha=5 * rank / 2,
            lora_dropout=recipe.adapter["dropout"],
            target_modules=recipe.adapter["target_modules"],
            task_type="CAUSAL_LM",
        )
        found |= {
            "get_peft_model": lambda base, _: get_peft_model(base, lora),
            "MonkeyJumpCallback": lambda **_: TrainerCallback(),
            "save_adapter": lambda result, *_: result.model.save_pretrained(result.folder / "adapter"),
        }
    return found


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
