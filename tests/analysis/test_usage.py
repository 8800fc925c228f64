"""Expert usage: shares, deviations from the mean over tasks, and their picture."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from monkeyjump.analysis.collect import collect
from monkeyjump.analysis.plots import draw_usage, plot_usage
from monkeyjump.analysis.usage import ExpertUsage, Information
from monkeyjump.errors import ConfigError
from monkeyjump.tuner.trace import ExpertLoad
from tests.evaluation.toys import add_adapter, make_model


def load(**shares: float) -> ExpertLoad:
    return ExpertLoad(list(shares), list(shares.values()), list(shares.values()))


@pytest.fixture
def usage() -> ExpertUsage:
    """Three tasks and two blocks; the second block does not route k."""
    parts = {"one": (0.5, 0.7), "two": (0.4, 0.6), "$three$": (0.3, 0.2)}
    return ExpertUsage(
        {task: {"0": load(q_proj=q, k_proj=1 - q), "1": load(v_proj=1 - v, q_proj=v)} for task, (q, v) in parts.items()}
    )


def test_deviations_are_from_the_mean_over_tasks(usage):
    assert usage.experts == ["q_proj", "k_proj", "v_proj"]
    missing = np.nan
    expected = [[[0.5, 0.5, missing], [0.7, missing, 0.3]], [[0.4, 0.6, missing], [0.6, missing, 0.4]]]
    np.testing.assert_allclose(usage.shares[:2], expected)
    np.testing.assert_allclose(usage.deviations[:, 0, 0], [10, 0, -10], atol=1e-12)
    np.testing.assert_allclose(usage.deviations[:, 1, 2], [-20, -10, 30], atol=1e-12)
    sums = usage.deviations.sum(0)
    np.testing.assert_allclose(sums[~np.isnan(sums)], 0, atol=1e-12)
    alone = ExpertUsage({"one": usage.loads["one"]})
    assert np.nanmax(np.abs(alone.deviations)) == 0


def test_a_task_without_rows_is_left_out():
    batch = {"input_ids": torch.arange(2, 10).unsqueeze(0)}
    usage = collect(add_adapter(make_model()), {"none": [], "some": [batch]}).usage
    assert usage.tasks == ["some"]
    assert usage.shares.shape == (1, 2, 3)
    np.testing.assert_allclose(usage.shares.sum(-1), 1)
    assert usage.to_dict()["dead_experts"] == usage.dead == sum(map(len, usage.dead_experts.values()))


def test_the_picture_shows_the_mean_each_deviation_and_the_bits(usage, tmp_path):
    usage.information = {"0": Information(0.25, 0.3, 0.05, 0.02), "1": Information(0.5, 0.6, 0.1, 0.02)}
    path = plot_usage(usage, tmp_path / "new" / "usage.png", title="Where")
    assert path.read_bytes().startswith(b"\x89PNG")
    drawing = draw_usage(usage, title="Where")
    assert drawing.figure.get_suptitle() == "Where\nlargest deviation from the mean of the tasks: 30.0 points"
    axes = drawing.figure.axes
    titles = ["mean of the tasks", "one", "two", "$three$", "task information"]
    assert [axis.get_title() for axis in axes[:5]] == titles
    images = [axis.images[0] for axis in axes[:4]]
    np.testing.assert_allclose(images[0].get_array().filled(np.nan), usage.shares.mean(0))
    for image, deviation in zip(images[1:], usage.deviations, strict=True):
        np.testing.assert_allclose(image.get_array().filled(np.nan), deviation)
        assert image.get_clim() == pytest.approx((-30, 30))
    assert [bar.get_width() for bar in axes[4].patches] == [0.25, 0.5]
    assert sorted(axis.get_ylabel() for axis in axes[5:]) == ["deviation, percentage points", "share of jumps"]
    assert "block 1: 0.500 of 1.58 bits; 2 of 2" in drawing.findings[1]
    assert drawing.rows[0] == ["one", "0", "q_proj", 0.5, pytest.approx(10), 0.25]


def test_the_picture_of_one_task_shows_its_shares(usage):
    drawing = draw_usage(ExpertUsage({"one": usage.loads["one"]}), title="Where")
    assert drawing.figure.get_suptitle() == "Where"
    assert [axis.get_title() for axis in drawing.figure.axes] == ["one", ""]
    np.testing.assert_allclose(drawing.figure.axes[0].images[0].get_array().filled(np.nan), usage.shares[0])


def test_no_picture_says_why(usage, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="nothing to draw"):
        plot_usage(ExpertUsage({}), tmp_path / "usage.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match="pictures need matplotlib"):
        plot_usage(usage, tmp_path / "usage.png")
