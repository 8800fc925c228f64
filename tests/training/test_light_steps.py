"""Clipping and AdamW with few calls of the host are torch's own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from monkeyjump.training.light_steps import LightAdamW, clip_gradients

SHAPES = [(4, 3), (7,), (2, 2, 2), ()]


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def give_gradients(found: list[nn.Parameter], step: int, without: int | None = None) -> None:
    generator = torch.Generator().manual_seed(step)
    for place, parameter in enumerate(found):
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = None if place == without else gradient


def groups(found: list[nn.Parameter]) -> list[dict[str, object]]:
    return [{"params": found[:2], "weight_decay": 0.1}, {"params": found[2:], "weight_decay": 0.0}]


def values(found: list[nn.Parameter]) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in found]


@pytest.mark.parametrize("most", [0.1, 1e6])
def test_clipping_is_that_of_torch(most: float) -> None:
    ours, theirs = parameters(), parameters()
    give_gradients(ours, 1, without=1)
    give_gradients(theirs, 1, without=1)
    norm, expected = clip_gradients(ours, most), nn.utils.clip_grad_norm_(theirs, most)
    assert torch.equal(norm, expected)
    found, expected_ones = ([p.grad for p in own if p.grad is not None] for own in (ours, theirs))
    assert len(found) == len(SHAPES) - 1
    for mine, other in zip(found, expected_ones, strict=True):
        assert torch.equal(mine, other)


def test_nothing_to_clip_has_no_norm() -> None:
    assert clip_gradients(parameters(), 1.0) == 0


def test_steps_are_those_of_torch_with_changing_rates_missing_gradients_and_a_resume() -> None:
    ours, theirs = parameters(), parameters()
    light = LightAdamW(groups(ours), lr=0.1, fused=True)
    plain = torch.optim.AdamW(groups(theirs), lr=0.1, fused=True)
    for step in range(12):
        for optimizer, found in ((light, ours), (plain, theirs)):
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / (step + 1)
            give_gradients(found, step, without=2 if step in (0, 5) else None)
            optimizer.step()
        if step == 7:  # as a checkpoint does: into another optimizer, over the same parameters
            kept = copy.deepcopy(light.state_dict())
            light = LightAdamW(groups(ours), lr=1.0, fused=True)
            light.load_state_dict(kept)
        if step == 9:
            light.load_state_dict(copy.deepcopy(light.state_dict()))
        for mine, other in zip(values(ours), values(theirs), strict=True):
            assert torch.equal(mine, other)
    for mine, other in zip(ours, theirs, strict=True):
        for name in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(light.state[mine][name], plain.state[other][name])


def test_what_it_does_not_know_is_left_to_torch() -> None:
    ours, theirs = parameters(), parameters()
    for found, kind in ((ours, LightAdamW), (theirs, torch.optim.AdamW)):
        optimizer = kind(found, lr=0.1, amsgrad=True)  # neither fused nor plain
        for step in range(3):
            give_gradients(found, step)
            optimizer.step()
    for mine, other in zip(values(ours), values(theirs), strict=True):
        assert torch.equal(mine, other)
