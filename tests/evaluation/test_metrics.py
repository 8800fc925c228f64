"""Numbers against scipy and against published values."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from monkeyjump.evaluation import metrics
from monkeyjump.tasks.cells import most_frequent


def test_the_most_frequent_answer():
    assert most_frequent(["b", "a", "c", "a"]) == "a"
    assert most_frequent(["b", "a"]) == "b"  # of equally frequent ones the first


@pytest.mark.parametrize("ties", [2, 5, 1000])
@pytest.mark.parametrize("n", [2, 3, 50, 400])
def test_spearman_equals_scipy(n, ties):
    rng = np.random.default_rng(n * ties)
    x = np.append(rng.integers(0, ties, n - 1), ties).astype(float)  # not constant
    y = np.append(x[:-1] + rng.integers(0, ties, n - 1), -1.0)
    assert metrics.spearman(list(x), list(y)) == pytest.approx(stats.spearmanr(x, y).statistic, abs=1e-12)


def test_spearman_of_a_constant_is_undefined():
    assert math.isnan(metrics.spearman([1, 1, 1], [1, 2, 3]))
    assert math.isnan(metrics.spearman([1], [2]))


def test_resampled_spearman_is_spearman_of_resamples():
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 6, 40).astype(float), rng.normal(size=40)
    replicates = metrics.resampled_spearman(list(x), list(y), seed=7)
    draws = np.random.default_rng(7)
    for replicate in replicates[:20]:
        index = draws.integers(0, 40, 40)
        assert replicate == pytest.approx(stats.spearmanr(x[index], y[index]).statistic, abs=1e-12)


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),  # Newcombe 1998, table I, method 3
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_has_the_published_values(successes, n, low, high):
    interval = metrics.wilson(successes, n)
    assert interval.low == pytest.approx(low, abs=5e-5)
    assert interval.high == pytest.approx(high, abs=5e-5)


@pytest.mark.parametrize("n", [1, 7, 100])
def test_wilson_is_symmetric_and_inside(n):
    for successes in range(n + 1):
        interval, mirrored = metrics.wilson(successes, n), metrics.wilson(n - successes, n)
        assert 0 <= interval.low <= successes / n <= interval.high <= 1
        assert interval.low == pytest.approx(1 - mirrored.high, abs=1e-12)
    assert math.isnan(metrics.wilson(0, 0).low)


def test_bootstrap_intervals_are_deterministic_and_sensible():
    rng = np.random.default_rng(1)
    tasks = [list(rng.normal(size=300)), list(rng.normal(3, 2, size=500))]
    replicates = [metrics.resampled_means([values], seed)[0] for seed, values in enumerate(tasks)]
    array = np.asarray(tasks[0])
    draws = np.random.default_rng(0)
    expected = [array[draws.integers(0, 300, 300)].mean() for _ in range(metrics.RESAMPLES)]
    assert np.array_equal(replicates[0], expected)
    assert not np.array_equal(replicates[0], metrics.resampled_means(tasks[:1], 1)[0])
    assert np.array_equal(replicates[0], metrics.resampled_means([tasks[1][:300], tasks[0]], 0)[1])
    interval = metrics.percentile_interval(np.mean(replicates, axis=0))
    center = (np.mean(tasks[0]) + np.mean(tasks[1])) / 2
    error = math.sqrt(np.var(tasks[0]) / 300 + np.var(tasks[1]) / 500) / 2
    assert interval.low == pytest.approx(center - 1.96 * error, abs=0.3 * error)
    assert interval.high == pytest.approx(center + 1.96 * error, abs=0.3 * error)
    x = list(rng.normal(size=200))
    y = [value + noise for value, noise in zip(x, rng.normal(size=200), strict=True)]
    found = metrics.percentile_interval(metrics.resampled_spearman(x, y, seed=2))
    assert found.low < metrics.spearman(x, y) < found.high


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 9, 30, 999, 5000])
def test_student_equals_scipy(freedom):
    tolerance = 1e-9 if freedom <= 1000 else 2e-4
    for t in (-3.0, -0.2, 0.0, 0.7, 2.5, 9.0):
        assert metrics.student_cdf(t, freedom) == pytest.approx(stats.t.cdf(t, freedom), abs=tolerance)
    for p in (0.01, 0.5, 0.975):
        assert metrics.student_quantile(p, freedom) == pytest.approx(stats.t.ppf(p, freedom), abs=1e-3, rel=1e-6)


def test_paired_difference_is_the_paired_t_test():
    a, b = [0.56, 0.57, 0.55, 0.58, 0.54], [0.55, 0.55, 0.56, 0.56, 0.53]
    found, expected = metrics.paired_difference(a, b), stats.ttest_rel(a, b)
    interval = expected.confidence_interval(0.95)
    assert found.mean == pytest.approx(0.01)
    assert found.mean / found.standard_error == pytest.approx(expected.statistic)
    assert found.p_value == pytest.approx(expected.pvalue)
    assert (found.interval.low, found.interval.high) == pytest.approx((interval.low, interval.high))
    together, wider = metrics.paired_difference(a, b, 4), expected.confidence_interval(1 - 0.05 / 4)
    assert (together.interval.low, together.interval.high) == pytest.approx((wider.low, wider.high))
    assert together.p_value == found.p_value


def test_paired_difference_at_the_edges():
    assert metrics.paired_difference([1, 1], [0, 0]).p_value == 0.0
    assert metrics.paired_difference([1, 1], [1, 1]).p_value == 1.0
    alone = metrics.paired_difference([0.5], [0.25])
    assert alone.mean == 0.25
    assert math.isnan(alone.standard_error)


def test_least_squares_of_one_column_is_a_regression():
    x, y = [0.0, 1.0, 2.0, 3.0, 5.0], [0.1, 0.8, 2.3, 2.9, 5.2]
    ((slope, interval),) = metrics.least_squares([[value] for value in x], y)
    expected = stats.linregress(x, y)
    margin = stats.t.ppf(0.975, 3) * expected.stderr
    assert slope == pytest.approx(expected.slope)
    assert (interval.low, interval.high) == pytest.approx((slope - margin, slope + margin))


def test_least_squares_tells_columns_apart():
    design = [[a, b, c] for a in (0, 1) for b in (0, 1) for c in (0, 1) if a + b + c]
    found = metrics.least_squares(design, [5 + 2 * a - b + 0.5 * c for a, b, c in design])
    assert [effect for effect, _ in found] == pytest.approx([2, -1, 0.5])
    assert all(interval.high - interval.low < 1e-9 for _, interval in found)
    assert metrics.least_squares([row for row in design if sum(row) == 2] * 2, [1.0] * 6) == []  # one size: no constant
    assert metrics.least_squares(design[:4], [1.0] * 4) == []
