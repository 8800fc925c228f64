"""Left-padded = right-padded = unpadded: routing of the real tokens, statistics, centres and outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import PeftModel

import monkeyjump as mj
from monkeyjump.tuner.centers import calibrate
from tests.helpers import adapted, assert_same, centers, padded, routing_state, tiny_llama, token_ids

LENGTHS = (5, 9, 7)
WIDTH = 12
MODES: list[dict[str, Any]] = [
    {"granularity": "token"},
    {"granularity": "token", "ema_assign": "top1", "ema_space": "raw", "route_space": "centered"},
    {"granularity": "sequence", "sequence_token": "prompt"},
    {"granularity": "sequence", "sequence_token": "last"},
    {"granularity": "sequence", "sequence_token": "mean"},
    {"granularity": "sequence", "sequence_token": "max"},
    {"granularity": "task"},
]
IDS = ["-".join(str(v) for v in mode.values()) for mode in MODES]


def sentences() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    rows = [token_ids(1, length, seed=i)[0] for i, length in enumerate(LENGTHS)]
    labels = []
    for i, row in enumerate(rows):
        answer = row.clone()
        answer[: 2 + i] = -100
        labels.append(answer)
    return rows, labels


def batch_of(side: str, width: int = WIDTH) -> dict[str, torch.Tensor]:
    rows, labels = sentences()
    mask = padded([torch.ones_like(row) for row in rows], side, width)
    # positions as generate makes them; the pads hold arbitrary tokens, which nothing may read
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    ids = torch.where(mask.bool(), padded(rows, side, width), token_ids(len(rows), width, seed=99))
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": positions,
        "labels": padded(labels, side, width, fill=-100),
    }


def model_of(mode: dict[str, Any]) -> PeftModel:
    model = adapted(tiny_llama(3), ema_interval=1, ema_momentum=0.5, **mode)
    if mode.get("route_space") == "centered":
        rows, _ = sentences()
        mj.initialize_centers(model, [{"input_ids": row[None]} for row in rows], progress=False)
    return model


def with_tasks(batch: dict[str, torch.Tensor], mode: dict[str, Any], ids: list[int]) -> dict[str, torch.Tensor]:
    return {**batch, "task_ids": torch.tensor(ids)} if mode["granularity"] == "task" else batch


def real(values: torch.Tensor, side: str) -> list[torch.Tensor]:
    """The real positions of each row of a padded [B, T, ...] tensor."""
    return [
        row[WIDTH - length :] if side == "left" else row[:length] for row, length in zip(values, LENGTHS, strict=True)
    ]


@pytest.mark.parametrize("mode", MODES, ids=IDS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_gates_and_outputs_of_real_tokens(mode: dict[str, Any], side: str) -> None:
    model = model_of(mode).eval()
    with torch.no_grad(), mj.record_routing(model) as trace:
        logits = real(model(**with_tasks(batch_of(side), mode, [0, 1, 2])).logits, side)
        blocks = {key: real(trace.gates(key), side) for key in trace.blocks()}
        assert list(blocks) == ["0", "1", "2"]
        for i, (row, labels) in enumerate(zip(*sentences(), strict=True)):
            alone = model(**with_tasks({"input_ids": row[None], "labels": labels[None]}, mode, [i])).logits[0]
            torch.testing.assert_close(logits[i], alone, rtol=1e-4, atol=1e-5)
            for key, gates in blocks.items():
                torch.testing.assert_close(gates[i], trace.gates(key)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", MODES[:-1], ids=IDS[:-1])
def test_statistics_and_centres(mode: dict[str, Any]) -> None:
    """Staged sums and counts are sums over the sentences, and the centres that follow from them agree."""
    padded_state, padded_centers = {}, {}
    for side in ("left", "right"):
        model = model_of(mode).train()
        model(**batch_of(side))
        padded_state[side] = routing_state(model)
        model(**batch_of(side))
        padded_centers[side] = centers(model)
    assert_same(padded_state["left"], padded_state["right"], rtol=1e-4, atol=1e-5)
    assert_same(padded_centers["left"], padded_centers["right"], rtol=1e-4, atol=1e-5)
    alone: dict[str, torch.Tensor] = {}
    for row, labels in zip(*sentences(), strict=True):
        model = model_of(mode).train()
        model(input_ids=row[None], labels=labels[None])
        for key, value in routing_state(model).items():
            if "staged" in key:
                alone[key] = alone.get(key, torch.zeros(())) + value
    assert_same(alone, {k: v for k, v in padded_state["left"].items() if k in alone}, rtol=1e-4, atol=1e-5)
    counts = [float(v) for k, v in alone.items() if "count" in k]
    queries = sum(LENGTHS) if mode["granularity"] == "token" else len(LENGTHS)
    jumps = 1 if mode.get("ema_assign") == "top1" else 2
    assert sum(counts) == 3 * jumps * queries


@pytest.mark.parametrize("mode", MODES[:-1], ids=IDS[:-1])
def test_kmeans_sample_does_not_depend_on_padding(mode: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    samples = []
    cluster = calibrate.spherical_kmeans

    def spy(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        samples.append(x)
        return cluster(x, *args, **kwargs)

    monkeypatch.setattr(calibrate, "spherical_kmeans", spy)
    rows, labels = sentences()
    alone = [{"input_ids": r[None], "labels": y[None]} for r, y in zip(rows, labels, strict=True)]
    found = []
    for data in ([batch_of("left")], [batch_of("right")], alone):
        model = model_of({**mode, "center_init": "kmeans", "route_space": "raw"})
        mj.initialize_centers(model, data, num_tokens=1000, progress=False, restarts=2)
        found.append(centers(model))
    assert_same(found[0], found[1], rtol=1e-4, atol=1e-4)
    # one by one the tokens arrive in another order: the same set of states
    ordered = [torch.stack([block[block[:, 0].argsort()] for block in sample]) for sample in samples]
    torch.testing.assert_close(ordered[0], ordered[2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", MODES[:-1], ids=IDS[:-1])
def test_a_row_of_padding_alone_counts_for_nothing(mode: dict[str, Any]) -> None:
    batch = batch_of("right")
    dead = {
        k: torch.cat([v, torch.zeros_like(v[:1]) if k != "labels" else torch.full_like(v[:1], -100)])
        for k, v in batch.items()
    }
    states = []
    for candidate in (batch, dead):
        model = model_of(mode).train()
        model(**candidate)
        states.append(routing_state(model))
    # one row more is another product: sums of raw states, of about 10, in another order
    assert_same(states[0], states[1], rtol=1e-4, atol=1e-5)
