"""Probes: planted information is found, noise is at chance, and every pooling reads the tokens it names."""

from __future__ import annotations

import math

import pytest
import torch

from monkeyjump.analysis.probes import FROM_END, POOLINGS, information_by_position, pooled, probe

pytest.importorskip("sklearn")


def test_planted_information_is_found_and_noise_is_at_chance() -> None:
    generator = torch.Generator().manual_seed(0)
    classes = torch.arange(120) % 3
    noise = torch.randn(120, 40, generator=generator)
    planted = noise.clone()
    planted[torch.arange(120), classes] += 4
    assert probe(planted, classes)[0] > 0.95
    assert abs(probe(noise, classes)[0] - 1 / 3) < 0.12
    assert math.isnan(probe(noise, torch.zeros(120, dtype=torch.long))[0])  # a single task
    few = torch.where(torch.arange(120) < 3, 3, classes)  # of a fourth class there are three rows
    assert probe(planted, few)[0] > 0.95
    assert math.isnan(probe(noise[:6], classes[:6])[0])  # too few rows to hold some out


def test_poolings_read_the_real_tokens_from_the_end() -> None:
    h = torch.arange(1.0, 41.0).view(1, 40, 1).repeat(2, 1, 4)
    mask = torch.ones(2, 40, dtype=torch.bool)
    mask[1, 25:] = False  # a shorter row; padding holds numbers that nobody may read
    h[1, 25:] = 1e6
    found = pooled(h, mask)
    assert list(found) == list(POOLINGS)
    assert [float(found[f"{place} from end"][0, 0]) for place in FROM_END] == [40, 31, 21, 11]
    assert [float(found[f"{place} from end"][1, 0]) for place in FROM_END] == [25, 16, 6, 1]
    assert found["mean"][:, 0].tolist() == [20.5, 13.0]
    assert found["max"][:, 0].tolist() == [40, 25]
    torch.testing.assert_close(found["attention"], found["mean"])  # all directions are the same


def test_the_attention_follows_the_last_token() -> None:
    h = torch.eye(16)[torch.tensor([[0, 1, 1, 0]])]
    found = pooled(h, torch.ones(1, 4, dtype=torch.bool))
    weight = math.exp(4) / (2 * math.exp(4) + 2)
    torch.testing.assert_close(found["attention"][0, :2], torch.tensor([2 * weight, 1 - 2 * weight]))


@pytest.mark.parametrize(("early", "words"), [(0.5, "in 1 of 1 probed"), (0.99, "in 0 of 1 probed")])
def test_information_by_position_in_words(early: float, words: str) -> None:
    accuracies = [0.9, 0.8, 0.7, early, 0.95, 0.5, 0.5]
    rows = [["3", name, value, 0.01] for name, value in zip(POOLINGS, accuracies, strict=True)]
    assert words in information_by_position(rows)
    assert "tells more than the last one in 1" in information_by_position(rows)
