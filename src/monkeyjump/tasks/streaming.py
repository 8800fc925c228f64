"""A mixture for data that does not fit in memory: one pass over the sources at a time, shuffled within a buffer."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

from torch.utils.data import IterableDataset, get_worker_info

from monkeyjump.errors import ConfigError
from monkeyjump.tasks.encode import Encoded, Encoder
from monkeyjump.tasks.load import stream_examples
from monkeyjump.tasks.mixture import _check_names
from monkeyjump.tasks.task import Example, Task


class StreamingMixture(IterableDataset[Encoded]):
    """Draws a task by weight, then that task's next example, until `repeat` ends it: every task once, or for ever.

    Weights are per task (sizes are unknown, so there is no temperature); 1 for tasks not named. The order follows from
    the seed and `set_epoch`. Loader workers take turns: worker i of n yields every n-th example of one common order.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        encoder: Encoder,
        data_dir: str | Path | None = None,
        *,
        split: str = "train",
        weights: Mapping[str, float] | None = None,
        buffer_size: int = 1000,
        repeat: bool = False,
        seed: int = 0,
    ) -> None:
        problems = [
            f"weights[{name!r}]={value} must be above 0." for name, value in (weights or {}).items() if value <= 0
        ]
        if buffer_size < 1:
            problems.append(f"buffer_size={buffer_size} must be at least 1 (1: no shuffling).")
        if problems:
            raise ConfigError(problems, title="bad mixture")
        tasks = [task for task in tasks if split not in task.absent]
        _check_names(weights or {}, [task.name for task in tasks], "weights")
        encoder.task_ids = {task.name: index for index, task in enumerate(tasks)}
        self.tasks, self.encoder, self.data_dir, self.split = list(tasks), encoder, data_dir, split
        self.weights = [(weights or {}).get(task.name, 1.0) for task in tasks]
        self.buffer_size, self.repeat, self.seed = buffer_size, repeat, seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Encoded]:
        worker = get_worker_info()
        skip, step = (worker.id, worker.num_workers) if worker else (0, 1)
        yield from self.encoder.stream(islice(self._examples(), skip, None, step), chunk_size=64)

    def _examples(self) -> Iterator[Example]:
        rng = random.Random(f"{self.seed}/stream/{self.epoch}")
        streams = [self._shuffled(task) for task in self.tasks]
        alive = list(range(len(self.tasks)))
        while alive:
            chosen = rng.choices(alive, [self.weights[index] for index in alive])[0]
            example = next(streams[chosen], None)
            if example is None:
                alive.remove(chosen)
            else:
                yield example

    def _shuffled(self, task: Task) -> Iterator[Example]:
        """One task's examples: a full buffer gives up a random one for each that arrives."""
        turn = 0
        while True:
            rng = random.Random(f"{self.seed}/{task.name}/{self.epoch}/{turn}")
            buffer: list[Example] = []
            seen = 0
            for example in stream_examples(task, self.split, self.data_dir, seed=self.seed, streaming=True):
                seen += 1
                if len(buffer) < self.buffer_size:
                    buffer.append(example)
                    continue
                place = rng.randrange(self.buffer_size)
                yield buffer[place]
                buffer[place] = example
            rng.shuffle(buffer)
            yield from buffer
            if not seen:
                raise ConfigError(f"task {task.name!r}: its {self.split} split has no rows. Leave the task out.")
            if not self.repeat:
                return
            turn += 1
