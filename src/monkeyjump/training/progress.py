"""What a person and a log file see of a running training, and how it is stopped without losing anything."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm
from transformers import TrainerCallback

from monkeyjump.record import write_atomic


def is_main_rank() -> bool:
    """Whether this process is the one that speaks; launchers of several number them in the environment."""
    return os.environ.get("RANK", "0") == "0"


def say(text: str) -> None:
    """Print on the main rank alone."""
    if is_main_rank():
        print(text)


BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"  # all of it fits on 80 columns
SEEN = {"even": "router/load_entropy", "dead": "router/dead_experts", "drift": "router/center_drift"}


class ProgressBar(TrainerCallback):
    """One bar for the steps, with the loss and the state of the routing beside it; a line for every evaluation.

    `even` is the mean entropy of the loads (1: all experts of a block get the same), `dead` counts experts without a
    token, `drift` is how far centres have turned since the start (1 minus the cosine). Zeros are not shown.
    """

    def on_train_begin(self, args, state, control, **kwargs):
        done, others = state.global_step, not state.is_world_process_zero
        self.bar: Any = tqdm(total=state.max_steps, initial=done, desc="training", bar_format=BAR, disable=others)

    def on_step_end(self, args, state, control, **kwargs):
        self.bar.update(state.global_step - self.bar.n)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "loss" in logs:
            seen = [f"{word} {logs[key]:.2g}" for word, key in SEEN.items() if logs.get(key)]
            self.bar.set_postfix_str(", ".join([f"loss {float(logs['loss']):.3f}", *seen]))

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        if state.is_world_process_zero and metrics and "eval_mean" in metrics:
            tqdm.write(f"step {state.global_step}: mean validation metric {100 * metrics['eval_mean']:.1f}")

    def on_train_end(self, args, state, control, **kwargs):
        self.bar.close()


class JsonLines(TrainerCallback):
    """Appends every log of the Trainer to a file, one JSON object a line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and logs:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": state.global_step, "epoch": state.epoch, **logs}) + "\n")


def forget_after(path: Path, step: int) -> None:
    """Drop what was logged after a checkpoint, for its steps come again. A killed process may leave half a line."""
    kept = ""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
        try:
            kept += f"{line}\n" if json.loads(line)["step"] <= step else ""
        except (ValueError, LookupError, TypeError):
            continue
    write_atomic(path, kept)


class Interruptible(TrainerCallback):
    """Ctrl-C or SIGTERM: finish the step, write a checkpoint, stop. A second signal stops at once."""

    def __init__(self) -> None:
        self.interrupted = False
        self._previous: dict[int, Any] = {}

    def on_train_begin(self, args, state, control, **kwargs):
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._on_signal)

    def on_step_end(self, args, state, control, **kwargs):
        if self.interrupted:
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False

    def restore(self) -> None:
        """Give the signals back, once training has ended in whatever way."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _on_signal(self, number: int, frame: Any) -> None:
        if self.interrupted:
            self.restore()
            raise KeyboardInterrupt
        self.interrupted = True
        if is_main_rank():
            tqdm.write("stopping after this step; a checkpoint will be written (again to stop at once)")
