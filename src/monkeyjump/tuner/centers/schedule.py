"""When centres move: which training forwards take statistics, and which commit what the one before has staged.

A forward is counted when it has finished, and what it staged is committed when the next one begins. One that raises, is
interrupted, or meets a state that is not finite moves nothing.

The count is a buffer on the device, which the commit itself looks at. A copy on the host lets an eager forward leave
out statistics that nobody would commit. It holds as long as nobody else has written to the buffer; where that is not
certain (under a compiler, in a CUDA graph), statistics are taken every time and the buffer decides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from monkeyjump.config import MonkeyJumpConfig
from monkeyjump.routing.centroid import committed, is_due
from monkeyjump.tuner.centers.pool_ranks import several_ranks

if TYPE_CHECKING:
    from monkeyjump.tuner.context import RoutingContext
    from monkeyjump.tuner.layer import MonkeyJumpLayer

Layers = list["MonkeyJumpLayer"]
# The host reads the count from the device this often and then gives up: someone, such as data-parallel training that
# broadcasts buffers, writes it in every forward.
MOST_READS = 4


class Schedule:
    """The counts of one list of blocks, by adapter name."""

    def __init__(self) -> None:
        self.unfinished: set[str] = set()
        self.commits = 0  # how often centres may have moved
        self._known: dict[str, tuple[int, int]] = {}  # (version of the buffer, its value)
        self._reads: dict[str, int] = {}

    def begin(self, name: str, config: MonkeyJumpConfig, layers: Layers, context: RoutingContext) -> bool:
        """Commit what the last training forward staged; whether this one is to take statistics."""
        if torch.compiler.is_compiling():
            _commit(name, config, layers)
            return True
        # a forward that did not finish has already committed what there was, and staged a part of its own
        fresh, count = name not in self.unfinished, self._count(name, layers, context)
        self.unfinished.add(name)
        if fresh and (count is None or is_due(count, config)):
            _commit(name, config, layers)
            self.commits += 1
        # a compiled block takes statistics every time: a second graph without them would cost more
        if count is None or context.shared_inputs.prepared:
            return True
        return is_due(count + 1, config) or context.watches_load

    def finish(
        self, name: str, config: MonkeyJumpConfig, layers: Layers, context: RoutingContext, pooled: bool
    ) -> None:
        """Count the forward and, if `pooled`, make its statistics those of all ranks where somebody will use them."""
        if pooled and (torch.compiler.is_compiling() or self._used(name, config, context)):
            over_ranks(name, layers)
        with torch.no_grad():
            torch._foreach_add_([layer.monkeyjump_step[name] for layer in layers], 1)
        if not torch.compiler.is_compiling():
            self.unfinished.discard(name)
            if name in self._known:
                self._known[name] = (_version(name, layers), self._known[name][1] + 1)

    def abandon(self, name: str, layers: Layers) -> None:
        """Drop what an unfinished forward has staged."""
        if name in self.unfinished:
            with torch.no_grad():
                torch._foreach_zero_([layer.monkeyjump_staged_count[name] for layer in layers])

    def _used(self, name: str, config: MonkeyJumpConfig, context: RoutingContext) -> bool:
        known = self._known.get(name)
        return known is None or is_due(known[1] + 1, config) or context.watches_load

    def _count(self, name: str, layers: Layers, context: RoutingContext) -> int | None:
        """Finished training forwards; None where the host cannot know."""
        captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        # What is prepared for compiled code may also be replayed without this one, on several ranks if they say so.
        if captured or (context.shared_inputs.prepared and (context.replays or not several_ranks())):
            self._known.pop(name, None)
            return None
        version, count = self._known.get(name, (-1, 0))
        if version != _version(name, layers):
            if self._reads.get(name, 0) >= MOST_READS:
                self._known.pop(name, None)
                return None
            self._reads[name] = self._reads.get(name, 0) + 1
            count = int(layers[0].monkeyjump_step[name])
            self._known[name] = (_version(name, layers), count)
        return count


def _version(name: str, layers: Layers) -> int:
    step = layers[0].monkeyjump_step[name]
    return -1 if step.is_inference() else step._version


def _commit(name: str, config: MonkeyJumpConfig, layers: Layers) -> None:
    """Move the centres by what was staged, if the count on the device says so."""
    alike = _alike(layers, name)
    sums = [torch.stack([layer.monkeyjump_staged_sum[name] for layer in part]) for part in alike]
    finite = torch.stack([total.isfinite().all().to(sums[0].device) for total in sums]).all()
    for part, total in zip(alike, sums, strict=True):
        centers = [layer.monkeyjump_center[name] for layer in part]
        counts = torch.stack([layer.monkeyjump_staged_count[name] for layer in part])
        counts = counts * finite.to(counts.device)
        new = committed(torch.stack(centers), total, counts, part[0].monkeyjump_step[name], config)
        with torch.no_grad():
            torch._foreach_copy_(centers, list(new.unbind()))


def over_ranks(name: str, layers: Layers) -> None:
    """Make the staged statistics those of the whole data-parallel batch, on every rank."""
    if not several_ranks():
        return
    for part in _alike(layers, name):
        sums = [layer.monkeyjump_staged_sum[name] for layer in part]
        counts = [layer.monkeyjump_staged_count[name] for layer in part]
        stacked = [torch.stack(sums), torch.stack(counts)]
        flat = torch.cat([values.flatten() for values in stacked])
        torch.distributed.all_reduce(flat)
        parts = flat.split([values.numel() for values in stacked])
        with torch.no_grad():
            for staged, like, values in zip((sums, counts), stacked, parts, strict=True):
                torch._foreach_copy_(staged, list(values.view_as(like).unbind()))


def _alike(layers: Layers, name: str) -> list[Layers]:
    """Layers whose centres can be stacked (same width, same device), together."""
    parts: dict[tuple, Layers] = {}
    for layer in layers:
        center = layer.monkeyjump_center[name]
        parts.setdefault((center.shape, center.device), []).append(layer)
    return list(parts.values())
