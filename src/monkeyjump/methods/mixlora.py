"""MixLoRA (Li et al., 2024): LoRA on attention, a mixture of LoRA experts in the feed-forward.

Two layouts, and a result must say which one it used:

- `layout="ffn"` (published, the default): attention targets get plain LoRA; the feed-forward becomes a mixture of whole
  feed-forwards, each with LoRA of its own on every feed-forward target, under one softmax router per block on the
  feed-forward's input, top-2, renormalised; Mixtral's balance loss at weight 0.001. Matched with the authors' code:
  rank 16, alpha 32, dropout 0.05, 8 experts. Not matched: they multiply the input by noise in place, at inference too
  (off here; `noise="input_mul"` with a `jitter` multiplies the router's copy of it, in training only), average the
  router's logits over all blocks before balancing (here every router is balanced by itself; `lb_reduce="global"` is
  the nearest), and draw one dropout mask per expert.
  With attention targets alone there are no experts: plain LoRA and one idle router per block, as the paper's efficiency
  figure probably had it.
- `layout="projection"` (the `mj_paper` protocol): four LoRA experts on each listed projection, a router per projection,
  top-2. The Monkey Jump paper lists q, k, v, o and gate for every method, which MixLoRA's own layout has no form for.
"""

from __future__ import annotations

from typing import Any

from monkeyjump.errors import ConfigError
from monkeyjump.methods.presets import METHODS, PAPER_TARGETS

LAYOUTS = ("ffn", "projection")
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def mixlora(protocol: str, layout: str | None = None) -> dict[str, Any]:
    if layout is None:
        layout = "projection" if protocol == "mj_paper" else "ffn"
    if layout not in LAYOUTS:
        raise ConfigError(
            f"layout={layout!r} is not known: choose 'ffn' (whole feed-forwards as experts, as published) or "
            "'projection' (experts on every listed projection)."
        )
    settings: dict[str, Any] = {"adapter": "lora", "placement": layout, "router": "linear", "top_k": 2}
    settings.update(router_init="normal", renormalize=True, aux_loss_weight=0.001, lb_norm="mixtral")
    if protocol == "mj_paper":
        return {**settings, "target_modules": list(PAPER_TARGETS), "experts": 4}
    return {**settings, "target_modules": list(TARGETS), "experts": 8, "r": 16, "alpha": 32.0, "dropout": 0.05}


METHODS.add("mixlora", mixlora)
