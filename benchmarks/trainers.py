"""Somebody's own script with Transformers' Trainer or TRL's SFTTrainer: PEFT's LoRA as it is, and `fast` around it.

    python benchmarks/trainers.py --output trainers.json            # on a GPU
    python benchmarks/trainers.py --trainer sft --shape tiny ...    # needs trl

Rows of 512 tokens with padding at the end, a model of random weights, AdamW, bf16. Variants take turns.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from statistics import median
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainerCallback, TrainingArguments

import monkeyjump as mj
from monkeyjump.bench.settings import Settings
from monkeyjump.bench.variants import plain_model

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj"]
VARIANTS = ("peft", "peft+fast", "mjlora+fast")


class Clock(TrainerCallback):
    """The time of the second half of the steps."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step in (state.max_steps // 2, state.max_steps):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.times = [*getattr(self, "times", []), time.perf_counter()]


def rows(vocabulary: int, tokens: int, number: int) -> list[dict[str, list[int]]]:
    """Texts that fill between half and all of their row; the loss is on the second half of each."""
    draw, found = random.Random(0), []
    for _ in range(number):
        length = draw.randint(tokens // 2, tokens)
        ids = [draw.randrange(vocabulary) for _ in range(length)]
        pads = tokens - length
        labels = [-100] * (length // 2) + ids[length // 2 :] + [-100] * pads
        found.append({"input_ids": ids + [0] * pads, "attention_mask": [1] * length + [0] * pads, "labels": labels})
    return found


def train(variant: str, options: argparse.Namespace) -> float:
    """Milliseconds of a step."""
    gpu = torch.cuda.is_available()
    shape = Settings(
        "step", device="cuda" if gpu else "cpu", dtype="bfloat16" if gpu else "float32", shape=options.shape
    )
    base = plain_model(shape)
    if variant.startswith("peft"):
        config: Any = LoraConfig(r=2, lora_alpha=5, lora_dropout=0.05, target_modules=TARGETS, task_type="CAUSAL_LM")
    else:
        config = mj.methods.build("mjlora", "mj_paper", target_modules=TARGETS, init_tokens=5000)
        config.task_type = "CAUSAL_LM"
    model = get_peft_model(base, config)
    clock = Clock()
    callbacks = [*([mj.MonkeyJumpCallback(fast=True, progress=False)] if "fast" in variant else []), clock]
    data = rows(base.config.vocab_size, options.tokens, options.batch * 8)
    arguments: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(),
        "max_steps": options.steps,
        "per_device_train_batch_size": options.batch,
        "learning_rate": 1e-4,
        "logging_steps": 10,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "use_cpu": not gpu,
        "bf16": False,  # the model is in bf16 already
    }
    trainer: Any
    if options.trainer == "trainer":
        collate = lambda items: {name: torch.tensor([item[name] for item in items]) for name in items[0]}  # noqa: E731
        trainer = Trainer(
            model, TrainingArguments(**arguments), train_dataset=data, callbacks=callbacks, data_collator=collate
        )
    else:
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

        from monkeyjump.models import load_tokenizer

        collate = lambda items: {name: torch.tensor([item[name] for item in items]) for name in items[0]}  # noqa: E731
        settings = SFTConfig(**arguments, dataset_kwargs={"skip_prepare_dataset": True}, max_length=options.tokens)
        trainer = SFTTrainer(
            model,
            settings,
            train_dataset=Dataset.from_list(data),
            callbacks=callbacks,
            data_collator=collate,
            processing_class=load_tokenizer(options.tokenizer),
        )
    trainer.train()
    middle, end = clock.times
    return 1e3 * (end - middle) / (options.steps - options.steps // 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainer", choices=("trainer", "sft"), default="trainer")
    parser.add_argument("--shape", default="qwen2-0.5b")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--tokenizer", default="smollm2-135m", help="SFTTrainer wants one; it tokenises nothing here")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--variants", nargs="+", default=VARIANTS)
    parser.add_argument("--output", default="trainers.json")
    options = parser.parse_args()
    times: dict[str, list[float]] = {variant: [] for variant in options.variants}
    for _ in range(options.turns):
        for variant in options.variants:
            times[variant].append(train(variant, options))
            print(f"{variant:14}{times[variant][-1]:9.1f} ms", flush=True)
    first = median(times[options.variants[0]])
    result = {
        variant: {"ms": median(found), "times_ms": found, "speed_vs_first": first / median(found)}
        for variant, found in times.items()
    }
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    with open(options.output, "w") as file:
        json.dump({"settings": vars(options), "device": device, "torch": torch.__version__, "rows": result}, file)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
