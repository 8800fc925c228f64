"""Two processes = one process on the concatenated batch: centres, statistics and gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import monkeyjump as mj
from tests.helpers import adapted, assert_same, gradients, lm_batch, routing_state, tiny_llama
from tests.processes import free_port, in_new_processes, join_group
from tests.replay import replaying

STEPS = 4
ADALORA: dict[str, Any] = {
    **{"adapter": "adalora", "r": 2, "target_r": 1, "total_step": STEPS},
    **{"placement": "projection", "router": "linear", "shared_modules": None},
}
CASES: dict[str, dict[str, Any]] = {
    "plain": {"broadcast_buffers": True},
    "buffers left alone": {"broadcast_buffers": False},
    "checkpointing": {"broadcast_buffers": True, "use_reentrant": False},
    "checkpointing, buffers left alone": {"broadcast_buffers": False, "use_reentrant": True},
    "sequence": {"broadcast_buffers": False, "granularity": "sequence"},
    "lora_fa, top1": {"broadcast_buffers": True, "adapter": "lora_fa", "ema_assign": "top1", "top_k": 1},
    "two micro-batches": {"broadcast_buffers": True, "accumulate": 2},
    "captured": {"broadcast_buffers": True, "captured": True},
    "captured, two micro-batches": {"broadcast_buffers": False, "accumulate": 2, "captured": True},
    "captured, learned": {"broadcast_buffers": False, "placement": "projection", "router": "linear", "captured": True},
    "adalora experts": {"broadcast_buffers": True, "accumulate": 2, "score_per_token": True, **ADALORA},
    "adalora experts, buffers left alone": {"broadcast_buffers": False, "score_per_token": True, **ADALORA},
}
NOT_OURS = ("broadcast_buffers", "use_reentrant", "accumulate", "captured")


def build(case: str) -> Any:
    settings = CASES[case]
    model = adapted(tiny_llama(2), ema_interval=1, **{k: v for k, v in settings.items() if k not in NOT_OURS})
    if "use_reentrant" in settings:
        model.gradient_checkpointing_enable({"use_reentrant": settings["use_reentrant"]})
        model.enable_input_require_grads()
    return model.train()


def train(model: Any, inner: Any, case: str, rows: slice) -> dict[str, dict[str, torch.Tensor]]:
    """A few steps on the given rows of every batch; what the model ends with."""
    optimizer = torch.optim.SGD([p for p in inner.parameters() if p.requires_grad], lr=0.05)
    accumulate = CASES[case].get("accumulate", 1)
    grads: dict[str, torch.Tensor] = {}
    for step in range(STEPS):
        batch = {key: value[rows] for key, value in lm_batch(batch=4, seed=step).items()}
        loss = model(**batch).loss / accumulate
        if accumulate > 1 and (step + 1) % accumulate and isinstance(model, DistributedDataParallel):
            with model.no_sync():
                loss.backward()
        else:
            loss.backward()
        if (step + 1) % accumulate == 0:
            grads = gradients(inner)
            optimizer.step()
            mj.allocate_ranks(inner)
            optimizer.zero_grad()
    scores = {name: buffer.clone() for name, buffer in inner.named_buffers() if "sensitivity" in name}
    return {"gradients": grads, "routing": routing_state(inner), "scores": scores}


def worker(rank: int, port: int, folder: str) -> None:
    join_group(rank, port, 2)
    results: dict[str, Any] = {}
    for case, settings in CASES.items():
        inner = build(case)
        model = DistributedDataParallel(inner, broadcast_buffers=settings["broadcast_buffers"])
        rows = slice(2 * rank, 2 * rank + 2)
        if settings.get("captured"):
            with replaying(inner, [inner.get_base_model().model]) as report:
                results[case] = train(model, inner, case, rows)
            assert (report.graphs, report.replayed) == (1, STEPS - 1)  # the first forward of a shape runs as it is
        else:
            results[case] = train(model, inner, case, rows)
    kmeans = adapted(tiny_llama(2), center_init="kmeans")
    data = [{"input_ids": lm_batch(seed=10 * rank + s)["input_ids"]} for s in range(2)]  # each rank has its own data
    mj.initialize_centers(kmeans, data, progress=False, restarts=2)
    results["kmeans"] = routing_state(kmeans)
    torch.save(results, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def test_two_processes_equal_one(tmp_path: Path) -> None:
    in_new_processes(worker, free_port(), str(tmp_path), count=2)
    one, two = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    for case, settings in CASES.items():
        model = build(case)
        alone = train(model, model, case, slice(0, 4))
        assert_same(one[case]["routing"], two[case]["routing"])  # bit for bit: nothing may drift apart
        assert_same(one[case]["gradients"], two[case]["gradients"])
        assert_same(one[case]["scores"], two[case]["scores"])
        assert bool(alone["scores"]) is ("target_r" in settings)
        assert_same(alone["routing"], one[case]["routing"], rtol=1e-4, atol=1e-5)
        assert_same(alone["gradients"], one[case]["gradients"], rtol=1e-3, atol=1e-5)
        assert_same(alone["scores"], one[case]["scores"], rtol=1e-2, atol=1e-7)
    assert_same(one["kmeans"], two["kmeans"])
