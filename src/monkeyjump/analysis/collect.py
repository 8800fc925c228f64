"""What a model routes where, gathered batch by batch: sums of fixed size, and a uniform sample of tokens.

Nothing here grows with the number of batches. Of every router there are tables of counts; of the tokens a reservoir of
equal quota for each task, with their states at the entrance of each block and their gates; of the first rows of each
task a few states at chosen blocks, for probes.

Shapes: B rows of a batch, T tokens, D hidden width, E experts of a router, K tasks, N tokens of the sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from monkeyjump.analysis.probes import pooled
from monkeyjump.analysis.usage import ExpertUsage, task_information
from monkeyjump.evaluation.forward import evaluating
from monkeyjump.routing.granularity import IGNORE, KINDS
from monkeyjump.tuner.call import hidden_states
from monkeyjump.tuner.centers.sample import forward_inputs
from monkeyjump.tuner.model import require_context
from monkeyjump.tuner.trace import ExpertLoad, RoutingTrace

if TYPE_CHECKING:
    from monkeyjump.analysis.rows import Rows

Batch = dict[str, Tensor]
SHUFFLES = 20  # random assignments of rows to tasks that say what chance would give


@dataclass
class Sample:
    """Tokens drawn uniformly from those of each task, with what is known about each."""

    tasks: Tensor  # [N], places in the list of tasks
    kinds: Tensor  # [N], places in KINDS
    positions: Tensor  # [N], tokens before it in its row
    token_ids: Tensor  # [N]
    states: dict[str, Tensor] = field(default_factory=dict)  # by block: [N, D] at its entrance
    gates: dict[str, Tensor] = field(default_factory=dict)  # by router: [N, E]


@dataclass
class Collection:
    """All that the figures are drawn from."""

    tasks: list[str]
    usage: ExpertUsage
    sample: Sample
    block_of: dict[str, str]  # the block of each router; a router may belong to one projection of it
    probes: dict[str, dict[str, Tensor]]  # by block and pooling: one state for each probed row
    probe_tasks: Tensor  # the task of each probed row
    tokens: int  # that were read

    def router_of(self, block: str) -> str:
        """The first router of a block."""
        return next(router for router, owner in self.block_of.items() if owner == block)

    def experts_of(self, router: str) -> list[str]:
        return self.usage.loads[self.tasks[0]][router].experts


class Reservoir:
    """Slots for a uniform sample of a stream, by Vitter's algorithm R: each item has the same chance to be in it."""

    def __init__(self, capacity: int, seed: int) -> None:
        self.capacity, self.seen = capacity, 0
        self.random = np.random.default_rng(seed)

    def offer(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The slots that the next `count` items take, and which of them take those; an item may push out an earlier."""
        places = np.arange(self.seen, self.seen + count)
        slots = np.where(places < self.capacity, places, self.random.integers(0, places + 1))
        self.seen += count
        taken = np.flatnonzero(slots < self.capacity)
        last = dict(zip(slots[taken].tolist(), taken.tolist(), strict=True))  # a later item replaces an earlier one
        return np.array(list(last.keys()), dtype=np.int64), np.array(list(last.values()), dtype=np.int64)


def spread(names: Sequence[str], count: int) -> list[str]:
    """So many of these names, at equal distances, with the last one among them."""
    if count >= len(names):
        return list(names)
    places = np.linspace(0, len(names) - 1, count + 1).round().astype(int)[1:]
    return [names[place] for place in places]


class _Sums:
    """Counts of one router by task and kind of token; the last row takes the padding."""

    def __init__(self, experts: Sequence[str], tasks: int, device: torch.device) -> None:
        self.experts, rows = list(experts), tasks * len(KINDS) + 1
        # for every expert the jumps, then the gates; then tokens and the entropy of their gates
        self.table = torch.zeros(rows, 2 * len(experts) + 2, dtype=torch.float64, device=device)
        self.shuffled = torch.zeros(SHUFFLES * tasks, len(experts), dtype=torch.float64, device=device)

    def add(self, gates: Tensor, groups: Tensor, labels: Tensor) -> None:
        gates = gates.detach().double()
        p = gates / gates.sum(-1, keepdim=True).clamp_min(1e-12)
        entropy = -(p * p.clamp_min(1e-12).log2()).sum(-1, keepdim=True)
        jumps = (gates > 0).double()
        values = torch.cat([jumps, gates, torch.ones_like(entropy), entropy], -1)
        real = groups < self.table.shape[0] - 1
        values = torch.where(real.unsqueeze(-1), values, 0.0)  # padding may hold anything, and zero times NaN is NaN
        self.table.index_add_(0, groups.flatten(), values.flatten(0, 1))
        rows = values[..., : gates.shape[-1]].sum(1)  # [B, E]
        self.shuffled.index_add_(0, labels.flatten(), rows.repeat(SHUFFLES, 1))

    def of(self, rows: slice) -> tuple[Any, Any, Any]:
        """The load and mean gate entropy of some groups together, and their jumps."""
        total, experts = self.table[rows].sum(0).cpu(), len(self.experts)
        jumps, gates, tokens = total[:experts], total[experts:-2], total[-2].clamp_min(1)
        share = jumps / jumps.sum().clamp_min(1)
        return ExpertLoad(self.experts, share.tolist(), (gates / tokens).tolist()), float(total[-1] / tokens), jumps


class Collector(RoutingTrace):
    """Listens to routers and at the entrances of blocks; `begin` says what the next forward is about."""

    def __init__(self, model: nn.Module, tasks: Sequence[str], sample: int, probed: tuple[int, int], seed: int) -> None:
        super().__init__()
        self.context = require_context(model)
        self.tasks = list(tasks)
        self.quota = sample // max(1, len(tasks))
        self.probed_blocks, self.probed_rows = probed
        self.sums: dict[str, _Sums] = {}
        self.reservoirs = [Reservoir(self.quota, seed + place) for place in range(len(tasks))]
        self.about = torch.full((3, self.quota * len(tasks)), -1)  # kind, position and id of the sampled tokens
        self.states: dict[str, Tensor] = {}
        self.gates_kept: dict[str, Tensor] = {}
        self.probes: dict[str, dict[str, list[Tensor]]] = {}
        self.probe_tasks: list[int] = []
        self.random = torch.Generator().manual_seed(seed)
        self.tokens = 0
        active = [router for router in self.context.routers() if router.active()]
        self.entrances = {router.key: router.path for router in active if not router.blocks.tower}

    def begin(self, task: int, batch: Batch) -> None:
        """Take the next batch, all of whose rows belong to one task, and draw which of its tokens are kept."""
        ids = batch["input_ids"]
        mask = batch.get("attention_mask", torch.ones_like(ids)).bool()
        self.shape, self.task = tuple(ids.shape), task
        kinds = torch.zeros_like(ids)
        for place, token in self.context.kind_ids:
            kinds[ids == token] = place
        self.groups = torch.where(mask, task * len(KINDS) + kinds, len(self.tasks) * len(KINDS))
        labels = torch.randint(len(self.tasks), (SHUFFLES, len(ids)), generator=self.random)
        self.labels = labels + len(self.tasks) * torch.arange(SHUFFLES).unsqueeze(1)
        real = mask.flatten().nonzero().squeeze(1)
        self.tokens += len(real)
        slots, items = self.reservoirs[task].offer(len(real))
        self.slots = torch.from_numpy(slots) + task * self.quota
        self.picked = real[torch.from_numpy(items)]
        positions = mask.long().cumsum(1) - 1
        self.about[:, self.slots] = torch.stack([kinds, positions, ids]).flatten(1)[:, self.picked]
        room = max(0, self.probed_rows - self.probe_tasks.count(task))
        answers = batch.get("labels", torch.full_like(ids, IGNORE)) != IGNORE
        self.prompts = (mask & ~(answers.cumsum(1) > 0))[:room]  # probes read the prompt alone
        self.probe_tasks += [task] * len(self.prompts) * (self.probed_blocks > 0)

    def record(
        self, block: str, adapter: str, names: Any, gates: Tensor, mask: Tensor | None, *_: Any, **__: Any
    ) -> None:
        """Count what a router has decided. Routers of towers see parts of pictures, which belong to the task alone."""
        own = tuple(gates.shape[:2]) == self.shape
        if block not in self.sums:
            self.sums[block] = _Sums(names, len(self.tasks), gates.device)
        groups, labels = self.groups, self.labels
        if not own:
            groups = torch.full(gates.shape[:2], self.task * len(KINDS))
            groups = groups if mask is None else groups.where(mask.cpu(), len(self.tasks) * len(KINDS))
            labels = labels[:, :1].expand(-1, gates.shape[0])
        self.sums[block].add(gates, groups.to(gates.device), labels.to(gates.device))
        if own and self.quota:
            self._keep(self.gates_kept, block, gates.float())

    def listeners(self) -> list[Any]:
        """Hooks at the entrances of the blocks that route; the caller removes them."""
        blocks = self.entrances if self.quota or self.probed_blocks else {}
        self.probed = spread(list(blocks), self.probed_blocks)
        base = self.context.base
        return [
            base.get_submodule(path).register_forward_pre_hook(partial(self.enter, key, path), with_kwargs=True)
            for key, path in blocks.items()
        ]

    def enter(self, key: str, path: str, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Keep what is wanted of the states that enter a block."""
        h = hidden_states(args, kwargs, path)
        if tuple(h.shape[:2]) != self.shape:
            return
        if self.quota:
            self._keep(self.states, key, h)
        if key in self.probed and len(self.prompts):
            features = pooled(h[: len(self.prompts)].float(), self.prompts.to(h.device))
            for name, rows in features.items():
                self.probes.setdefault(key, {}).setdefault(name, []).append(rows.cpu())

    def _keep(self, places: dict[str, Tensor], key: str, values: Tensor) -> None:
        if key not in places:
            places[key] = torch.zeros(self.about.shape[1], values.shape[-1], dtype=values.dtype)
        kept = values.detach().reshape(-1, values.shape[-1])[self.picked.to(values.device)]
        places[key][self.slots] = kept.to("cpu", places[key].dtype)

    def result(self) -> Collection:
        filled = (self.about[0] >= 0).nonzero().squeeze(1)
        states, gates = ({key: rows[filled] for key, rows in kept.items()} for kept in (self.states, self.gates_kept))
        kinds, positions, ids = self.about[:, filled]
        sample = Sample(filled // max(1, self.quota), kinds, positions, ids, states, gates)
        probes = {block: {name: torch.cat(rows) for name, rows in kept.items()} for block, kept in self.probes.items()}
        owners = sorted(self.entrances, key=len, reverse=True)
        block_of = {key: next((own for own in owners if f"{key}.".startswith(f"{own}.")), key) for key in self.sums}
        probed = torch.tensor(self.probe_tasks, dtype=torch.long)
        return Collection(self.tasks, self._usage(), sample, block_of, probes, probed, self.tokens)

    def _usage(self) -> ExpertUsage:
        size, several = len(KINDS), len(self.tasks) > 1
        found = {
            task: {key: sums.of(slice(place * size, (place + 1) * size)) for key, sums in self.sums.items()}
            for place, task in enumerate(self.tasks)
        }
        loads, entropy = (
            {task: {key: each[part] for key, each in table.items()} for task, table in found.items()} for part in (0, 1)
        )
        information = {
            key: task_information(
                torch.stack([table[key][2] for table in found.values()]).numpy(),
                list(sums.shuffled.cpu().view(SHUFFLES, len(self.tasks), -1).numpy()),
            )
            for key, sums in (self.sums.items() if several else ())
        }
        kinds = {
            kind: {key: sums.of(slice(place, -1, size))[0] for key, sums in self.sums.items()}
            for place, kind in enumerate(KINDS)
            if any(sums.table[place:-1:size, -2].sum() > 0 for sums in self.sums.values())
        }
        known = ExpertUsage(kinds) if self.context.kind_ids else None
        return ExpertUsage(loads, known, entropy, information)


def collect(
    model: nn.Module,
    batches: Mapping[str, Rows | Sequence[Batch]],
    *,
    sample: int = 0,
    probed: tuple[int, int] = (0, 0),
    seed: int = 0,
    progress: Callable[[int], Any] = lambda rows: None,
) -> Collection:
    """Run the batches of each task through the model.

    `sample` says how many tokens are kept, `probed` how many blocks, and rows of each task, probes will look at.
    """
    batches = {task: some for task, some in batches.items() if len(some)}  # a task without a row went nowhere
    collector = Collector(model, list(batches), sample, probed, seed)
    context, device = collector.context, next(model.parameters()).device
    outer, context.trace = context.trace, collector
    handles = collector.listeners()
    pairs = ((task, batch) for task, task_batches in enumerate(batches.values()) for batch in task_batches)
    try:
        with evaluating(model):
            for task, batch in pairs:
                inputs = forward_inputs(context.base, batch, device)
                # prompt_lengths say where prompts end; labels say it too, but they ask for the logits of all tokens
                known = "prompt_lengths" in inputs and not context.encoder_decoder
                inputs.pop("labels" if known else "logits_to_keep", None)
                collector.begin(task, batch)
                model(**inputs)
                progress(len(batch["input_ids"]))
    finally:
        context.trace = outer
        for handle in handles:
            handle.remove()
    return collector.result()
