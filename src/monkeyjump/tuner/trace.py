"""A recorder of what was routed where, for analysis and tests, and load statistics.

Shapes: B batch, T tokens, E routed projections of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from monkeyjump.errors import ConfigError
from monkeyjump.registry import did_you_mean
from monkeyjump.routing.granularity import KINDS
from monkeyjump.tuner.model import require_context


@dataclass
class ExpertLoad:
    """How much work each routed projection of one block got."""

    experts: list[str]
    share: list[float]  # of all jumps, the part that went to each expert; sums to 1
    mean_gate: list[float]  # of each expert over all real tokens, zeros included

    @property
    def entropy(self) -> float:
        """Evenness of the shares: 1 when all experts get the same, 0 when one gets all."""
        if len(self.share) == 1:
            return 1.0
        p = torch.tensor(self.share, dtype=torch.float64)
        return float(-(p * p.clamp_min(1e-12).log()).sum() / torch.tensor(float(len(p)), dtype=torch.float64).log())

    @property
    def dead(self) -> list[str]:
        """Experts that no token jumped to."""
        return [name for name, share in zip(self.experts, self.share, strict=True) if share == 0]


class RoutingTrace:
    """Filled by `record_routing`: the gates of the last forward, and loads summed over all forwards inside."""

    def __init__(self, probabilities: bool = False) -> None:
        self.probabilities_wanted = probabilities
        # gates, mask, experts, probabilities
        self._last: dict[tuple[str, str], tuple[Tensor, Tensor | None, tuple[str, ...], Tensor | None]] = {}
        # by block, adapter and kind of token ("" for all): jumps, gates, tokens
        self._sums: dict[tuple[str, str, str], tuple[Tensor, Tensor, Tensor]] = {}

    def record(
        self,
        block: str,
        adapter: str,
        names: tuple[str, ...],
        gates: Tensor,
        mask: Tensor | None,
        kinds: Tensor | None = None,
        probabilities: Tensor | None = None,
    ) -> None:
        self._last[block, adapter] = gates.detach(), mask, names, probabilities
        self._add((block, adapter, ""), gates, mask)
        if kinds is not None:
            for place, kind in enumerate(KINDS):
                own = (kinds == place).to(gates.device)
                self._add((block, adapter, kind), gates, own if mask is None else own & mask.to(gates.device))

    def _add(self, key: tuple[str, str, str], gates: Tensor, mask: Tensor | None) -> None:
        real = gates.detach() if mask is None else gates.detach() * mask.unsqueeze(-1).to(gates.device)
        count = torch.tensor(float(gates.shape[:2].numel())) if mask is None else mask.sum().float()
        tokens = count.to(gates.device)  # sums stay on the device, which would have to end its work for each of them
        sums = (real > 0).sum((0, 1)).double(), real.sum((0, 1)).double(), tokens
        before = self._sums.get(key)
        self._sums[key] = sums if before is None else (before[0] + sums[0], before[1] + sums[1], before[2] + tokens)

    def blocks(self) -> list[str]:
        return list(dict.fromkeys(block for block, _ in self._last))

    def gates(self, block: str, adapter: str | None = None) -> Tensor:
        """Gates of a block in the last forward, [B, T, E]."""
        return self._last[self._key(block, adapter)][0]

    def probabilities(self, block: str, adapter: str | None = None) -> Tensor | None:
        """What the router gave every expert before the top k were taken; None where there is no such number."""
        return self._last[self._key(block, adapter)][3]

    def mask(self, block: str, adapter: str | None = None) -> Tensor | None:
        """Real tokens of the last forward, [B, T]; None when all were."""
        return self._last[self._key(block, adapter)][1]

    def experts(self, block: str, adapter: str | None = None) -> list[str]:
        """The routed projections of a block, in the order of the last dimension of its gates."""
        return list(self._last[self._key(block, adapter)][2])

    def load(self, block: str, adapter: str | None = None, kind: str = "") -> ExpertLoad:
        """Shares over every forward since recording began, padding left out; of one kind of tokens, if it is named."""
        key = (*self._key(block, adapter), kind)
        if key not in self._sums:
            raise ConfigError(
                f"kind={kind!r}: no such tokens were told apart. Kinds of a model with pictures: {KINDS}."
            )
        jumps, weight, tokens = self._sums[key]
        share, mean_gate = jumps / jumps.sum().clamp_min(1), weight / tokens.clamp_min(1)
        return ExpertLoad(self.experts(block, adapter), share.tolist(), mean_gate.tolist())

    def _key(self, block: str, adapter: str | None) -> tuple[str, str]:
        for key in self._last:
            if key[0] == str(block) and adapter in (None, key[1]):
                return key
        known = self.blocks()
        raise ConfigError(
            f"no routing of block {block!r} was recorded.{did_you_mean(str(block), known)} "
            f"Recorded blocks: {', '.join(known) or 'none; run the model inside record_routing'}."
        )


@contextmanager
def record_routing(model: nn.Module, probabilities: bool = False) -> Iterator[RoutingTrace]:
    """Record the gates of every forward inside the `with`, and on request what the experts below the top k had."""
    context = require_context(model)
    outer, context.trace = context.trace, RoutingTrace(probabilities)
    try:
        yield context.trace
    finally:
        context.trace = outer


def staged_load(model: nn.Module, adapter_name: str = "default") -> dict[str, ExpertLoad]:
    """Expert load of the last training forward, as it was staged: costs nothing until it is asked for."""
    loads = {}
    context = require_context(model)
    for (adapter, key), load in context.losses.loads.items():
        if adapter == adapter_name:
            loads[key] = ExpertLoad([f"expert {n}" for n in range(len(load))], load.tolist(), mean_gate=[])
    routers = [router for router in context.routers() if adapter_name in router.layers]
    routers = [r for r in routers if adapter_name in r.layers[adapter_name][0].monkeyjump_staged_count]
    staged = [layer.monkeyjump_staged_count[adapter_name] for r in routers for layer in r.layers[adapter_name]]
    flat = [count.to(staged[0].device).reshape(-1) for count in staged]
    counts = torch.cat(flat).double().cpu() if staged else torch.zeros(0)
    for router in routers:  # one copy from the device for all of them
        own, counts = counts.tensor_split([len(router.names[adapter_name])])
        share = (own / own.sum().clamp_min(1)).tolist()
        loads[router.key] = ExpertLoad(list(router.names[adapter_name]), share, mean_gate=[])
    return loads
