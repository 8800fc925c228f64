"""Several tasks as one training set: caps and weights per task, temperature sampling, an order fixed by the seed."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from monkeyjump.errors import ConfigError
from monkeyjump.registry import did_you_mean
from monkeyjump.tasks import cache
from monkeyjump.tasks.encode import EncodeCounts, Encoded, Encoder
from monkeyjump.tasks.load import VALIDATION_FRACTION, load_examples, origin
from monkeyjump.tasks.task import Example, Task


def shares(sizes: Sequence[int], weights: Sequence[float], temperature: float) -> list[float]:
    """Each task's share of the mixture: weight * size ** (1/temperature), normalised.

    Temperature 1 is proportional to size, a high one comes near equal shares.
    """
    top = max(sizes)  # relative to the largest, or size ** (1/temperature) could overflow for low temperatures
    raw = [weight * (size / top) ** (1 / temperature) for size, weight in zip(sizes, weights, strict=True)]
    return [value / sum(raw) for value in raw]


def quotas(total: int, parts: Sequence[float]) -> list[int]:
    """Whole numbers near `total * part` that add up to `total`: the largest remainders are rounded up."""
    exact = [total * part for part in parts]
    counts = [int(value) for value in exact]
    by_remainder = sorted(range(len(parts)), key=lambda index: (counts[index] - exact[index], index))
    for index in by_remainder[: total - sum(counts)]:
        counts[index] += 1
    return counts


class Mixture(Sequence[Encoded]):
    """The encoded examples of several tasks, and which of them an epoch visits in what order.

    Indexing gives the sequences themselves, task after task; `order(epoch)` gives the indices to visit. An epoch is
    `epoch_size` long (as many as there are examples, unless told): with weights 1 and temperature 1 it visits every
    example once; otherwise each task gets its share, going through its own examples in shuffled order, again and again.
    """

    def __init__(
        self,
        groups: Mapping[str, Sequence[Encoded]],
        *,
        weights: Mapping[str, float] | None = None,
        temperature: float = 1.0,
        epoch_size: int | None = None,
        seed: int = 0,
        counts: EncodeCounts | None = None,
    ) -> None:
        _check(groups, weights or {}, temperature, epoch_size)
        self.names = list(groups)
        self.sizes = [len(group) for group in groups.values()]
        self.items = [item for group in groups.values() for item in group]
        self.seed = seed
        self.counts = counts or EncodeCounts()
        given = weights or {}
        self.shares = shares(self.sizes, [given.get(name, 1.0) for name in self.names], temperature)
        self.epoch_size = epoch_size or len(self.items)

    @classmethod
    def load(
        cls,
        tasks: Sequence[Task],
        encoder: Encoder,
        data_dir: str | Path | None = None,
        *,
        split: str = "train",
        caps: int | Mapping[str, int] | None = None,
        validation_fraction: float = VALIDATION_FRACTION,
        seed: int = 0,
        **options: Any,
    ) -> Mixture:
        """Load, cap and encode tasks. `caps`: most examples per task, one number or one per name; drawn by the seed."""
        tasks = [task for task in tasks if split not in task.absent]
        limits = dict.fromkeys((task.name for task in tasks), caps) if isinstance(caps, int) else dict(caps or {})
        _check_names(limits, [task.name for task in tasks], "caps")
        encoder.task_ids = {task.name: index for index, task in enumerate(tasks)}
        identity, reading = encoder.identity(), {"seed": seed, "validation_fraction": validation_fraction}
        groups = {
            task.name: _encoded(encoder, identity, task, split, data_dir, limits.get(task.name), reading)
            for task in tasks
        }
        return cls(groups, seed=seed, counts=encoder.counts, **options)

    @property
    def task_ids(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self.names)}

    @property
    def lengths(self) -> list[int]:
        return [len(item) for item in self.items]

    def order(self, epoch: int = 0) -> list[int]:
        """The indices of one epoch, shuffled; the same for the same seed and epoch on every machine."""
        rng = random.Random(f"{self.seed}/order/{epoch}")
        visited: list[int] = []
        start = 0
        for name, size, count in zip(self.names, self.sizes, quotas(self.epoch_size, self.shares), strict=True):
            visited += (start + index for index in self._task_order(name, size, count, epoch))
            start += size
        rng.shuffle(visited)
        return visited

    def _task_order(self, name: str, size: int, count: int, epoch: int) -> list[int]:
        """`count` of a task's examples, from where the epoch before stopped: none comes twice before all came once."""
        first = epoch * count
        found: list[int] = []
        for turn in range(first // size, (first + count - 1) // size + 1) if count else ():
            pass_order = list(range(size))
            random.Random(f"{self.seed}/{name}/{turn}").shuffle(pass_order)
            begin = max(first - turn * size, 0)
            found += pass_order[begin : first + count - turn * size]
        return found

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: Any) -> Any:
        return self.items[index]


def _encoded(
    encoder: Encoder,
    identity: str | None,
    task: Task,
    split: str,
    data_dir: str | Path | None,
    cap: int | None,
    reading: dict[str, Any],
) -> list[Encoded]:
    """The sequences of a task, from the cache where they were made before."""
    drawn_by = f"{reading['seed']}/{task.name}/{split}"

    def choose() -> list[Example]:
        examples = load_examples(task, split, data_dir, **reading)
        return [examples[index] for index in draw(len(examples), cap, drawn_by)]

    source = origin(task, split, data_dir, **reading)
    if identity is None or task.modality != "text":  # nothing to be sure by; pictures are files of their own
        return encoder.encode_all(choose())
    examples = [] if source else choose()
    name = cache.key(identity, source, cap and (cap, drawn_by), *examples)
    content = cache.read(name)
    if content is not None:
        return _restored(encoder, task.name, np.frombuffer(content, dtype=np.int32))
    counts = [encoder.counts.truncated, encoder.counts.dropped]
    before = [count[task.name] for count in counts]
    items = encoder.encode_all(examples or choose())
    if source == origin(task, split, data_dir, **reading):  # no file has changed while it was read
        numbers = [len(items), *(count[task.name] - known for count, known in zip(counts, before, strict=True))]
        numbers += [*map(len, items), *(item.prompt_length for item in items)]
        cache.write(name, np.concatenate([numbers, *(item.input_ids for item in items)]).astype(np.int32).tobytes())
    return items


def _restored(encoder: Encoder, name: str, stored: np.ndarray) -> list[Encoded]:
    """Sequences and counts as `_encoded` has stored them: how many, lengths, lengths of prompts, then all ids."""
    size, *cut = stored[:3].tolist()
    counts = (encoder.counts.encoded, encoder.counts.truncated, encoder.counts.dropped)
    for count, more in zip(counts, (size, *cut), strict=True):
        count.update({name: more} if more else {})
    lengths, prompts = stored[3 : 3 + 2 * size].reshape(2, size)
    ends = (3 + 2 * size + lengths.cumsum()).tolist()
    starts, task_id = [3 + 2 * size, *ends], encoder.task_ids[name]
    return [
        Encoded(stored[start:end], prompt, task_id)
        for start, end, prompt in zip(starts, ends, prompts.tolist(), strict=False)
    ]


def draw(size: int, cap: int | None, key: str) -> list[int]:
    """Which of `size` rows to keep under a cap, in their order. A smaller cap keeps a subset of a larger one's rows."""
    if cap is None or cap >= size:
        return list(range(size))
    shuffled = list(range(size))
    random.Random(key).shuffle(shuffled)
    return sorted(shuffled[:cap])


def _check(
    groups: Mapping[str, Sequence[Encoded]], weights: Mapping[str, float], temperature: float, epoch_size: int | None
) -> None:
    problems = [
        f"task {name!r}: no example is left after encoding. Raise max_length." for name in groups if not groups[name]
    ]
    if not groups:
        problems.append("tasks: none given. Name at least one.")
    problems += [f"weights[{name!r}]={value} must be above 0." for name, value in weights.items() if not value > 0]
    if not temperature > 0:
        problems.append(f"temperature={temperature} must be above 0; 1 is proportional to size.")
    if epoch_size is not None and epoch_size < 1:
        problems.append(f"epoch_size={epoch_size} must be at least 1.")
    if problems:
        raise ConfigError(problems, title="bad mixture")
    _check_names(weights, list(groups), "weights")


def _check_names(given: Mapping[str, Any], known: list[str], field: str) -> None:
    problems = [
        f"{field}: {name!r} is not a task of this mixture.{did_you_mean(name, known)} It has {', '.join(known)}."
        for name in given
        if name not in known
    ]
    if field == "caps":
        problems += [f"caps[{name!r}]={cap} must be at least 1." for name, cap in given.items() if cap < 1]
    if problems:
        raise ConfigError(problems, title="bad mixture")
