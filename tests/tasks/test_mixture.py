from __future__ import annotations

import random
from collections import Counter
from itertools import islice
from multiprocessing import set_forkserver_preload
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from monkeyjump import tasks
from monkeyjump.errors import ConfigError
from monkeyjump.tasks.batches import BatchSampler, by_tokens
from monkeyjump.tasks.collate import PackingCollator
from monkeyjump.tasks.encode import Encoded, Encoder
from monkeyjump.tasks.mixture import Mixture, StreamingMixture, draw, quotas
from tests.processes import PRELOADED


def group(task_id: int, count: int) -> list[Encoded]:
    return [Encoded(np.arange(3 + (7 * index) % 11), 2, task_id) for index in range(count)]


NO_WORKERS = {"num_workers": 0, "multiprocessing_context": None}
GROUPS = {"small": group(0, 10), "large": group(1, 90)}


def test_plain_epoch_visits_everything_once() -> None:
    mixture = Mixture(GROUPS, seed=1)
    assert sorted(mixture.order(0)) == sorted(mixture.order(1)) == list(range(100))
    assert mixture.order(0) != mixture.order(1)
    assert mixture.order(3) == Mixture(GROUPS, seed=1).order(3) != Mixture(GROUPS, seed=2).order(3)


def test_shares() -> None:
    def visits(**options: Any) -> Counter[int]:
        mixture = Mixture(GROUPS, **options)
        return Counter(mixture[index].task_id for index in mixture.order(0))

    assert visits() == {0: 10, 1: 90}
    assert visits(temperature=1e6) == {0: 50, 1: 50}
    assert visits(temperature=2.0) == {0: 25, 1: 75}  # sqrt(10) : sqrt(90) = 1 : 3
    assert visits(weights={"small": 9.0}) == {0: 50, 1: 50}
    assert quotas(10, [1 / 3, 1 / 3, 1 / 3]) == [4, 3, 3]


def test_no_example_comes_twice_before_all_came_once() -> None:
    mixture = Mixture(GROUPS, weights={"small": 9.0})  # 50 of the large task's 90 in each epoch
    epochs = [[index for index in mixture.order(epoch) if index >= 10] for epoch in range(9)]
    assert len(set(epochs[0])) == 50
    assert set(epochs[0] + epochs[1]) == set(range(10, 100))
    assert set(Counter(index for epoch in epochs for index in epoch).values()) == {5}


def test_caps_are_nested_and_seeded() -> None:
    assert set(draw(100, 10, "k")) < set(draw(100, 20, "k"))
    assert draw(100, 10, "k") != draw(100, 10, "l")
    assert draw(5, 10, "k") == [0, 1, 2, 3, 4]


def test_load_caps_and_numbers_tasks(tokenizer: Any) -> None:
    encoder = Encoder(tokenizer, max_length=400)
    mixture = Mixture.load(tasks.expand("builtin"), encoder, caps={"opinion": 20, "place": 30, "tense": 5})
    assert mixture.sizes[0] == 20
    assert encoder.task_ids == {"opinion": 0, "agreement": 1, "place": 2, "quantifier": 3, "tense": 4}
    assert Counter(item.task_id for item in mixture)[2] == 30


def test_bad_mixtures(tokenizer: Any) -> None:
    with pytest.raises(ConfigError) as error:
        Mixture({**GROUPS, "none": [], "nothing": []})
    assert len(error.value.problems) == 2
    with pytest.raises(ConfigError, match=r"'smal' is not a task of this mixture. Did you mean 'small'"):
        Mixture(GROUPS, weights={"smal": 1.0})
    with pytest.raises(ConfigError, match=r"caps: 'plaice' is not a task of this mixture"):
        Mixture.load(tasks.expand("place"), Encoder(tokenizer), caps={"plaice": 1})


def test_bucketing_saves_padding_and_loses_nothing() -> None:
    mixture = Mixture(GROUPS)
    sampler = BatchSampler.bucketed(mixture.order, mixture.lengths, 8)
    batches = list(sampler)
    assert sorted(index for batch in batches for index in batch) == list(range(100))
    assert len(batches) == len(sampler) == 13

    def padding(groups: list[list[int]]) -> int:
        return sum(
            max(mixture.lengths[i] for i in part) * len(part) - sum(mixture.lengths[i] for i in part) for part in groups
        )

    order = mixture.order(0)
    assert padding(batches) < 0.3 * padding([order[start : start + 8] for start in range(0, 100, 8)])
    sampler.set_epoch(1)
    assert list(sampler) != batches


def test_packing_fits_and_loses_nothing() -> None:
    mixture = Mixture(GROUPS)
    rows = list(BatchSampler.packed(mixture.order, mixture.lengths, 32))
    assert sorted(index for row in rows for index in row) == list(range(100))
    filled = [sum(mixture.lengths[index] for index in row) for row in rows]
    assert max(filled) <= 32
    assert sum(filled) / (32 * len(rows)) > 0.9


def test_streaming_is_the_same_data_in_a_seeded_order(tokenizer: Any) -> None:
    def run(**options: Any) -> list[list[int]]:
        stream = StreamingMixture(tasks.expand("place"), Encoder(tokenizer), **options)
        return [item.input_ids.tolist() for item in islice(stream, len(whole))]

    whole = Mixture.load(tasks.expand("place"), Encoder(tokenizer))
    assert sorted(run()) == sorted(item.input_ids.tolist() for item in whole)
    assert run(seed=0) == run(seed=0) != run(seed=1)


def test_streaming_weights_and_repeat(tokenizer: Any) -> None:
    stream = StreamingMixture(tasks.expand("place,opinion"), Encoder(tokenizer), weights={"opinion": 3.0})
    drawn = Counter(item.task_id for item, _ in zip(stream, range(4000), strict=False))
    assert 0.7 < drawn[1] / 4000 < 0.8
    assert drawn[0] > 400  # more than the task has: it came round again


@pytest.mark.parametrize("start", ["fork", "forkserver"])
def test_workers_share_the_work(tokenizer: Any, start: str) -> None:
    """Workers that are copies of this process, and workers that are sent all they need, as those of "spawn" are."""
    set_forkserver_preload(PRELOADED)
    encoder = Encoder(tokenizer)
    stream, mixture = StreamingMixture(tasks.expand("place"), encoder), Mixture.load(tasks.expand("place"), encoder)
    settings: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": start}
    loader = DataLoader(stream, batch_size=None, **settings)
    alone, together = ([item.input_ids.tolist() for item in islice(source, 100)] for source in (stream, loader))
    assert together == alone
    settings |= {"batch_size": 16, "collate_fn": PackingCollator(0, length=2048, max_sequences=16)}
    loaders: list[Any] = [DataLoader(cast(Any, mixture), **settings | more) for more in (NO_WORKERS, {})]
    for batch, same in zip(*loaders, strict=True):
        assert all(torch.equal(batch[name], same[name]) for name in {**batch, **same})


def test_batches_by_tokens_hold_every_text_once_and_what_is_read_first_has_all_lengths() -> None:
    rng = random.Random(0)
    lengths = [rng.randint(5, 60) for _ in range(2000)]
    batches = list(by_tokens(range(2000), lengths, 500, "key"))
    assert sorted(index for batch in batches for index in batch) == list(range(2000))
    padded = [len(batch) * max(lengths[index] for index in batch) for batch in batches]
    assert max(padded) <= 500
    assert sum(lengths) / sum(padded) > 0.85
    first = [lengths[index] for batch in batches[:8] for index in batch]
    assert min(first) < 15
    assert max(first) > 50
    assert list(by_tokens([0], [900], 500, "key")) == [[0]]  # too long for the budget, and still read
