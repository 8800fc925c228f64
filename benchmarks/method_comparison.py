"""A run in the format of PEFT's method comparison: `run_info`, `train_info` and `meta_info` in one JSON file.

    python benchmarks/method_comparison.py mjlora --experiment llama-3.2-3B-rank2 --output results \\
        model=meta-llama/Llama-3.2-3B tasks=metamath.yaml train.max_steps=5000 train.eval_steps=250

The settings on top are those of a recipe. The file is named as PEFT names it, `METHOD--EXPERIMENT.json`. Keys and units
are those of `method_comparison/MetaMathQA`; the task, its prompt and how answers are compared are ours, so a score
stands beside PEFT's only where the task file asks and compares as theirs does. Memory is 0 where there is no GPU.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from monkeyjump.errors import ConfigError
from monkeyjump.record import jsonable, write_atomic
from monkeyjump.training.recipe import Recipe, load_recipe
from monkeyjump.training.run import RunResult, run
from monkeyjump.training.shared import Shared, dtype_of

PACKAGES = ("transformers", "peft", "datasets", "bitsandbytes", "torch", "monkeyjump")


class Recorder(TrainerCallback):
    """What PEFT's suite notes at every validation: losses, tokens, times and memory since the last one."""

    def __init__(self, samples_per_step: int) -> None:
        self.samples_per_step = samples_per_step
        self.metrics: list[dict[str, Any]] = []
        self.reserved: list[int] = []
        self.tokens: Any = 0
        self._allocated: list[int] = []
        self._seen = (0, 0, 0)  # places in the lists, and tokens, at the last validation
        self._last_loss = float("nan")

    def on_train_begin(self, args, state, control, model=None, **kwargs) -> None:
        self.started = self._since = self._stepped = time.perf_counter()
        self._hook = model.register_forward_pre_hook(self._count, with_kwargs=True)

    def on_train_end(self, args, state, control, **kwargs) -> None:
        self._hook.remove()
        self.tokens = int(self.tokens)

    def _count(self, model: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        if model.training and kwargs.get("input_ids") is not None:
            mask = kwargs.get("attention_mask")
            self.tokens = self.tokens + (kwargs["input_ids"].numel() if mask is None else mask.sum())  # no wait

    def on_step_end(self, args, state, control, **kwargs) -> None:
        gpu = torch.cuda.is_available()
        self.reserved.append(torch.cuda.memory_reserved() if gpu else 0)
        self._allocated.append(torch.cuda.memory_allocated() if gpu else 0)
        self._stepped = time.perf_counter()

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        self._last_loss = (logs or {}).get("loss", self._last_loss)

    def on_evaluate(self, args, state, control, metrics=None, **kwargs) -> None:
        now, (reserved, allocated, tokens) = time.perf_counter(), self._seen
        seconds = self._stepped - self._since
        self.metrics.append(
            {
                "step": state.global_step,
                "valid accuracy": (metrics or {}).get("eval_mean"),
                "train loss": self._last_loss,
                "train samples": state.global_step * self.samples_per_step,
                "train time": seconds,
                "eval time": now - self._stepped,
                "tokens / sec": int(self.tokens - tokens) / seconds if seconds > 0 else None,
                "mem allocated avg": _mean(self._allocated[allocated:]),
                "mem reserved avg": _mean(self.reserved[reserved:]),
                "elapsed time": now - self.started,
            }
        )
        self._since, self._seen = now, (len(self.reserved), len(self._allocated), int(self.tokens))


def compared(recipe: Recipe, experiment: str, overwrite: bool = False) -> dict[str, Any]:
    """Train and test a recipe; the record of it. A run that fails or is interrupted is a record, too."""
    started, clock = datetime.now(UTC).replace(microsecond=0).isoformat(), time.perf_counter()
    shared, recorder = Shared(), Recorder(recipe.train.batch_size * recipe.train.accumulation)
    shared.callbacks = [recorder]
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    result, error = None, ""
    try:
        result = run(recipe, shared=shared, overwrite=overwrite)
    except ConfigError:
        raise
    except Exception as failure:  # the suite keeps failed runs, with the reason
        error = f"{type(failure).__name__}: {failure}"
    total = time.perf_counter() - clock
    return {
        "run_info": _run_info(recipe, result, experiment, started, total, error),
        "train_info": _train_info(recipe, result, recorder, error),
        "meta_info": _meta_info(result),
    }


def _run_info(
    recipe: Recipe, result: RunResult | None, experiment: str, started: str, total: float, error: str
) -> dict[str, Any]:
    train = recipe.train
    model: Any = None if result is None else result.model
    return {
        "created_at": started,
        "total_time": total,
        "experiment_name": f"{recipe.method}/{experiment}",
        "peft_branch": f"v{metadata.version('peft')}",
        "train_config": {
            "model_id": recipe.model,
            "dtype": str(dtype_of(recipe)).removeprefix("torch."),
            "max_seq_length": recipe.data.max_length,
            "batch_size": train.batch_size * train.accumulation,
            "batch_size_eval": None,  # evaluation here fills batches by tokens
            "max_steps": train.max_steps or (result.measurements["steps"] if result else None),
            "eval_steps": train.eval_steps,
            "compile": bool(train.compile),
            "use_gc": train.gradient_checkpointing,
            "query_template": "{query}",  # prompts are those of the tasks
            "seed": recipe.seed,
            "grad_norm_clip": train.max_grad_norm,
            "optimizer_type": "AdamW",
            "optimizer_kwargs": {"lr": train.lr, "weight_decay": train.weight_decay},
            "lr_scheduler": train.schedule,
            "use_amp": False,
            "autocast_adapter_dtype": True,
            "generation_kwargs": {},
            "attn_implementation": None,
            "init_kv_cache_prefix": None,
        },
        "peft_config": None if model is None else model.peft_config["default"].to_dict(),
        "error_msg": error,
    }


def _train_info(recipe: Recipe, result: RunResult | None, recorder: Recorder, error: str) -> dict[str, Any]:
    weights = recipe.folder / "adapter" / "adapter_model.safetensors"
    metrics = list(recorder.metrics)
    status = "failed" if result is None else "canceled" if result.interrupted else "success"
    if result is not None and result.report is not None:
        last = {"train loss": recorder._last_loss, "train samples": metrics[-1]["train samples"] if metrics else 0}
        score = {"step": result.measurements["steps"], "test accuracy": result.report.mean, **last}
        metrics.append({**score, "train total tokens": recorder.tokens})
    ordered = sorted(recorder.reserved)
    return {
        "accelerator_memory_reserved_avg": int(_mean(ordered)),
        "accelerator_memory_max": torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0,
        "accelerator_memory_reserved_99th": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))] if ordered else 0,
        "train_time": sum(entry.get("train time", 0.0) for entry in metrics),
        "file_size": weights.stat().st_size if result is not None and weights.is_file() else 0,
        "num_trainable_params": result.parameters.trainable if result else 0,
        "num_total_params": result.parameters.total if result else 0,
        "status": status,
        "metrics": metrics,
    }


def _meta_info(result: RunResult | None) -> dict[str, Any]:
    origin = result.origin if result and result.origin else {"base": {"revision": None}, "data": []}
    gpu = torch.cuda.is_available()
    return {
        "model_info": {"sha": origin["base"]["revision"], "created_at": None},
        "dataset_info": {
            f"{entry['task']}/{entry['split']}": {"sha": entry.get("sha256"), "created_at": None}
            for entry in origin["data"]
        },
        "package_info": {
            key: value
            for name in PACKAGES
            for key, value in ((f"{name}-version", _version(name)), (f"{name}-commit-hash", None))
        },
        "system_info": {
            **{name: getattr(platform, name)() for name in ("system", "release", "version", "machine", "processor")},
            "accelerator": torch.cuda.get_device_name(0) if gpu else "N/A",
        },
        "pytorch_info": torch.__config__.show(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _mean(values: list[int]) -> float:
    return sum(values) / len(values) if values else 0.0


def main(argv: list[str] | None = None) -> int:
    import json

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", help="one of `monkeyjump methods`")
    parser.add_argument("--recipe", default="quickstart", help="a recipe by name, or a YAML file (quickstart)")
    parser.add_argument("--experiment", default="default", help="what PEFT calls the variant of a method")
    parser.add_argument("--output", default="method_comparison_results", help="folder of the results")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier run in the recipe's folder")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the recipe")
    options = parser.parse_intermixed_args(argv)
    recipe = load_recipe(options.recipe, [*options.overrides, f"method={options.method}"])
    record = compared(recipe, options.experiment, options.overwrite)
    path = Path(options.output) / f"{options.method}--{options.experiment}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(jsonable(record), indent=2) + "\n")
    print(f"saved       {path}: {record['train_info']['status']}")
    return 0 if record["train_info"]["status"] == "success" else 1


if __name__ == "__main__":
    sys.exit(main())
