"""Collection: planted routing is found, chance is not, and what is kept has a fixed size."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import monkeyjump as mj
from monkeyjump.analysis import collect as module
from monkeyjump.analysis.collect import Reservoir, collect, spread
from monkeyjump.analysis.usage import task_information
from tests.evaluation.toys import add_adapter, make_model
from tests.helpers import layers_of

TASKS = ("first", "second", "third")


def batches(tokens: torch.Tensor, count: int = 4, rows: int = 8, width: int = 6, seed: int = 0) -> list[dict[str, Any]]:
    """Rows of random tokens of a range; the first row of each batch is padded on the right."""
    generator, found = torch.Generator().manual_seed(seed), []
    for _ in range(count):
        mask = torch.ones(rows, width, dtype=torch.long)
        mask[0, width // 2 :] = 0
        ids = tokens[torch.randint(len(tokens), (rows, width), generator=generator)]
        found.append({"input_ids": ids.where(mask.bool(), torch.tensor(0)), "attention_mask": mask})
    return found


@pytest.fixture(scope="module")
def planted() -> Any:
    """Token ids 2 to 9, 10 to 17, 18 to 25 enter the first block along three axes, on which its centres lie."""
    model = add_adapter(make_model(), top_k=1)
    mj.initialize_centers(model)
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        embedding.zero_()
        for axis in range(3):
            embedding[2 + 8 * axis : 10 + 8 * axis, axis] = 1.0
        embedding[0] = float("nan")  # padding must not count
        for axis, name in enumerate(("q_proj", "k_proj", "v_proj")):
            layer = next(layer for path, layer in layers_of(model).items() if f"0.self_attn.{name}" in path)
            layer.monkeyjump_center["default"].zero_()[axis] = 1.0
    return model


def by_task(axes: tuple[int, ...], **how: Any) -> dict[str, list[dict[str, Any]]]:
    """The batches of three tasks, each of tokens on one axis."""
    return {
        name: batches(torch.arange(2 + 8 * axis, 10 + 8 * axis), seed=axis, **how)
        for name, axis in zip(TASKS, axes, strict=True)
    }


def test_planted_clusters_give_the_expected_shares_and_bits(planted: Any) -> None:
    found = collect(planted, by_task((0, 1, 2)), sample=90)
    np.testing.assert_array_equal(found.usage.shares[:, 0], np.eye(3))
    assert found.usage.information["0"].bits == pytest.approx(math.log2(3))
    assert found.usage.information["0"].noise < 0.1
    assert all(found.usage.gate_entropy[task]["0"] == pytest.approx(0) for task in TASKS)
    assert found.tokens == 3 * 4 * (8 * 6 - 3)
    sample = found.sample
    assert torch.equal(sample.tasks.bincount(), torch.tensor([30, 30, 30]))
    assert torch.equal(sample.gates["0"].argmax(1), sample.tasks)
    assert torch.equal(sample.states["0"].argmax(1), sample.tasks)
    assert torch.equal((sample.token_ids - 2) // 8, sample.tasks)
    assert sample.positions.min() == 0
    assert sample.positions.max() == 5


def test_alike_tasks_and_a_constant_router_say_nothing_about_the_task(planted: Any) -> None:
    tokens = torch.arange(2, 26)
    alike = {name: batches(tokens, count=8, seed=place) for place, name in enumerate(TASKS)}
    found = collect(planted, alike).usage.information["0"]
    assert found.raw_bits > 0
    assert abs(found.bits) < 0.01
    model = add_adapter(make_model(), router="uniform", temperature=1.0)
    constant = collect(model, by_task((0, 1, 2))).usage
    assert [each.bits for each in constant.information.values()] == pytest.approx([0, 0])
    assert collect(planted, by_task((1, 1, 1))).usage.information["0"].bits == 0  # one expert gets all


def test_chance_is_that_of_whole_rows() -> None:
    """Rows whose tokens all go one way tell little, however many tokens they have."""
    generator = np.random.default_rng(0)
    counts, shuffled = np.zeros((2, 2)), [np.zeros((2, 2)) for _ in range(50)]
    for row in range(40):
        jumps = 1000 * np.eye(2)[generator.integers(2)]
        counts[row % 2] += jumps
        for table in shuffled:
            table[generator.integers(2)] += jumps
    found = task_information(counts, shuffled)
    assert abs(found.bits) < 0.1
    assert found.noise > 0.02
    assert task_information(np.diag([5.0, 5.0]), [np.full((2, 2), 2.5)] * 3).bits == pytest.approx(1)


def test_what_is_kept_does_not_grow_with_the_number_of_batches(planted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def held(value: Any) -> int:
        """Bytes of all tensors below a value."""
        if isinstance(value, torch.Tensor):
            return value.numel() * value.element_size()
        if isinstance(value, module._Sums):
            value = vars(value)
        values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        return sum(map(held, values))

    sizes, lengths = [], []
    result = module.Collector.result

    def measured(collector: module.Collector) -> Any:
        own = {name: value for name, value in vars(collector).items() if name != "context"}
        sizes.append(held(own))
        lengths.append(len(collector.probe_tasks))
        return result(collector)

    monkeypatch.setattr(module.Collector, "result", measured)
    for count in (4, 24):
        collect(planted, by_task((0, 1, 2), count=count), sample=60, probed=(1, 10))
    assert 60 * 32 * 4 < sizes[1] <= sizes[0]  # of the last batch less is drawn when many came before
    assert lengths == [30, 30]


def test_every_item_has_the_same_chance_to_stay_in_the_reservoir() -> None:
    counts, runs = np.zeros(50), 3000
    for seed in range(runs):
        reservoir, kept = Reservoir(10, seed), np.full(10, -1)
        for start, size in ((0, 7), (7, 13), (20, 30)):
            slots, items = reservoir.offer(size)
            kept[slots] = start + items
        assert len(set(kept.tolist())) == 10
        counts[kept] += 1
    expected = runs * 10 / 50
    assert np.abs(counts - expected).max() < 5 * math.sqrt(expected * 0.8)


def test_blocks_are_chosen_at_equal_distances_with_the_last_one() -> None:
    names = [str(n) for n in range(30)]
    assert spread(names, 3) == ["10", "19", "29"]
    assert spread(names[:2], 3) == ["0", "1"]
