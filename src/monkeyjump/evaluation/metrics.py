"""Numbers from predictions: the metrics, how sure they are, and differences between paired results.

Everything is deterministic: resampling is drawn from the given seed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
RESAMPLES = 1000
_INDICES_AT_ONCE = 2**16  # what fits in a processor's cache


@dataclass(frozen=True, slots=True)
class Interval:
    """A 95 % confidence interval."""

    low: float
    high: float


def mean(values: Sequence[float]) -> float:
    return float(np.mean(np.asarray(values, dtype=np.float64))) if len(values) else math.nan


def spearman(x: Sequence[float], y: Sequence[float]) -> float:
    """Spearman's rank correlation, equal values sharing their mean rank; NaN where one side is constant."""
    return _correlation(_ranks(*_codes(x)), _ranks(*_codes(y))) if len(x) > 1 else math.nan


def wilson(successes: float, n: int) -> Interval:
    """Wilson's score interval of a proportion: inside [0, 1] and sensible at 0, 1 and small n."""
    if n <= 0:
        return Interval(math.nan, math.nan)
    p, z = successes / n, NormalDist().inv_cdf(0.975)
    denominator = 1 + z * z / n
    center = (p + z * z / (2 * n)) / denominator
    half = z / denominator * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    # At p = 0 and p = 1 the bound is the edge itself; rounding must not push it past the estimate.
    return Interval(min(p, max(0.0, center - half)), max(p, min(1.0, center + half)))


def resampled_means(rows: Sequence[Sequence[float]], seed: int = 0) -> Floats:
    """Bootstrap replicates [m, RESAMPLES] of the means of m rows of n values, drawn together."""
    arrays, rng = [np.asarray(row, dtype=np.float64) for row in rows], np.random.default_rng(seed)
    n = len(arrays[0])
    draws = max(1, _INDICES_AT_ONCE // n)
    sizes = [min(draws, RESAMPLES - start) for start in range(0, RESAMPLES, draws)]
    drawn = (rng.integers(0, n, (size, n)) for size in sizes)
    return np.concatenate([[array[indices].mean(1) for array in arrays] for indices in drawn], 1)


def resampled_spearman(x: Sequence[float], y: Sequence[float], seed: int = 0) -> Floats:
    """Bootstrap replicates of Spearman's correlation; NaN where a draw is constant."""
    # Which values are equal does not change with the draw: ranks come from counting, not from sorting each time.
    (codes_x, nx), (codes_y, ny), rng = _codes(x), _codes(y), np.random.default_rng(seed)
    draws = (rng.integers(0, len(x), len(x)) for _ in range(RESAMPLES))
    return np.array([_correlation(_ranks(codes_x[index], nx), _ranks(codes_y[index], ny)) for index in draws])


def percentile_interval(replicates: Floats) -> Interval:
    """The middle 95 % of bootstrap replicates; NaN replicates are left out."""
    good = replicates[~np.isnan(replicates)]
    if good.size == 0:
        return Interval(math.nan, math.nan)
    low, high = np.quantile(good, [(1 - 0.95) / 2, (1 + 0.95) / 2])
    return Interval(float(low), float(high))


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """Mean of a - b over pairs, its standard error, Student's interval and two-sided p-value (NaN below two pairs)."""

    mean: float
    standard_error: float
    interval: Interval
    p_value: float
    n: int


def paired_difference(a: Sequence[float], b: Sequence[float], comparisons: int = 1) -> PairedDifference:
    """Compare two results pair by pair: the same seeds, or the same examples.

    The interval has 95 %. Where several are read together it is widened, so that all `comparisons` of them hold the
    true values with 95 % (Bonferroni).
    """
    differences = np.asarray(a, dtype=np.float64) - np.asarray(b, dtype=np.float64)
    n, center = len(differences), mean(list(differences))
    if n < 2:
        return PairedDifference(center, math.nan, Interval(math.nan, math.nan), math.nan, n)
    error = float(differences.std(ddof=1) / math.sqrt(n))
    half = student_quantile(1 - 0.025 / comparisons, n - 1) * error
    p_value = 2 * (1 - student_cdf(abs(center) / error, n - 1)) if error > 0 else float(center == 0)
    return PairedDifference(center, error, Interval(center - half, center + half), p_value, n)


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for their number (Holm, 1979): below a level with the chance of one false alarm among all."""
    found, highest = [math.nan] * len(p_values), 0.0
    ordered = sorted((p, place) for place, p in enumerate(p_values) if not math.isnan(p))
    for rank, (p, place) in enumerate(ordered):
        highest = max(highest, min(1.0, p * (len(ordered) - rank)))
        found[place] = highest
    return found


def student_cdf(t: float, freedom: int) -> float:
    """Student's distribution for whole degrees of freedom (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    if freedom > 1000:  # the normal is within 2e-4 there, and the series gets long
        return NormalDist().cdf(t)
    theta, odd = math.atan(abs(t) / math.sqrt(freedom)), freedom % 2
    term = math.cos(theta) if odd else 1.0
    total = term if freedom > 1 else 0.0
    for k in range(2 + odd, freedom - 1, 2):
        term *= math.cos(theta) ** 2 * (k - 1) / k
        total += term
    inside = math.sin(theta) * total
    return 0.5 + math.copysign((theta + inside) / math.pi if odd else inside / 2, t)


def student_quantile(p: float, freedom: int) -> float:
    """The t below which Student's distribution has mass p, by bisection."""
    low, high = -1e4, 1e4
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if student_cdf(middle, freedom) < p else (low, middle)
    return (low + high) / 2


def least_squares(columns: Sequence[Sequence[float]], values: Sequence[float]) -> list[tuple[float, Interval]]:
    """What each column adds to the values, beside a constant, with Student's interval of what is left unexplained.

    Nothing where the lines are too few, or say too little, to tell the columns apart.
    """
    design = np.column_stack([np.ones(len(values)), np.asarray(columns, dtype=np.float64)])
    freedom = len(design) - design.shape[1]
    if freedom < 1 or np.linalg.matrix_rank(design) < design.shape[1]:
        return []
    effects = np.linalg.lstsq(design, np.asarray(values, dtype=np.float64), rcond=None)[0]
    left = np.asarray(values) - design @ effects
    errors = np.sqrt(left @ left / freedom * np.diag(np.linalg.inv(design.T @ design)))
    margins = student_quantile(0.975, freedom) * errors
    return [
        (float(effect), Interval(float(effect - margin), float(effect + margin)))
        for effect, margin in zip(effects[1:], margins[1:], strict=True)
    ]


def _codes(values: Sequence[float]) -> tuple[npt.NDArray[np.int64], int]:
    """Values as 0..U-1 in their order, equal values equal, and U."""
    unique, codes = np.unique(np.asarray(values, dtype=np.float64), return_inverse=True)
    return codes.astype(np.int64).reshape(-1), len(unique)


def _ranks(codes: npt.NDArray[np.int64], unique: int) -> Floats:
    """Ranks from 1; equal values share the mean of the ranks they cover."""
    counts = np.bincount(codes, minlength=unique)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[codes]


def _correlation(x: Floats, y: Floats) -> float:
    x, y = x - x.mean(), y - y.mean()
    scale = math.sqrt(float(x @ x) * float(y @ y))
    return float(x @ y) / scale if scale > 0 else math.nan
