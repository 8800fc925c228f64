"""Several tasks as one training set: caps and weights per task, temperature sampling, an order fixed by the seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from monkeyjump.errors import ConfigError
from monkeyjump.registry import did_you_mean
from monkeyjump.tasks import cache
from monkeyjump.tasks.encode import Encoded, Encoder
from monkeyjump.tasks.load import SplitData, load_examples
from monkeyjump.tasks.task import Example, Task

_BUFFER = 1000  # streamed examples of a task that are shuffled together


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

    Indexing gives the sequences themselves, task after task; `order(epoch)` gives the indices to visit, as many as
    there are examples. The share of a task is weight * size ** (1/temperature): with weights 1 and temperature 1 every
    example is visited once; otherwise each task goes through its own examples in shuffled order, again and again. A
    high temperature comes near equal shares.
    """

    def __init__(
        self,
        groups: Mapping[str, Sequence[Encoded]],
        *,
        weights: Mapping[str, float] | None = None,
        temperature: float = 1.0,
        seed: int = 0,
    ) -> None:
        empty = [name for name in groups if not groups[name]]
        if empty:
            raise ConfigError(
                [f"task {name!r}: no example is left after encoding. Raise max_length." for name in empty],
                title="bad mixture",
            )
        self.names, self.seed = list(groups), seed
        self.sizes = [len(group) for group in groups.values()]
        self.items = [item for group in groups.values() for item in group]
        top = max(self.sizes)  # relative to the largest, or size ** (1/temperature) could overflow
        raw = [
            weight * (size / top) ** (1 / temperature)
            for size, weight in zip(self.sizes, _by_task(weights, self.names, "weights", 1.0), strict=True)
        ]
        self.shares = [value / sum(raw) for value in raw]

    @classmethod
    def load(
        cls,
        tasks: Sequence[Task],
        encoder: Encoder,
        data_dir: str | Path | None = None,
        *,
        caps: Mapping[str, int] | None = None,
        seed: int = 0,
        **options: Any,
    ) -> Mixture:
        """Load, cap and encode the training rows of tasks. `caps`: most examples of a task, drawn by the seed."""
        tasks = [task for task in tasks if "train" not in task.absent]
        limits = _by_task(caps, [task.name for task in tasks], "caps", None)
        encoder.task_ids = {task.name: index for index, task in enumerate(tasks)}
        groups = {
            task.name: _encoded(encoder, task, data_dir, cap, seed) for task, cap in zip(tasks, limits, strict=True)
        }
        return cls(groups, seed=seed, **options)

    @property
    def lengths(self) -> list[int]:
        return [len(item) for item in self.items]

    def order(self, epoch: int = 0) -> list[int]:
        """The indices of one epoch, shuffled; the same for the same seed and epoch on every machine."""
        visited: list[int] = []
        start = 0
        for name, size, quota in zip(self.names, self.sizes, quotas(len(self), self.shares), strict=True):
            visited += (start + index for index in self._task_order(name, size, quota, epoch))
            start += size
        random.Random(f"{self.seed}/order/{epoch}").shuffle(visited)
        return visited

    def _task_order(self, name: str, size: int, quota: int, epoch: int) -> list[int]:
        """`quota` of a task's examples, from where the epoch before stopped: none comes twice before all came once."""
        first = epoch * quota
        found: list[int] = []
        for turn in range(first // size, (first + quota - 1) // size + 1) if quota else ():
            pass_order = list(range(size))
            random.Random(f"{self.seed}/{name}/{turn}").shuffle(pass_order)
            begin = max(first - turn * size, 0)
            found += pass_order[begin : first + quota - turn * size]
        return found

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: Any) -> Any:
        return self.items[index]


def _encoded(
    encoder: Encoder, task: Task, data_dir: str | Path | None, cap: int | None, seed: int
) -> Sequence[Encoded]:
    """The training sequences of a task, from the cache where they were made before."""
    data, drawn_by = SplitData(task, "train", data_dir, seed), f"{seed}/{task.name}/train"

    def choose() -> list[Example]:
        examples = load_examples(task, "train", data_dir, seed=seed)
        return [examples[index] for index in draw(len(examples), cap, drawn_by)]

    if encoder.identity is None or task.modality != "text":  # nothing to be sure by; pictures are files of their own
        return encoder.encode_all(choose())
    source = data.origin()
    examples = [] if source else choose()

    def make() -> list[np.ndarray | None]:
        items = encoder.encode_all(examples or choose())
        return [np.concatenate([[item.prompt_length], item.input_ids]) for item in items]

    rows = encoder.kept(
        cache.key(encoder.identity, source, cap and (cap, drawn_by), *examples),
        task.name,
        make,
        lambda: source == data.origin(),  # no file has changed while it was read
    )
    task_id = encoder.task_ids[task.name]
    return [Encoded(row[1:], int(row[0]), task_id) for row in rows if row is not None]


def draw(size: int, cap: int | None, key: str) -> list[int]:
    """Which of `size` rows to keep under a cap, in their order. A smaller cap keeps a subset of a larger one's rows."""
    if cap is None or cap >= size:
        return list(range(size))
    shuffled = list(range(size))
    random.Random(key).shuffle(shuffled)
    return sorted(shuffled[:cap])


class StreamingMixture(IterableDataset[Encoded]):
    """A mixture for data that does not fit in memory: draws a task by weight, then that task's next example, for ever.

    Weights are per task (sizes are unknown, so there is no temperature); 1 for tasks not named. The order follows from
    the seed and `set_epoch`. Loader workers take turns: worker i of n yields every n-th example of one common order.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        encoder: Encoder,
        data_dir: str | Path | None = None,
        *,
        weights: Mapping[str, float] | None = None,
        seed: int = 0,
    ) -> None:
        self.tasks = [task for task in tasks if "train" not in task.absent]
        names = [task.name for task in self.tasks]
        self.weights = _by_task(weights, names, "weights", 1.0)
        encoder.task_ids = {name: index for index, name in enumerate(names)}
        self.encoder, self.data_dir, self.seed, self.epoch = encoder, data_dir, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Encoded]:
        worker = get_worker_info()
        skip, step = (worker.id, worker.num_workers) if worker else (0, 1)
        yield from self.encoder.stream(islice(self._examples(), skip, None, step), chunk_size=64)

    def _examples(self) -> Iterator[Example]:
        rng = random.Random(f"{self.seed}/stream/{self.epoch}")
        streams = [self._shuffled(task) for task in self.tasks]
        while True:
            yield next(rng.choices(streams, self.weights)[0])

    def _shuffled(self, task: Task) -> Iterator[Example]:
        """One task's examples: a full buffer gives up a random one for each that arrives."""
        for turn in count():
            rng = random.Random(f"{self.seed}/{task.name}/{self.epoch}/{turn}")
            buffer: list[Example] = []
            for example in SplitData(task, "train", self.data_dir, self.seed).examples(streaming=True):
                if len(buffer) < _BUFFER:
                    buffer.append(example)
                    continue
                place = rng.randrange(_BUFFER)
                yield buffer[place]
                buffer[place] = example
            rng.shuffle(buffer)
            yield from buffer
            if not buffer:
                raise ConfigError(f"task {task.name!r}: its train split has no rows. Leave the task out.")


def _by_task(given: Mapping[str, Any] | None, names: list[str], field: str, default: Any) -> list[Any]:
    """A value for every task; a name that is no task is an error."""
    problems = [
        f"{field}: {name!r} is not a task of this mixture.{did_you_mean(name, names)} It has {', '.join(names)}."
        for name in given or ()
        if name not in names
    ]
    if problems:
        raise ConfigError(problems, title="bad mixture")
    return [(given or {}).get(name, default) for name in names]
