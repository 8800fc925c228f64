"""The mixtures that Monkey Jump is compared with; one function each turns the name of a protocol into settings.

In the `mj_paper` protocol all have the paper's targets (q, k, v, o, gate), rank 2, alpha 5, dropout 0.05, four experts
and top-2; they differ only in what makes each method itself. Learning rates belong to recipes. In every method all
experts of a projection share one dropout mask, where the authors' loops draw one each.
"""

from __future__ import annotations

from typing import Any

from monkeyjump.errors import ConfigError
from monkeyjump.methods.presets import METHODS, PAPER_TARGETS

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
FEED_FORWARD = ["gate_proj", "up_proj", "down_proj"]


def _mixture(adapter: str = "lora") -> dict[str, Any]:
    """Four experts on each projection under a softmax router of its own, top-2."""
    kind = {"adapter": adapter, "placement": "projection", "router": "linear"}
    return {**kind, "experts": 4, "top_k": 2, "target_modules": list(PAPER_TARGETS)}


def moelora(protocol: str) -> dict[str, Any]:
    """MoELoRA (Luo et al., 2024): N LoRA experts per projection, token-level softmax router, top-2.

    Published: 8 experts on the attention projections and a balance loss. There is no public code, and the text could
    not be read: rank, alpha and dropout are the Monkey Jump paper's, the weight of the balance loss is Switch's, and
    the contrastive loss (`contrastive_weight`, off) is in a form of ours. Kept gates are not renormalised.
    """
    settings = {**_mixture(), "aux_loss_weight": 0.01}
    return settings if protocol == "mj_paper" else {**settings, "experts": 8, "target_modules": list(ATTENTION)}


def hydralora(protocol: str) -> dict[str, Any]:
    """HydraLoRA (Tian et al., 2024): one A and N B's per projection, mixed by a softmax over all of them.

    Published, from the authors' script: dense, Kaiming router, no balance loss (the code's is hard-wired to zero), rank
    4, alpha 32, four B's, on gate, up and down. Not matched: A is applied once, with one dropout mask, not once per
    expert. `mj_paper`: the paper's targets and top-2, as it says of every mixture.
    """
    settings = {**_mixture(), "share_A": True, "router_init": "kaiming"}
    if protocol == "mj_paper":
        return settings
    return {**settings, "top_k": None, "target_modules": list(FEED_FORWARD), "r": 4, "alpha": 32.0}


def mola(protocol: str) -> dict[str, Any]:
    """MoLA (Gao et al., 2024): MoELoRA with more experts in higher blocks, top-2, renormalised.

    Published: 2-4-6-8 experts by quarter of the depth on all seven projections, rank 8, alpha 16, Kaiming router; the
    authors' balance loss (0.001, summed over routers) is off unless asked for, so it is off here too. `mj_paper`: the
    allocation 2-3-5-6 averages four experts, so its size is that of MoELoRA; four everywhere would be MoELoRA.
    """
    settings = {**_mixture(), "router_init": "kaiming", "renormalize": True, "lb_reduce": "sum"}
    if protocol == "mj_paper":
        return {**settings, "experts": [2, 3, 5, 6]}
    return {**settings, "experts": [2, 4, 6, 8], "target_modules": [*ATTENTION, *FEED_FORWARD], "r": 8, "alpha": 16.0}


def moa(protocol: str) -> dict[str, Any]:
    """MoA (Cao et al., 2025): one sigmoid router per block over the block's own adapters, each gate for itself.

    Published: LoRA on q, k, v, o and down, the parallel bottleneck (width 16) and the prompt (length 10), SwiGLU
    router, soft gates, rank 8, alpha 8. The router reads the block's input, as in their LLaMA code; their Transformers
    port reads it after the block's first norm, which is `router_input="norm"`. Not matched: the prompt meets the query
    before its rotation, not after (no model code is touched). The bottleneck starts nearly, not exactly, at zero. LoRA
    alone: `extra_experts=[]`. Sparse: `threshold=0.5`; as published the threshold never learns (`threshold_grad`).
    `mj_paper`: LoRA on the shared targets and a linear router; soft gates have no top-k to match.
    """
    settings = {"adapter": "lora", "router": "sigmoid", "router_init": "kaiming", "top_k": None}
    if protocol == "mj_paper":
        return {**settings, "target_modules": list(PAPER_TARGETS)}
    published = {"router_hidden": "swiglu", "extra_experts": ["parallel", "prompt"], "r": 8, "alpha": 8.0}
    return {**settings, **published, "target_modules": [*ATTENTION, "down_proj"]}


def moe_lora_fa(protocol: str) -> dict[str, Any]:
    """MoE-LoRA-FA: MoELoRA with frozen A's, one per expert (`share_A=True`: one per projection).

    Only the Monkey Jump paper names it, so both presets are its protocol. Its printed 902K trainable parameters on
    Qwen2-0.5B are not matched: with every A frozen there are 737,280.
    """
    return {**_mixture("lora_fa"), "aux_loss_weight": 0.01}


def moe_adalora(protocol: str) -> dict[str, Any]:
    """MoE-AdaLoRA: MoELoRA whose experts are AdaLoRA's; orthogonality per expert, one rank budget over all of them.

    Only the Monkey Jump paper names it, so both presets are its protocol; no rank is taken away unless `target_r` says.
    Gradients are sums over tokens, so a rarely used expert would lose its ranks first: `score_per_token=True` scores a
    rank by what it does for a token that reaches it.
    """
    return {**_mixture("adalora"), "aux_loss_weight": 0.01}


def moe_propulsion(protocol: str) -> dict[str, Any]:
    """MoE-Propulsion: y (1 + sum_n g_n (p_n^15 - 1)) under MoELoRA's router.

    Only the Monkey Jump paper names it, so both presets are its protocol. All experts start equal and are told apart by
    the random start of the router alone.
    """
    return {**_mixture("propulsion"), "aux_loss_weight": 0.01}


def mixlora(protocol: str, layout: str | None = None) -> dict[str, Any]:
    """MixLoRA (Li et al., 2024): LoRA on attention, a mixture of LoRA experts in the feed-forward.

    Two layouts, and a result must say which one it used:

    - `layout="ffn"` (published, the default): attention targets get plain LoRA; the feed-forward becomes a mixture of
      whole feed-forwards, each with LoRA of its own on every feed-forward target, under one softmax router per block on
      the feed-forward's input, top-2, renormalised; Mixtral's balance loss at weight 0.001. Matched with the authors'
      code: rank 16, alpha 32, dropout 0.05, 8 experts. Not matched: they multiply the input by noise in place, at
      inference too (off here; `noise="input_mul"` with a `jitter` multiplies the router's copy of it, in training
      only), average the router's logits over all blocks before balancing (here every router is balanced by itself;
      `lb_reduce="global"` is the nearest), and draw one dropout mask per expert. With attention targets alone there are
      no experts: plain LoRA and one idle router per block, as the paper's efficiency figure probably had it.
    - `layout="projection"` (the `mj_paper` protocol): four LoRA experts on each listed projection, a router per
      projection, top-2. The Monkey Jump paper lists q, k, v, o and gate for every method, which MixLoRA's own layout
      has no form for.
    """
    if layout is None:
        layout = "projection" if protocol == "mj_paper" else "ffn"
    if layout not in ("ffn", "projection"):
        raise ConfigError(
            f"layout={layout!r} is not known: choose 'ffn' (whole feed-forwards as experts, as published) or "
            "'projection' (experts on every listed projection)."
        )
    settings: dict[str, Any] = {"adapter": "lora", "placement": layout, "router": "linear", "top_k": 2}
    settings.update(router_init="normal", renormalize=True, aux_loss_weight=0.001, lb_norm="mixtral")
    if protocol == "mj_paper":
        return {**settings, "target_modules": list(PAPER_TARGETS), "experts": 4}
    published = {"experts": 8, "r": 16, "alpha": 32.0, "dropout": 0.05}
    return {**settings, **published, "target_modules": [*ATTENTION, *FEED_FORWARD]}


def more(protocol: str) -> dict[str, Any]:
    """MoRE (Zhang et al., 2025): one LoRA per projection; each task uses its first ranks, as many as it chooses.

    Rows are routed by `task_ids`; without them, outside training, by the nearest task embedding (a warning says so
    once). Matched with the authors' code: one selector and one table of 8 task embeddings per projection, as wide as
    its input, embeddings N(0, 0.01^2), rank i weighted by (i/r)^2 (`rank_scale="code"`), rank 8, alpha 32, dropout 0.1,
    the contrastive task loss at temperature 0.05 and weight 0.1. Deliberately different:

    - the selector trains: their straight-through branch is never reached, so each task keeps the rank it was born with;
    - the weight of rank i follows r, where theirs is fixed to 8; one batch may mix tasks;
    - the loss compares the mean over the prompt with the embeddings (`task_rep`), since the first token of a causal
      model has seen nothing; `task_rep="first"` is theirs. It is the mean over projections, where they divide by
      constants of T5;
    - the sampling that balances datasets belongs to the data, not to the adapter.

    `preset="mj_paper"`: the paper's targets, dropout and alpha / r, with four nested experts, that is rank 4.
    """
    settings: dict[str, Any] = {"adapter": "lora", "placement": "nested", "granularity": "task"}
    settings.update(tasks=8, rank_scale="code", task_rep="mean", contrastive_weight=0.1)
    if protocol == "mj_paper":
        return {**settings, "target_modules": list(PAPER_TARGETS), "r": 4, "alpha": 10.0}
    return {**settings, "target_modules": list(ATTENTION), "r": 8, "alpha": 32.0, "dropout": 0.1}


def lime(protocol: str) -> dict[str, Any]:
    """LiME (arXiv 2604.02338): one LoRA per projection, modulated by four vectors that its own outputs choose among.

    Published, from the authors' scripts: rank 2, temperature 0.5, gamma 0.7, jitter 0.1, weights by auto top-k, balance
    losses of 0.1 and 0.01. Not matched: the authors scale logits by the largest output of the whole batch, here it is
    the token's own; their rates differ for A, B (4e-4) and the vectors (1e-3), here all have the recipe's. `mj_paper`
    has the paper's targets, rank, alpha and dropout.
    """
    how = {"adapter": "lime", "placement": "projection", "router": "lime", "experts": 4, "top_k": None}
    noise = {"temperature": 0.5, "jitter": 0.1, "noise": "logit_mul"}
    return {**how, **noise, "aux_loss_weight": 0.1, "lb_norm": "squared", "target_modules": list(PAPER_TARGETS)}


for _method in (lime, moelora, hydralora, mola, moa, moe_lora_fa, moe_adalora, moe_propulsion, mixlora, more):
    METHODS.add(_method.__name__, _method)
