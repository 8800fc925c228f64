"""Ranks with batches of different sizes, or with nothing to count = one process on the concatenated batch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import get_peft_model
from torch.nn.parallel import DistributedDataParallel

import monkeyjump as mj
from monkeyjump.tuner.centers.calibrate import centers_initialized
from monkeyjump.tuner.centers.pool_ranks import pool_ranks
from monkeyjump.tuner.centers.sample import TokenCollector
from monkeyjump.tuner.model import require_context
from tests.helpers import VOCAB, adapted, assert_same, gradients, mj_config, padded, routing_state, tiny_llama
from tests.processes import free_port, in_new_processes, join_group

STEPS, INTERVAL = 5, 2
Batch = dict[str, Any]
UNEVEN = ((5, 8), (3,), (11, 2, 7), (6, 6))  # the lengths of the texts of each rank; 0 is a row of padding alone
EMPTY = ((5, 8), (0, 0), (4,), (7, 3))
# the texts, whether they are packed, and the settings of the adapter
CASES: dict[str, tuple[tuple[tuple[int, ...], ...], bool, dict[str, Any]]] = {
    "uneven": (UNEVEN, False, {}),
    "only padding": (EMPTY, False, {}),
    "packed": (UNEVEN, True, {}),
    "packed, only padding": (EMPTY, True, {"ema_assign": "top1"}),
    "sequence": (UNEVEN, False, {"granularity": "sequence"}),
    "sequence, only padding": (EMPTY, False, {"granularity": "sequence"}),
    "pooled, only padding": (EMPTY, False, {"granularity": "sequence", "sequence_token": "mean"}),
}


COMPILED = "as for compiled blocks"  # which take statistics in every forward
CASES[COMPILED] = CASES["uneven"]


def build(case: str) -> Any:
    model = adapted(tiny_llama(2), ema_interval=INTERVAL, **CASES[case][2]).train()
    if case == COMPILED:
        require_context(model).shared_inputs.prepare()
    return model


def compared(case: str, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The routing state, without statistics that nobody has summed over the ranks because nobody will use them."""
    return {name: value for name, value in state.items() if case != COMPILED or "staged" not in name}


def batch_of(case: str, ranks: range, step: int) -> Batch:
    """The texts of these ranks in one batch; a text is a function of its rank, its place and the step alone."""
    texts, packed, _ = CASES[case]
    rows = [
        torch.randint(1, VOCAB, (length,), generator=torch.Generator().manual_seed(1000 * step + 10 * rank + place))
        for rank in ranks
        for place, length in enumerate(texts[rank])
    ]
    if packed:
        return _packed(rows)
    width = max(map(len, rows)) or 4
    ids, labels = padded(rows, "right", width), padded(rows, "right", width, fill=-100)
    labels[:, 0] = -100  # the prompt
    return {"input_ids": ids, "attention_mask": padded([r * 0 + 1 for r in rows], "right", width), "labels": labels}


def _packed(rows: list[torch.Tensor]) -> Batch:
    """One row of all texts and three tokens of padding. Transformers sees packing where there is no cache."""
    tail = torch.zeros(3, dtype=torch.long)
    labels = [torch.cat([row[:1] * 0 - 100, row[1:]]) for row in rows]
    texts = {
        "input_ids": torch.cat([*rows, tail]),
        "labels": torch.cat([*labels, tail - 100]),
        "position_ids": torch.cat([torch.arange(len(row)) for row in [*rows, tail]]),
        "seq_idx": torch.cat([*(row * 0 + place for place, row in enumerate(rows)), tail - 1]).int(),
    }
    return {**{name: values[None] for name, values in texts.items()}, "use_cache": False}


def train(model: Any, inner: Any, case: str, ranks: range, world: int) -> dict[str, Any]:
    """A few steps on the texts of these ranks; the state after each of them, and the gradients of the last."""
    optimizer = torch.optim.SGD([p for p in inner.parameters() if p.requires_grad], lr=0.05)
    states: list[dict[str, torch.Tensor]] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        everything = batch_of(case, range(world), step)
        items = (everything["labels"] != -100).sum()  # of all ranks, as the Trainer counts them
        loss = model(**batch_of(case, ranks, step), num_items_in_batch=items).loss
        (loss * world / len(ranks)).backward()  # the wrapper takes the mean over the ranks
        optimizer.step()
        states.append(routing_state(inner))
    return {"states": states, "gradients": gradients(inner)}


def calibration_of(ranks: Iterable[int], most: int = 99) -> list[Batch]:
    """Batches for the centres; of every rank, only the first `most` tokens are real."""
    found = []
    for rank in ranks:
        left = most
        for step in range(2):
            batch = batch_of("uneven", range(rank, rank + 1), step)
            real = batch["attention_mask"]
            batch["attention_mask"] = real * (real.flatten().cumsum(0).view_as(real) <= left)
            left -= int(batch["attention_mask"].sum())
            found.append(batch)
    return found


def centers_from(batches: list[Batch], tokens: int = 999) -> dict[str, torch.Tensor]:
    model = adapted(tiny_llama(2), center_init="kmeans")
    mj.initialize_centers(model, batches, tokens, progress=False, restarts=2)
    return routing_state(model)


def pooled_kinds(rank: int) -> dict[str, torch.Tensor]:
    """The sample of a model that reads pictures, of which rank r has kept r + 2 tokens of two kinds."""
    collector, blocks = TokenCollector("default", mj_config(), capacity=99), SimpleNamespace(path="layers")
    layer = SimpleNamespace(monkeyjump_center={"default": torch.zeros(1)})
    router: Any = SimpleNamespace(path="layers.0", blocks=blocks, layers={"default": [layer]})
    collector.fingerprint, collector.kept[id(blocks)] = rank, rank + 2
    collector.tokens["layers.0"] = torch.full((99, 1), float(rank))
    collector.kinds[id(blocks)] = torch.arange(rank + 2) % 2
    pool_ranks(collector, [router])
    kept = collector.kept[id(blocks)]
    return {"tokens": collector.tokens["layers.0"][:kept, 0], "kinds": collector.kinds[id(blocks)]}


def use_every_parameter(method: str, rank: int, world: int) -> None:
    """The wrapper raises in a second step if the first one left a parameter without a gradient, also of padding."""
    model = get_peft_model(tiny_llama(4), mj.methods.build(method, task_type="CAUSAL_LM", dropout=0.0))
    if not centers_initialized(model, "default"):
        batches = [batch_of("only padding", range(world), step) for step in range(2)]  # texts for one centre each
        mj.initialize_centers(model, batches, progress=False, restarts=1)
    wrapped = DistributedDataParallel(model.train())
    for step in range(2):
        batch = batch_of("only padding", range(rank, rank + 1), step)
        batch["task_ids"] = torch.zeros(len(batch["input_ids"]), dtype=torch.long)
        wrapped(**batch, num_items_in_batch=torch.tensor(9)).loss.backward()


def worker(rank: int, port: int, folder: str, world: int) -> None:
    join_group(rank, port, world)
    results: dict[str, Any] = {}
    reduced: list[int] = []  # bytes of each sum over the ranks
    all_reduce = dist.all_reduce

    def counted(*args: Any, **kwargs: Any) -> Any:
        reduced.append(args[0].nbytes)
        return all_reduce(*args, **kwargs)

    dist.all_reduce = counted
    for case in CASES:
        inner = build(case)
        # broadcasts of rank 0's buffers would hide centres that differ
        wrapped = DistributedDataParallel(inner, broadcast_buffers=False)
        results[case] = train(wrapped, inner, case, range(rank, rank + 1), world)
        results[case]["reduced"] = reduced.copy()
        reduced.clear()
    for method in mj.methods.names() if world == 2 else ():
        use_every_parameter(method, rank, world)
    results["kinds"], data = pooled_kinds(rank), calibration_of([rank])
    results["shards"], results["the same"] = centers_from(data), centers_from(calibration_of([0]))
    results["one without data"], results["too many"] = centers_from(data * (rank != 1)), centers_from(data, 4 * world)
    torch.save(results, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=[2, 4])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank has found, of two and of four."""
    folder, world = tmp_path_factory.mktemp("ranks"), request.param
    in_new_processes(worker, free_port(), str(folder), world, count=world)
    return [torch.load(folder / f"{rank}.pt") for rank in range(world)]


def test_ranks_are_one_process_on_all_their_texts(found: list[dict[str, Any]]) -> None:
    world = len(found)
    for case in CASES:
        model = build(case)
        alone = train(model, model, case, range(world), world)
        first = found[0][case]
        for other in found[1:]:
            assert_same(first["gradients"], other[case]["gradients"])
            for mine, its in zip(first["states"], other[case]["states"], strict=True):
                assert_same(compared(case, mine), compared(case, its))  # bit for bit, after every forward
        for mine, its in zip(first["states"], alone["states"], strict=True):
            assert_same(compared(case, mine), compared(case, its), rtol=1e-4, atol=1e-5)
        assert_same(first["gradients"], alone["gradients"], rtol=1e-3, atol=1e-5)
        # the centres have moved twice; nothing but sums [D] and counts [] of their experts went over the ranks
        size = sum(value.nbytes for name, value in first["states"][0].items() if "staged" in name)
        assert [one[case]["reduced"] for one in found] == [[size] * (STEPS // INTERVAL)] * world


def test_kmeans_of_all_ranks_is_that_of_one_process(found: list[dict[str, Any]]) -> None:
    """The same tokens in the same order: the same centres, bit for bit where the same batches were read."""
    everyone = range(len(found))
    for case in ("shards", "the same", "one without data", "too many"):
        for other in found[1:]:
            assert_same(found[0][case], other[case])
    assert_same(found[0]["shards"], centers_from(calibration_of(everyone)))
    assert_same(found[0]["the same"], centers_from(calibration_of([0])))
    assert_same(found[0]["one without data"], centers_from(calibration_of(rank for rank in everyone if rank != 1)))
    own = [(torch.full((rank + 2,), float(rank)), torch.arange(rank + 2) % 2) for rank in everyone]
    tokens, kinds = (torch.cat(values) for values in zip(*own, strict=True))
    assert_same(found[-1]["kinds"], {"tokens": tokens, "kinds": kinds})
    # of more tokens than wanted, every rank gives the same number
    assert_same(found[0]["too many"], centers_from(calibration_of(everyone, most=4)), rtol=1e-4, atol=1e-5)
