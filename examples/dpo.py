"""Preference training with TRL: the base model, adapters switched off, is the reference, so there is no second model.

python examples/dpo.py --steps 40 --output dpo-adapter
"""

from __future__ import annotations

import argparse

import torch
from datasets import Dataset
from trl import DPOConfig, DPOTrainer

import monkeyjump as mj
from monkeyjump.models import load_model

PREFERENCES = [
    ("Say hello.", " Hello, nice to meet you!", " What do you want?"),
    ("Thank somebody.", " Thank you very much!", " Finally."),
    ("Ask for water.", " Could I have some water, please?", " Water. Now."),
]


def main(argv: list[str] | None = None) -> DPOTrainer:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a bundled name, a folder or an id of the hub")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--output", default="dpo-adapter")
    options = parser.parse_args(argv)

    model, tokenizer = load_model(options.model)
    rows = [{"prompt": prompt, "chosen": good, "rejected": bad} for prompt, good, bad in PREFERENCES] * 16
    trainer = DPOTrainer(
        model,
        args=DPOConfig(
            options.output,
            max_steps=options.steps,
            learning_rate=1e-3,
            max_length=64,
            per_device_train_batch_size=4,
            bf16=torch.cuda.is_available(),
            logging_steps=5,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=mj.MonkeyJumpConfig(init_tokens=200, task_type="CAUSAL_LM"),
        callbacks=[mj.MonkeyJumpCallback()],
    )
    trainer.train()
    trainer.save_model(options.output)
    return trainer


if __name__ == "__main__":
    main()
