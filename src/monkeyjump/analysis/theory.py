"""The paper's theorem on expressivity and its proposition on soft routing, checked by numbers on trained weights.

The theorem compares the outputs of E adapters on T tokens: the sum of all of them, (sum_e D_e) H, with what routing
gives, the columns D_e h_t of the expert e of each token t. Routing has at least the rank of the sum if every expert is
chosen (coverage) and the tokens of an expert span what it can give (input rank). Ranks are those of the outputs over
the sampled tokens, whose lengths are set to one first, because a length changes no rank.

Shapes: E experts, N tokens, O output width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, fields
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monkeyjump.analysis.changed_models import active_routers
from monkeyjump.analysis.collect import Collection
from monkeyjump.analysis.style import COLORS, Drawing, few_ticks, grid, label, name_ticks
from monkeyjump.tuner.layer import FrozenLinear, MonkeyJumpLayer

TOKENS = 1_000  # of the sample; ranks are far below
_SMALLEST = 1e-5  # singular values below this share of the largest count as zero: outputs are fp32


@dataclass
class Ranks:
    """Ranks of one group of experts that write to the same width."""

    summed: int  # of the sum of all experts: plain PEFT in the theorem
    hard: int  # of the outputs of each token's first choice
    soft: int  # of the outputs weighted by the gates
    full: int  # of the span of all experts' outputs
    reached: int  # of the span of the experts that some token goes to
    covered: bool  # every expert is the first choice of some token
    fed: bool  # the tokens of each expert span what it can give
    patterns: int  # distinct sets of chosen experts
    bound: int  # the proposition's: patterns times the largest rank of a pattern's mean expert, at most `full`


CLAIMS: dict[str, Callable[[Ranks], bool]] = {
    "Coverage: every expert is the first choice of some token": lambda ranks: ranks.covered,
    "Input rank: the tokens of each expert span all that it can give": lambda ranks: ranks.fed,
    "Expressivity: routing to the first choice has a larger rank than the sum": lambda ranks: ranks.hard > ranks.summed,
    "It has a smaller rank than the sum": lambda ranks: ranks.hard < ranks.summed,
    "Soft top-k: routing with gates has a larger rank than the sum": lambda ranks: ranks.soft > ranks.summed,
    "Its rank stays within the span of the chosen experts": lambda ranks: ranks.soft <= ranks.reached,
    "The bound by patterns holds": lambda ranks: ranks.soft <= ranks.bound,
}


def check_ranks(outputs: Tensor, gates: Tensor) -> Ranks:
    """What the theorem and the proposition speak of, from outputs [E, N, O] of each expert for all tokens and gates."""
    first = gates.argmax(1)
    spans = [rank(own) for own in outputs]
    chosen = [outputs[expert][first == expert] for expert in range(len(outputs))]
    used = (gates > 0).any(0)
    sets, owner = (gates > 0).unique(dim=0, return_inverse=True)
    means = [gates[owner == number].mean(0) for number in range(len(sets))]
    largest = max(rank(torch.einsum("e,eno->no", mean, outputs)) for mean in means)
    full = rank(outputs.flatten(0, 1))
    return Ranks(
        summed=rank(outputs.sum(0)),
        hard=rank(outputs[first, torch.arange(len(first))]),
        soft=rank(torch.einsum("ne,eno->no", gates, outputs)),
        full=full,
        reached=rank(outputs[used].flatten(0, 1)),
        covered=all(len(own) > 0 for own in chosen),
        fed=all(len(own) > 0 and rank(own) == span for own, span in zip(chosen, spans, strict=True)),
        patterns=len(sets),
        bound=min(len(sets) * largest, full),
    )


def rank(matrix: Tensor) -> int:
    """The numerical rank, from the smaller of the two products of the matrix with itself."""
    values = matrix.double()
    gram = values.T @ values if values.shape[0] > values.shape[1] else values @ values.T
    found = torch.linalg.eigvalsh(gram)
    return int((found > max(float(found.max()), 1e-30) * _SMALLEST**2).sum())


@torch.no_grad()
def groups(model: nn.Module, collection: Collection) -> Iterator[tuple[str, str, Tensor, Tensor]]:
    """Block, experts, their outputs [E, N, O] and gates [N, E], for all experts that read the state and are alike wide.

    Experts are the projections of a block, or the several experts of one projection.
    """
    sample = collection.sample
    for router, name in active_routers(model):
        if router.key not in sample.states or router.gates_each(name) > 1:  # a rank has rank one by itself
            continue
        step, layers = max(1, len(sample.tasks) // TOKENS), router.layers[name]
        x = F.normalize(sample.states[router.key][::step].float(), dim=-1)
        reading = [(place, layer) for place, layer in enumerate(layers) if layer.in_features == x.shape[1]]
        if router.configs[name].placement != "block":
            for place, layer in reading:
                expert = router.names[name][place]
                gates = sample.gates.get(f"{router.key}.{expert}", sample.gates.get(router.key))
                outputs = _outputs(layer, name, x)
                if gates is not None and gates.shape[1] == len(outputs):  # ranks of one adapter are no experts
                    yield router.key, expert, outputs, gates[::step]
        elif router.key in sample.gates:
            reading.sort(key=lambda each: each[1].out_features)
            for _, alike in groupby(reading, key=lambda each: each[1].out_features):
                places, experts = zip(*alike, strict=True)
                if len(places) > 1:
                    label_ = " + ".join(router.names[name][place].removesuffix("_proj") for place in places)
                    outputs = torch.cat([_outputs(layer, name, x) for layer in experts])
                    yield router.key, label_, outputs, sample.gates[router.key][::step][:, list(places)]


def _outputs(layer: MonkeyJumpLayer, name: str, x: Tensor) -> Tensor:
    """What each expert of a projection adds for the tokens x, without its gate: [experts, N, O]."""
    adapter: Any = layer.monkeyjump_adapter[name]
    weight = FrozenLinear(layer).weight().float()
    x = x.to(weight.device)
    base = F.linear(x, weight)
    if hasattr(adapter, "expert_outputs"):
        return adapter.expert_outputs(x, base).transpose(0, 1).float().cpu()
    return adapter.delta(x, base, None).float().cpu().unsqueeze(0)


def draw_theory(found: list[tuple[str, str, Ranks]]) -> Drawing:
    names = list(dict.fromkeys(name for _, name, _ in found))
    figure, axes = grid(len(names), 3.6, 2.9, "Rank of the adapters' outputs over the sampled tokens", most=4)
    lines = {"full": "span of all experts", "hard": "routed to the first choice", "soft": "routed with gates"}
    lines["summed"] = "sum of all experts"
    for axis, name in zip(axes, names, strict=True):
        own = [(block, ranks) for block, found_name, ranks in found if found_name == name]
        for place, (part, words) in enumerate(lines.items()):
            values = [getattr(ranks, part) for _, ranks in own]
            axis.plot(values, "osD^"[place] + "-", ms=7 - 1.5 * place, lw=0.8, color=COLORS[place], label=words)
        axis.set_ylim(0, 1.6 * max(ranks.full for _, ranks in own) + 1)
        few_ticks(axis, "y", whole=True)
        label(axis, name, "block", "rank", legend=True)
        name_ticks(axis, "x", [block for block, _ in own], most=10)
    rows = [[block, name, *astuple(ranks)] for block, name, ranks in found]
    columns = ["block", "experts", *(part.name for part in fields(Ranks))]
    return Drawing("theory", figure, columns, rows, theory_in_words([ranks for _, _, ranks in found]))


def theory_in_words(found: list[Ranks]) -> list[str]:
    """One sentence for each premise and each claim: in how many groups of experts it held on this adapter."""
    total = f"of {len(found)} groups of experts."
    return [f"{claim} in {sum(map(held, found))} {total}" for claim, held in CLAIMS.items()]
