"""docs/method-cards.md: a card for each method, with what the code says of it and counts on a model.

`python docs/make_methods.py` makes the page anew; a test fails when it is not what the code says.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from peft import get_peft_model

import monkeyjump as mj
from monkeyjump.bench.variants import empty_model
from monkeyjump.record import write_atomic
from monkeyjump.tables import Table

PAGE = "method-cards.md"
SHAPE = "qwen2-0.5b"
INTRODUCTION = f"""# Method cards

One card for each method: what it computes, what of its paper is matched, when to use it, and what it costs.
`W x` is the frozen projection, `h` the state that enters the block, `g` and `m` are gates, `s` is alpha / r. Counts are
those of `monkeyjump methods --model {SHAPE} --preset mj_paper`, where methods share targets, rank 2 and four experts.
Settings of their own: [methods](methods.md). Measured scores: [results](results.md).
"""


class Card(NamedTuple):
    equation: str
    when: str


CARDS = {
    "lora": Card("y = W x + s B A x", "The default choice for one task, and the baseline of every comparison."),
    "lora_fa": Card("y = W x + s B A x, A frozen", "Memory is short: backward keeps only rank-r activations."),
    "adalora": Card("y = W x + s B diag(l) A x", "Ranks should go where they help; set `target_r` and `total_step`."),
    "propulsion": Card("y = p^15 * (W x)", "The fewest parameters: one for each output."),
    "moelora": Card("y = W x + s sum_n g_n(x) B_n A_n x", "The plain mixture with a learned router, as a baseline."),
    "mixlora": Card(
        "FFN(x) = sum_n g_n(x) FFN_n(x), FFN_n with its own LoRA", "Experts should be whole feed-forwards."
    ),
    "hydralora": Card("y = W x + s sum_n g_n(x) B_n A x", "Several tasks with much in common: one A, several B."),
    "mola": Card("y = W x + s sum_n g_n(x) B_n A_n x, more n in higher blocks", "A mixture that grows with depth."),
    "more": Card("y = W x + s B diag(w_task) A x", "Tasks are known, and need different ranks."),
    "moa": Card("y_i = W_i x + s sigma(r_i(h)) B_i A_i x", "Monkey Jump's layout with a trained router."),
    "moe_lora_fa": Card("y = W x + s sum_n g_n(x) B_n A_n x, A_n frozen", "MoELoRA where memory is short."),
    "moe_adalora": Card("y = W x + s sum_n g_n(x) B_n diag(l_n) A_n x", "MoELoRA with a rank budget."),
    "moe_propulsion": Card("y = W x * (1 + sum_n g_n(x) (p_n^15 - 1))", "A mixture with few parameters."),
    "mjlora": Card("y_i = W_i x + m_i(h) s B_i A_i x, m = top-k softmax(cos(h, c_i))", "Tasks conflict, parameters are "
                   "not to grow; compare with `mjlora_uniform`."),
    "mjlorafa": Card("as mjlora, A frozen", "The same where memory is short."),
    "mjadalora": Card("as mjlora, with diag(l) between B and A", "The same with a rank budget."),
    "mjpropulsion": Card("y_i = W_i x * (1 + m_i(h) (p_i^15 - 1))", "The same with the fewest parameters."),
    "lime": Card("y = W x + s B A x * (sum_e w_e v_e + g v)", "A parameter-free router that reads outputs."),
    "flylora": Card("y = W x + s B top_k(A x), A frozen and sparse", "Routing among many ranks, only B trained."),
    "mjlora_prompt": Card("as mjlora, for rank r of each: m_r = [r mod N = argmax cos(mean h of the prompt, c_n)]",
                          "Two opposed tasks, told apart by their prompts, few steps; beside `mjlora_prompt_random`."),
    "mjlora_uniform": Card("y_i = W_i x + 0.23 s B_i A_i x", "The control that any routed result needs."),
    "mjlora_random": Card("as mjlora, with random centres", "The control for k-means."),
    "mjlora_shuffled": Card("as mjlora, with the gates of other tokens", "The control for who gets which gate."),
    "mjlora_oracle": Card("y_i = W_i x + [i = task mod E] s B_i A_i x", "The task decides; exports as plain LoRA."),
    "mjlora_task": Card("as mjlora, for rank r of each: m_r = [r mod N = task mod N]",
                        "Two opposed tasks that are known, and few steps; exports as plain LoRA."),
    "mjlora_prompt_uniform": Card("y_i = W_i x + 0.5 s B_i A_i x", "The control without routes by the prompt."),
    "mjlora_prompt_random": Card("as mjlora_prompt, with random centres", "The control for k-means by the prompt."),
}  # fmt: skip


def page() -> str:
    """The whole page."""
    return "\n".join([INTRODUCTION, *(_card(name) for name in mj.methods.names() if name in CARDS)])


def _card(name: str) -> str:
    with torch.device("meta"):
        model = get_peft_model(empty_model(SHAPE), mj.methods.build(name, "mj_paper"))
        count = mj.count_parameters(model)
    cost = Table(
        "",
        ["trained", "of them router", "buffers"],
        [[f"{count.trainable:,}", f"{count.router:,}", f"{count.buffers:,}"]],
        left=0,
    )
    card = CARDS[name]
    return (
        f"## {name}\n\n`{card.equation}`\n\n{mj.methods.describe(name)}\n\n**When:** {card.when}\n\n{cost.markdown()}\n"
    )


if __name__ == "__main__":
    write_atomic(Path(__file__).parent / PAGE, page())
