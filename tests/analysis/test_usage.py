"""Expert usage: shares, deviations from the mean over tasks, and their picture."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from monkeyjump.analysis.plots import plot_usage
from monkeyjump.analysis.usage import ExpertUsage, expert_usage
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
    usage = expert_usage(add_adapter(make_model()), {"none": [], "some": [batch]})
    assert usage.tasks == ["some"]
    assert usage.shares.shape == (1, 2, 3)
    np.testing.assert_allclose(usage.shares.sum(-1), 1)
    assert usage.to_dict()["dead_experts"] == usage.dead


def panels(usage: ExpertUsage, path, monkeypatch) -> tuple[str, list]:
    """The picture's title, and the axes that hold a panel or a colour bar."""
    from matplotlib import pyplot

    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    plot_usage(usage, path, title="Where")
    figure = pyplot.gcf()
    monkeypatch.undo()
    pyplot.close(figure)
    return figure.get_suptitle(), [axis for axis in figure.axes if axis.axison]


def test_the_picture_shows_the_mean_and_each_deviation(usage, tmp_path, monkeypatch):
    path = tmp_path / "new" / "usage.png"
    title, axes = panels(usage, path, monkeypatch)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert title == "Where\nlargest deviation of a task from the mean: 30.0 points"
    assert [axis.get_title() for axis in axes[:4]] == ["mean of the tasks", "one", "two", "$three$"]
    images = [axis.images[0] for axis in axes[:4]]
    np.testing.assert_allclose(images[0].get_array().filled(np.nan), usage.shares.mean(0))
    for image, deviation in zip(images[1:], usage.deviations, strict=True):
        np.testing.assert_allclose(image.get_array().filled(np.nan), deviation)
        assert image.get_clim() == pytest.approx((-30, 30))
    assert sorted(axis.get_ylabel() for axis in axes[4:]) == ["deviation, percentage points", "share of jumps"]


def test_the_picture_of_one_task_shows_its_shares(usage, tmp_path, monkeypatch):
    title, axes = panels(ExpertUsage({"one": usage.loads["one"]}), tmp_path / "usage.png", monkeypatch)
    assert title == "Where"
    assert [axis.get_title() for axis in axes] == ["one", ""]
    np.testing.assert_allclose(axes[0].images[0].get_array().filled(np.nan), usage.shares[0])


def test_no_picture_says_why(usage, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="nothing to draw"):
        plot_usage(ExpertUsage({}), tmp_path / "usage.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match="need matplotlib"):
        plot_usage(usage, tmp_path / "usage.png")
