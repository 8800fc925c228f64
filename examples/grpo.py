"""Reinforcement learning with TRL's GRPO: a reward for short answers, completions sampled from the routed model.

    python examples/grpo.py --steps 10 --output grpo-adapter

The trainer's batches are prompts that are not tokenised yet, so the centres are initialised from texts here.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from datasets import Dataset
from peft import get_peft_model
from trl import GRPOConfig, GRPOTrainer

import monkeyjump as mj
from monkeyjump.models import load_model

PROMPTS = ["The capital of France is", "Water boils at", "A dog is an", "The sun rises in the"]


def reward_short(completions: list[str], **kwargs: Any) -> list[float | None]:
    """The fewer characters the better."""
    return [-len(completion) / 100 for completion in completions]


def main(argv: list[str] | None = None) -> GRPOTrainer:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a bundled name, a folder or an id of the hub")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--output", default="grpo-adapter")
    options = parser.parse_args(argv)

    base, tokenizer = load_model(options.model)
    model = get_peft_model(base, mj.MonkeyJumpConfig(init_tokens=100, task_type="CAUSAL_LM"))
    texts = tokenizer(PROMPTS, return_tensors="pt", padding=True).to(base.device)
    inputs = {name: texts[name] for name in ("input_ids", "attention_mask")}
    mj.initialize_centers(model, [inputs] * 8)
    trainer = GRPOTrainer(
        model,
        reward_short,
        args=GRPOConfig(
            options.output,
            max_steps=options.steps,
            learning_rate=1e-3,
            num_generations=4,
            per_device_train_batch_size=4,
            max_completion_length=16,
            bf16=torch.cuda.is_available(),
            logging_steps=1,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS] * 8),
        processing_class=tokenizer,
        callbacks=[mj.MonkeyJumpCallback()],
    )
    trainer.train()
    trainer.save_model(options.output)
    return trainer


if __name__ == "__main__":
    main()
