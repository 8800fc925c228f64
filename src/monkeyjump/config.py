"""MonkeyJumpConfig: every field, its help text and all validation of values.

What depends on the model (do the modules exist, are there enough of them to route) is checked in `tuner/placement.py`.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from typing import Any

from peft.config import PeftConfig

from monkeyjump.errors import ConfigError
from monkeyjump.peft_type import PEFT_TYPE
from monkeyjump.registry import did_you_mean

ADAPTERS = ("lora", "lora_fa", "adalora", "propulsion")
SIMILARITIES = ("cosine", "dot", "euclidean", "l1")
ROUTERS = ("centroid", "uniform")
GRANULARITIES = ("token", "sequence", "task")
SEQUENCE_TOKENS = ("prompt", "last", "mean", "max")
ROUTE_SPACES = ("raw", "centered")
CENTER_INITS = ("kmeans", "random", "random_normalized", "random_tokens")
EMA_ASSIGNS = ("topk", "top1")
EMA_SPACES = ("normalized", "raw")

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
    degree: int = _help("Propulsion: the output is scaled by p ** degree.", 15)
    target_modules: list[str] | str | None = _help(
        "Modules to adapt: names (suffix match), a regular expression, 'all-linear', or None for the model's default.",
        None,
    )
    exclude_modules: list[str] | str | None = _help("Modules never to adapt, matched like target_modules.", None)
    shared_modules: list[str] | None = _help(
        "Targets that are always on, with gate 1; None or [] routes every target.", None
    )
    router: str = _help(
        "centroid: tokens against centres (Monkey Jump); uniform: one constant gate, the control without routing.",
        "centroid",
    )
    uniform_gate: float = _help("router='uniform': the gate of every routed projection.", 1.0)
    top_k: int = _help("How many routed projections a token jumps to.", 2)
    temperature: float = _help("Softmax temperature of the similarities.", 1.0)
    similarity: str = _help(f"Token against centre: {', '.join(SIMILARITIES)}.", "cosine")
    renormalize: bool = _help("Divide the kept gates by their sum (the paper does not).", False)
    jitter: float = _help("Standard deviation of Gaussian noise on the routing logits, in training only.", 0.0)
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
    modules_to_save: list[str] | None = _help("Further modules to train and save whole, e.g. a new head.", None)
    target_r: int | None = _help("AdaLoRA: average rank after allocation; None or r = no allocation.", None)
    tinit: int = _help("AdaLoRA: optimiser steps before the rank budget starts to shrink.", 0)
    tfinal: int = _help("AdaLoRA: last optimiser steps, with the budget at its target.", 0)
    deltaT: int = _help("AdaLoRA: optimiser steps between two allocations.", 1)  # noqa: N815  PEFT's own name
    beta1: float = _help("AdaLoRA: smoothing of the sensitivity.", 0.85)
    beta2: float = _help("AdaLoRA: smoothing of its uncertainty.", 0.85)
    total_step: int | None = _help("AdaLoRA: optimiser steps of the whole training; needed when target_r < r.", None)
    orth_reg_weight: float = _help("AdaLoRA: weight of the orthogonality loss.", 0.5)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = PEFT_TYPE
        for name in ("target_modules", "exclude_modules", "shared_modules", "modules_to_save"):
            value = getattr(self, name)
            if isinstance(value, (set, tuple, frozenset)):
                setattr(self, name, sorted(value) if isinstance(value, (set, frozenset)) else list(value))
        for name in ("layers_to_transform", "layers_to_route"):
            value = getattr(self, name)
            if value is not None:
                setattr(self, name, [value] if isinstance(value, int) else sorted(value))
        problems = self._problems()
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
        return self.router == "centroid" and self.granularity != "task"

    def save_pretrained(self, save_directory: str, **kwargs: Any) -> None:
        """Save the configuration, and tell the reader of the model card which import loading needs."""
        super().save_pretrained(save_directory, **kwargs)
        # PEFT has written a card by now; Transformers' own `save_pretrained` writes none.
        with open(os.path.join(save_directory, "README.md"), "a+", encoding="utf-8") as card:
            card.seek(0)
            if "import monkeyjump" not in card.read():
                card.write(MODEL_CARD_NOTE)

    def _problems(self) -> list[str]:
        return [
            *self._choice_problems(),
            *self._number_problems(),
            *self._module_problems(),
            *self._adalora_problems(),
        ]

    def _choice_problems(self) -> list[str]:
        choices = {
            "adapter": ADAPTERS,
            "router": ROUTERS,
            "similarity": SIMILARITIES,
            "granularity": GRANULARITIES,
            "sequence_token": SEQUENCE_TOKENS,
            "route_space": ROUTE_SPACES,
            "center_init": CENTER_INITS,
            "ema_assign": EMA_ASSIGNS,
            "ema_space": EMA_SPACES,
        }
        found = []
        for name, allowed in choices.items():
            value = getattr(self, name)
            if value not in allowed:
                hint = did_you_mean(str(value), list(allowed))
                found.append(f"{name}={value!r} is not known: choose one of {', '.join(allowed)}.{hint}")
        return found

    def _number_problems(self) -> list[str]:
        found = []

        def check(name: str, ok: bool, rule: str, fix: str) -> None:
            if not ok:
                found.append(f"{name}={getattr(self, name)!r} must be {rule}: {fix}.")

        integers = {
            "r": (1, "use 1 or more"),
            "degree": (1, "use 1 or more (15 is the published value)"),
            "top_k": (1, "use 1 or more; for always-on adapters set layers_to_route=[]"),
            "init_tokens": (1, "the paper uses 50000"),
            "ema_interval": (1, "1 updates after every training forward"),
            "ema_stop": (0, "0 never moves the centres"),
            "deltaT": (1, "1 allocates at every optimiser step"),
        }
        for name, (least, fix) in integers.items():
            check(name, _is_int(getattr(self, name)) and getattr(self, name) >= least, f"an integer >= {least}", fix)
        check("alpha", _is_number(self.alpha) and self.alpha > 0, "a number > 0", "the paper uses 5")
        check("dropout", _is_number(self.dropout) and 0 <= self.dropout < 1, "in [0, 1)", "0 switches dropout off")
        check("temperature", _is_number(self.temperature) and self.temperature > 0, "a number > 0", "the paper uses 1")
        check(
            "uniform_gate",
            _is_number(self.uniform_gate) and self.uniform_gate > 0,
            "a number > 0",
            "1 is plain PEFT; the mean gate of a routed adapter makes the control that matches it",
        )
        check("jitter", _is_number(self.jitter) and self.jitter >= 0, "a number >= 0", "0 switches the noise off")
        check(
            "ema_momentum",
            _is_number(self.ema_momentum) and 0 <= self.ema_momentum < 1,
            "in [0, 1)",
            "the paper uses 0.5; to freeze the centres set ema_stop=0",
        )
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            check(name, _is_number(value) and 0 <= value < 1, "in [0, 1)", "AdaLoRA's authors use 0.85")
        check(
            "orth_reg_weight",
            _is_number(self.orth_reg_weight) and self.orth_reg_weight >= 0,
            "a number >= 0",
            "0 switches the orthogonality loss off",
        )
        return found

    def _module_problems(self) -> list[str]:
        found = []
        if self.target_modules is not None and len(self.target_modules) == 0:
            found.append("target_modules=[] names no module: list the projections to adapt, e.g. ['q_proj', 'v_proj'].")
        if isinstance(self.shared_modules, str):
            found.append(
                f"shared_modules={self.shared_modules!r} must be a list of names: write [{self.shared_modules!r}]."
            )
        elif isinstance(self.target_modules, list) and self.shared_modules:
            targets = self.target_modules
            for name in self.shared_modules:
                if name not in targets and not any(t.endswith(f".{name}") or name.endswith(f".{t}") for t in targets):
                    hint = did_you_mean(name, targets)
                    found.append(
                        f"shared_modules names {name!r}, which is not among target_modules={targets}: "
                        f"add it to target_modules or take it out.{hint}"
                    )
            if set(targets) <= set(self.shared_modules) and self.layers_to_route != []:
                found.append(
                    f"shared_modules={self.shared_modules} holds every target, so nothing is left to route: "
                    "take at least one out, or set layers_to_route=[] for adapters that are always on."
                )
        if isinstance(self.target_modules, str) and self.layers_to_transform is not None:
            found.append(
                f"layers_to_transform={self.layers_to_transform} has no effect on a target_modules pattern: "
                "list module names, or put the block numbers into the pattern."
            )
        for name in ("layers_to_transform", "layers_to_route"):
            value = getattr(self, name)
            if value is not None and any(not _is_int(i) or i < 0 for i in value):
                found.append(f"{name}={value!r} must hold block numbers >= 0: count blocks from 0.")
        if self.task_experts is not None and (
            not self.task_experts or any(not _is_int(e) or e < 0 for e in self.task_experts)
        ):
            found.append(
                f"task_experts={self.task_experts!r} must list one expert position >= 0 per task id, e.g. [0, 1, 2]."
            )
        return found

    def _adalora_problems(self) -> list[str]:
        if self.target_r is None or not _is_int(self.r):
            return []
        found = []
        if not _is_int(self.target_r) or not 1 <= self.target_r <= self.r:
            return [f"target_r={self.target_r!r} must be in 1..r ({self.r}): use r for no rank allocation."]
        if self.target_r < self.r and self.adapter != "adalora":
            found.append(f"target_r={self.target_r} only applies to adapter='adalora', not {self.adapter!r}: drop it.")
        if self.allocates_rank:
            if self.total_step is None or self.total_step < 1:
                found.append(
                    f"total_step={self.total_step!r} must be given when target_r < r: set it to the number of "
                    "optimiser steps of the training."
                )
            elif self.tinit + self.tfinal >= self.total_step:
                found.append(
                    f"tinit + tfinal = {self.tinit + self.tfinal} must be smaller than total_step={self.total_step}: "
                    "the budget shrinks in between."
                )
        return found


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
