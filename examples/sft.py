"""Supervised fine-tuning with TRL: prompts and completions, the loss on the completions.

python examples/sft.py --steps 40 --output sft-adapter
"""

from __future__ import annotations

import argparse

import torch
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

import monkeyjump as mj
from monkeyjump.models import load_model

PAIRS = [("The opposite of hot is", " cold."), ("The opposite of big is", " small."), ("Two and two are", " four.")]


def main(argv: list[str] | None = None) -> SFTTrainer:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a bundled name, a folder or an id of the hub")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--output", default="sft-adapter")
    options = parser.parse_args(argv)

    model, tokenizer = load_model(options.model)
    rows = [{"prompt": prompt, "completion": completion} for prompt, completion in PAIRS] * 16
    trainer = SFTTrainer(
        model,
        SFTConfig(
            options.output,
            max_steps=options.steps,
            learning_rate=4e-3,
            max_length=64,
            bf16=torch.cuda.is_available(),
            logging_steps=5,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=mj.MonkeyJumpConfig(init_tokens=200, task_type="CAUSAL_LM"),
        callbacks=[mj.MonkeyJumpCallback()],  # k-means on the training data when training begins
    )
    trainer.train()
    trainer.save_model(options.output)
    return trainer


if __name__ == "__main__":
    main()
