"""Where the time of one run of a grid goes: its parts, and how long the GPU works in a step.

    python benchmarks/cell_time.py text14-study --data DIR --output cell_time.json data.cap=400

Three runs of the recipe with other seeds, one after another in one process, as a worker of `monkeyjump compare` makes
them. The first compiles. Of the last, fifteen steps are profiled: `kernel_ms` is the time of all kernels of a step, and
what is left of `step_ms`, which is that of the second run, is time in which the GPU waits for the host.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import wraps
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from torch.profiler import ProfilerActivity, profile
from transformers import TrainerCallback

from monkeyjump.experiments import compare
from monkeyjump.training import callbacks, run, trainer
from monkeyjump.training.recipe import load_recipe
from monkeyjump.training.recorded import Recorded
from monkeyjump.training.shared import Shared

PARTS: list[tuple[Any, tuple[str, ...]]] = [
    (run, ("look_at", "get_peft_model", "training_data", "_validate", "save_adapter", "score_on_test")),
    (callbacks, ("initialize_centers",)),
    (trainer.TaskTrainer, ("train", "_save_checkpoint", "_load_best_model")),
    (Recorded, ("prepare", "record")),
    (compare, ("mean_gate",)),
    (Shared, ("take", "give_back")),
]
PROFILED = 15  # steps


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Clock:
    """Seconds of the parts of a run; some lie within others."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        for owner, names in PARTS:
            for name in names:
                setattr(owner, name, self._timed(getattr(owner, name), name))

    def _timed(self, work: Callable[..., Any], name: str) -> Callable[..., Any]:
        @wraps(work)
        def timed(*args: Any, **kwargs: Any) -> Any:
            wait()
            started = time.perf_counter()
            try:
                return work(*args, **kwargs)
            finally:
                wait()
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

        return timed


class Steps(TrainerCallback):
    """When steps begin, and the kernels of fifteen of them in a run that is to be profiled."""

    def __init__(self) -> None:
        self.began: list[float] = []
        self.first: int | None = None
        self.kernels: Counter[str] = Counter()

    def on_step_begin(self, args, state, control, **kwargs):
        self.began.append(time.perf_counter())
        if self.first is None or state.global_step not in (self.first, self.first + PROFILED):
            return
        wait()
        if state.global_step == self.first:
            self._profile = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
            self._profile.__enter__()
        else:
            self._profile.__exit__(None, None, None)
            for event in self._profile.events():
                if event.device_type == torch.autograd.DeviceType.CUDA:
                    self.kernels[event.name] += event.time_range.elapsed_us()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--data", help="folder of the tasks' files")
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--output", default="cell_time.json")
    options = parser.parse_intermixed_args()
    clock, steps, shared = Clock(), Steps(), Shared()
    shared.callbacks.append(steps)
    given = [*options.overrides, *([f"data.folder={options.data}"] if options.data else [])]
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(3):
            clock.seconds, steps.began = {}, []
            steps.first = max(0, options.steps - PROFILED - 5) if seed == 2 else None
            own = [f"seed={seed}", f"train.max_steps={options.steps}", f"output={folder}/{seed}"]
            started = time.perf_counter()
            record = compare.make_cell(load_recipe(options.recipe, [*given, *own]), True, shared)
            seconds = {"whole": time.perf_counter() - started, **clock.seconds}
            later = steps.began[len(steps.began) // 3 :]
            step = 1e3 * median(after - before for before, after in pairwise(later))
            told = ("compile_seconds", "captured_graphs", "replayed", "mean")
            found = {name: record.metrics.get(name) for name in told}
            runs.append({"step_ms": step, "seconds": seconds, **found})
            print(f"run {seed}: a step takes {step:.1f} ms;", {name: round(s, 2) for name, s in seconds.items()})
    kernels = {name: microseconds / PROFILED / 1e3 for name, microseconds in steps.kernels.most_common()}
    print(f"kernels of a step take {sum(kernels.values()):.1f} ms")
    for name, milliseconds in list(kernels.items())[:25]:
        print(f"  {milliseconds:7.3f} ms  {name[:90]}")
    record_of = {
        "recipe": options.recipe,
        "overrides": options.overrides,
        "runs": runs,
        "step_ms": runs[1]["step_ms"],
        "kernel_ms": sum(kernels.values()),
        "kernels": dict(list(kernels.items())[:60]),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    Path(options.output).write_text(json.dumps(record_of, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
