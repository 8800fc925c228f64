"""The centres of a training run against a plain reimplementation of the schedule, in Python loops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from peft import PeftModel

import monkeyjump as mj
from tests.helpers import adapted, lm_batch, routed_layers, tiny_llama

Vector = list[float]


def softmax(values: Vector) -> Vector:
    top = max(values)
    e = [math.exp(v - top) for v in values]
    return [v / sum(e) for v in e]


def norm(v: Vector) -> float:
    return math.sqrt(sum(x * x for x in v))


def similarity(u: Vector, c: Vector, kind: str) -> float:
    if kind == "dot":
        return sum(a * b for a, b in zip(u, c, strict=True))
    if kind == "euclidean":
        return -norm([a - b for a, b in zip(u, c, strict=True)])
    if kind == "l1":
        return -sum(abs(a - b) for a, b in zip(u, c, strict=True))
    return sum(a * b for a, b in zip(u, c, strict=True)) / (norm(u) * norm(c))


class Plain:
    """One block: what the paper's equations do with the tokens that enter it."""

    def __init__(self, centers: list[Vector], config: mj.MonkeyJumpConfig) -> None:
        self.centers, self.config = centers, config
        self.staged: tuple[list[Vector], list[int]] | None = None
        self.forwards = 0

    def commit(self) -> None:
        config = self.config
        due = self.forwards > 0 and self.forwards % config.ema_interval == 0 and self.forwards <= config.ema_stop
        if due and self.staged is not None:
            for e, (total, count) in enumerate(zip(*self.staged, strict=True)):
                if count:
                    beta = config.ema_momentum
                    self.centers[e] = [
                        beta * c + (1 - beta) * s / count for c, s in zip(self.centers[e], total, strict=True)
                    ]
        self.forwards += 1

    def forward(self, tokens: list[Vector]) -> list[Vector]:
        """Gates of the tokens; stages sums and counts."""
        self.commit()
        config, experts = self.config, len(self.centers)
        sums, counts = [[0.0] * len(tokens[0]) for _ in range(experts)], [0] * experts
        gates = []
        for h in tokens:
            u = [x / norm(h) for x in h] if config.ema_space == "normalized" else h
            z = [similarity(u, c, config.similarity) for c in self.centers]
            order = sorted(range(experts), key=lambda e: (-z[e], e))
            p = softmax([v / config.temperature for v in z])
            m = [p[e] if e in order[: config.top_k] else 0.0 for e in range(experts)]
            gates.append([v / sum(m) for v in m] if config.renormalize else m)
            for e in order[: 1 if config.ema_assign == "top1" else config.top_k]:
                sums[e] = [a + b for a, b in zip(sums[e], u, strict=True)]
                counts[e] += 1
        self.staged = sums, counts
        return gates


def centers_of(model: PeftModel, block: str) -> torch.Tensor:
    return torch.stack(
        [layer.monkeyjump_center["default"] for path, layer in routed_layers(model).items() if f".{block}." in path]
    )


CASES: dict[str, dict[str, Any]] = {
    "every forward": {"ema_interval": 1},
    "every third": {"ema_interval": 3, "ema_momentum": 0.9},
    "stops after two": {"ema_interval": 1, "ema_stop": 2},
    "never": {"ema_stop": 0},
    "momentum zero": {"ema_interval": 2, "ema_momentum": 0.0},
    "top1": {"ema_interval": 1, "ema_assign": "top1"},
    "top1 of one": {"ema_interval": 1, "top_k": 1, "renormalize": True},
    "raw": {"ema_interval": 1, "ema_space": "raw", "ema_assign": "top1"},
    "dot": {"ema_interval": 1, "similarity": "dot", "temperature": 0.5},
    "euclidean": {"ema_interval": 2, "similarity": "euclidean", "ema_space": "raw"},
    "l1": {"ema_interval": 1, "similarity": "l1", "renormalize": True},
}


@pytest.mark.parametrize("case", CASES)
def test_centres_follow_the_equations(case: str) -> None:
    model = adapted(tiny_llama(2), **CASES[case]).train()
    config = model.peft_config["default"]
    assert isinstance(config, mj.MonkeyJumpConfig)
    seen: dict[str, list[Vector]] = {}
    for block in ("0", "1"):

        def listen(module: Any, args: Any, kwargs: Any, block: str = block) -> None:
            h = args[0] if args else kwargs["hidden_states"]
            mask = torch.ones(3, 8, dtype=torch.bool)
            mask[0, :2] = False
            seen[block] = h.detach().double()[mask].tolist()

        model.get_submodule(f"base_model.model.model.layers.{block}").register_forward_pre_hook(
            listen, with_kwargs=True
        )
    plain = {block: Plain(centers_of(model, block).double().tolist(), config) for block in ("0", "1")}
    start = {block: centers_of(model, block) for block in ("0", "1")}
    for step in range(6):
        batch = lm_batch(seed=step)
        batch["attention_mask"][0, :2] = 0
        with mj.record_routing(model) as trace:
            model(**batch)
        for block, reference in plain.items():
            gates = torch.tensor(reference.forward(seen[block]))
            torch.testing.assert_close(trace.gates(block)[batch["attention_mask"].bool()], gates, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(centers_of(model, block), torch.tensor(reference.centers), rtol=1e-4, atol=1e-5)
    moved = any(not torch.equal(start[block], centers_of(model, block)) for block in start)
    assert moved is (case != "never")
    steps = [int(layer.monkeyjump_step["default"]) for layer in routed_layers(model).values()]
    assert steps == [6] * 6


def test_a_centre_that_no_token_chose_stays() -> None:
    model = adapted(tiny_llama(1), ema_interval=1, top_k=1).train()
    layers = list(routed_layers(model).values())
    batch = lm_batch()
    with torch.no_grad():
        h = torch.nn.functional.normalize(model.get_input_embeddings()(batch["input_ids"]).mean((0, 1)), dim=-1)
        for layer, sign in zip(layers, (1, -1, -1), strict=True):
            layer.monkeyjump_center["default"].copy_(sign * 100 * h + torch.randn(32) * 1e-3)
        # all tokens on the first centre's side
        model.get_input_embeddings().weight.add_(5 * h)
    before = [layer.monkeyjump_center["default"].clone() for layer in layers]
    model(**batch)
    counts = [float(layer.monkeyjump_staged_count["default"]) for layer in layers]
    assert counts == [24.0, 0.0, 0.0]
    model(**batch)
    assert not torch.equal(layers[0].monkeyjump_center["default"], before[0])
    for layer, old in zip(layers[1:], before[1:], strict=True):
        assert torch.equal(layer.monkeyjump_center["default"], old)


def test_centres_receive_no_gradient_and_are_no_parameters() -> None:
    model = adapted().train()
    model(**lm_batch()).loss.backward()
    for layer in routed_layers(model).values():
        center = layer.monkeyjump_center["default"]
        assert not center.requires_grad
        assert center.grad is None
    assert not [name for name, _ in model.named_parameters() if "center" in name]
