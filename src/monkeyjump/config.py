"""MonkeyJumpConfig: every field, its help text and all validation of values.

What depends on the model (do the modules exist, are there enough of them to route) is checked in `tuner/placement.py`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from peft.config import PeftConfig

from monkeyjump.config_checks import (
    CENTER_INITS,
    GRANULARITIES,
    LEARNED_ROUTERS,
    SEQUENCE_TOKENS,
    SIMILARITIES,
    config_problems,
)
from monkeyjump.errors import ConfigError
from monkeyjump.peft_type import PEFT_TYPE
from monkeyjump.registry import ADAPTERS

MODEL_CARD_NOTE = """
## Loading this adapter

This adapter was made with [monkeyjump](https://pypi.org/project/monkeyjump/). Import it before loading, so that PEFT
knows the method (without it, PEFT stops with `KeyError: 'MONKEYJUMP'`):

```python
import monkeyjump
from peft import PeftModel

model = PeftModel.from_pretrained(base_model, "path/to/this/folder")
```

For a program you cannot edit: `python -m monkeyjump run -- PROGRAM ARGUMENTS`.
"""


def _help(text: str, default: Any) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class MonkeyJumpConfig(PeftConfig):
    """A flat, JSON-able configuration of one Monkey Jump adapter.

    The defaults are the paper's. Every projection named in `target_modules` gets one adapter; those in
    `shared_modules` are always on, the others are the experts that tokens are routed to, block by block.
    """

    adapter: str = _help(f"What one expert adds to one linear: {', '.join(ADAPTERS)}.", "lora")
    r: int = _help("Rank of the adapters (unused by propulsion).", 2)
    alpha: float = _help("Scale numerator: the delta is multiplied by alpha / r (unused by propulsion).", 5.0)
    dropout: float = _help("Dropout on the adapter's input (unused by propulsion).", 0.05)
    adapter_options: dict[str, Any] | None = _help(
        "Settings that only the chosen adapter has, e.g. {'d_initial': 0.1} for vera; see docs/adapters.md.", None
    )
    degree: int = _help("Propulsion: the output is scaled by p ** degree.", 15)
    target_modules: list[str] | str | None = _help(
        "Modules to adapt: names (suffix match), a regular expression, 'all-linear', or None for the model's default. "
        "Of the last two, what cannot be routed is always on.",
        None,
    )
    exclude_modules: list[str] | str | None = _help("Modules never to adapt, matched like target_modules.", None)
    shared_modules: list[str] | None = _help(
        "Targets that are always on, with gate 1. [] routes every target, and so does None beside a target_modules; "
        "with default targets None shares what the paper shares: o_proj and gate_proj on Llama-like models.",
        None,
    )
    router: str = _help(
        "centroid: tokens against centres (Monkey Jump); linear: a learned softmax; sigmoid: learned gates, each for "
        "itself (MoA). Controls: uniform, one constant gate; shuffled, the centroid gates of other tokens.",
        "centroid",
    )
    uniform_gate: float = _help("router='uniform': the gate of every routed projection.", 1.0)
    top_k: int | None = _help("How many experts a token jumps to; None, for learned routers: all of them.", 2)
    temperature: float = _help("Softmax temperature of the similarities.", 1.0)
    similarity: str = _help(f"Token against centre: {', '.join(SIMILARITIES)}.", "cosine")
    renormalize: bool = _help("Divide the kept gates by their sum (the paper does not).", False)
    mean_gate: float | None = _help(
        "router='centroid': scale each token's gates to this mean over the routed projections, which renormalises them "
        "too; 1 keeps the strength of an adapter trained without gates. None leaves them as they come.",
        None,
    )
    jitter: float = _help("Size of the noise on routing, in training only; see noise.", 0.0)
    noise: str = _help(
        "What jitter is: gaussian, the standard deviation of noise added to the logits; for learned routers also "
        "logit_mul and input_mul, logits or the router's input (MixLoRA) times a number in 1 - jitter .. 1 + jitter.",
        "gaussian",
    )
    granularity: str = _help(f"Who decides: {', '.join(GRANULARITIES)}.", "token")
    sequence_token: str = _help(
        f"granularity='sequence': the state that decides, one of {', '.join(SEQUENCE_TOKENS)}.", "prompt"
    )
    task_experts: list[int] | None = _help(
        "granularity='task': the routed projection (by position) of each task id; None: task i takes expert i mod E.",
        None,
    )
    route_space: str = _help(
        "raw (the paper), or centered: the mean token, estimated at initialisation, is subtracted first.", "raw"
    )
    center_init: str = _help(f"How centres start: {', '.join(CENTER_INITS)}.", "kmeans")
    init_tokens: int = _help("Tokens sampled for the initialisation of centres.", 50_000)
    ema_momentum: float = _help("Weight of the old centre in one update; in [0, 1).", 0.5)
    ema_interval: int = _help("Training forwards between two updates of the centres.", 2)
    ema_stop: int = _help("No update after this many training forwards; 0 keeps the centres where they start.", 5_000)
    ema_assign: str = _help(
        "Tokens that move a centre: all routed to it (topk), or those it is first for (top1).", "topk"
    )
    ema_space: str = _help(
        "normalized: centres and means live on L2-normalised tokens; raw: on the tokens as they are.", "normalized"
    )
    layers_to_transform: list[int] | int | None = _help("Blocks that get adapters; None = all.", None)
    layers_pattern: list[str] | str | None = _help(
        "Name of the block list, where layers_to_transform is ambiguous.", None
    )
    layers_to_route: list[int] | int | None = _help(
        "Blocks that route; the other adapted blocks are plain PEFT. None = all, [] = none.", None
    )
    placement: str = _help(
        "block: every routed projection is one expert (Monkey Jump); projection: N experts on each projection; ffn: N "
        "whole feed-forwards per block (MixLoRA); nested: the first ranks of one adapter, by task (MoRE).",
        "block",
    )
    experts: int | list[int] = _help(
        "placement='projection' or 'ffn': experts N; a list is spread over the blocks in equal parts (MoLA).", 4
    )
    share_A: bool = _help("placement='projection': all experts of a projection share one A (HydraLoRA).", False)  # noqa: N815
    router_scope: str = _help(
        "placement='projection', learned routers: one per projection, or one per block on the block's input.",
        "projection",
    )
    router_input: str = _help(
        "Learned router of a whole block: block, it reads the state that enters the block; norm, that state after the "
        "block's first norm (as MoA's Transformers code has it).",
        "block",
    )
    router_init: str = _help("Learned routers: normal (std 0.02) or kaiming (uniform, a = sqrt 5).", "normal")
    router_hidden: str | None = _help("router='sigmoid': None is linear with bias; swiglu has a layer of 4 E.", None)
    threshold: float | None = _help(
        "router='sigmoid': None keeps every expert; a number is G_max, an expert is kept where its gate reaches "
        "G_max * sigmoid(w x + c).",
        None,
    )
    threshold_grad: str = _help(
        "threshold: none (as published, it never learns), ste (straight-through), subtract (gate minus threshold).",
        "none",
    )
    extra_experts: list[str] | None = _help(
        "Learned router, placement='block': further experts of each block (MoA): parallel, a bottleneck beside the "
        "feed-forward; prompt, learned states that every query also attends to.",
        None,
    )
    parallel_width: int = _help("extra_experts 'parallel': width of the bottleneck.", 16)
    prompt_length: int = _help("extra_experts 'prompt': number of learned states.", 10)
    aux_loss_weight: float = _help("Weight of the load-balance loss of learned softmax routers.", 0.0)
    lb_norm: str = _help("Balance loss of an even load: switch, 1; mixtral, top_k.", "switch")
    lb_reduce: str = _help(
        "Balance over routers: mean or sum of their losses, or global: one loss on the load of all together.", "mean"
    )
    contrastive_weight: float = _help(
        "Weight of the contrastive loss: MoELoRA, between experts' outputs (our form); MoRE, between tasks.", 0.0
    )
    tasks: int = _help("placement='nested': how many tasks there are.", 8)
    task_width: int | None = _help(
        "placement='nested': width of a task embedding; None = the projection's input.", None
    )
    rank_scale: str = _help("placement='nested': weight of rank i of r: code, (i/r)^2; linear, i/r; none, 1.", "code")
    task_rep: str = _help(
        "placement='nested': the state that is compared with the task embeddings: mean of the prompt, its last token "
        "(prompt), or the first token (the authors' code).",
        "mean",
    )
    project_gradient: bool = _help(
        "LoRA-FA: train B by the step whose change of the weight is nearest to the full gradient (PEFT's LoRA-FA "
        "optimizer): its gradient becomes g (A A^T)^-1 / scale^2.",
        False,
    )
    modules_to_save: list[str] | None = _help("Further modules to train and save whole, e.g. a new head.", None)
    target_r: int | None = _help("AdaLoRA: average rank after allocation; None or r = no allocation.", None)
    tinit: int = _help("AdaLoRA: optimiser steps before the rank budget starts to shrink.", 0)
    tfinal: int = _help("AdaLoRA: last optimiser steps, with the budget at its target.", 0)
    deltaT: int = _help("AdaLoRA: optimiser steps between two allocations.", 1)  # noqa: N815  PEFT's own name
    beta1: float = _help("AdaLoRA: smoothing of the sensitivity.", 0.85)
    beta2: float = _help("AdaLoRA: smoothing of its uncertainty.", 0.85)
    total_step: int | None = _help("AdaLoRA: optimiser steps of the whole training; needed when target_r < r.", None)
    score_per_token: bool = _help(
        "AdaLoRA with several experts: score a rank by its diagonal entry's sensitivity per token that reached the "
        "expert, so that no expert loses its ranks for being rarely used.",
        False,
    )
    orth_reg_weight: float = _help("AdaLoRA: weight of the orthogonality loss.", 0.5)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = PEFT_TYPE
        for name in ("target_modules", "exclude_modules", "shared_modules", "modules_to_save", "experts"):
            value = getattr(self, name)
            if isinstance(value, (set, tuple, frozenset)):
                setattr(self, name, sorted(value) if isinstance(value, (set, frozenset)) else list(value))
        for name in ("layers_to_transform", "layers_to_route"):
            value = getattr(self, name)
            if value is not None:
                setattr(self, name, [value] if isinstance(value, int) else sorted(value))
        problems = config_problems(self)
        if problems:
            raise ConfigError(problems, title="invalid MonkeyJumpConfig")

    @property
    def scaling(self) -> float:
        return self.alpha / self.r

    @property
    def allocates_rank(self) -> bool:
        return self.adapter == "adalora" and self.target_r is not None and self.target_r < self.r

    @property
    def uses_centers(self) -> bool:
        return self.placement == "block" and self.router in ("centroid", "shuffled") and self.granularity != "task"

    @property
    def learns_router(self) -> bool:
        return self.placement != "nested" and self.router in LEARNED_ROUTERS

    def save_pretrained(self, save_directory: str, **kwargs: Any) -> None:
        """Save the configuration, and tell the reader of the model card which import loading needs."""
        super().save_pretrained(save_directory, **kwargs)
        # PEFT has written a card by now; Transformers' own `save_pretrained` writes none.
        with open(os.path.join(save_directory, "README.md"), "a+", encoding="utf-8") as card:
            card.seek(0)
            if "import monkeyjump" not in card.read():
                card.write(MODEL_CARD_NOTE)
