"""MoRE (Zhang et al., 2025): one LoRA per projection, of which each task uses the first ranks, as many as it chooses.

Rows are routed by `task_ids`; without them, outside training, by the nearest task embedding (a warning says so once).
Matched with the authors' code: one selector and one table of 8 task embeddings per projection, as wide as its input,
embeddings N(0, 0.01^2), rank i weighted by (i/r)^2 (`rank_scale="code"`), rank 8, alpha 32, dropout 0.1, the
contrastive task loss at temperature 0.05 and weight 0.1. Deliberately different:

- the selector trains: their straight-through branch is never reached, so each task keeps the rank it was born with;
- the weight of rank i follows r, where theirs is fixed to 8; one batch may mix tasks;
- the loss compares the mean over the prompt with the embeddings (`task_rep`), since the first token of a causal model
  has seen nothing; `task_rep="first"` is theirs. It is the mean over projections, where they divide by constants of T5;
- the sampling that balances datasets belongs to the data, not to the adapter.

`preset="mj_paper"`: the paper's targets, dropout and alpha / r, with four nested experts, that is rank 4.
"""

from __future__ import annotations

from typing import Any

from monkeyjump.methods.presets import METHODS, PAPER_TARGETS


def more(protocol: str) -> dict[str, Any]:
    settings: dict[str, Any] = {"adapter": "lora", "placement": "nested", "granularity": "task"}
    settings.update(tasks=8, rank_scale="code", task_rep="mean", contrastive_weight=0.1)
    if protocol == "mj_paper":
        return {**settings, "target_modules": list(PAPER_TARGETS), "r": 4, "alpha": 10.0}
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    return {**settings, "target_modules": targets, "r": 8, "alpha": 32.0, "dropout": 0.1}


METHODS.add("more", more)
