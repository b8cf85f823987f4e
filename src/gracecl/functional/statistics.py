"""What several seeds say: spread, intervals, tests and how many seeds would be needed, as pure functions.

Seeds pair methods: the same seed gives the same stream, so two methods are compared by their differences seed by seed. From fewer
than three seeds there is a mean and no interval or test: the t-interval of two is 12.7 standard errors wide on either side, which
only looks like a number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

CONFIDENCE = 0.95
"""level of every interval, and 1 - it that of every test"""
FEWEST_SEEDS = 3
"""that have an interval"""
POWER = 0.8
"""with which a difference should be found by the seeds that are called enough"""
MOST_SEEDS = 10_000
"""beyond it no number of seeds is named"""


class Summary(NamedTuple):
    """One value per seed. `std` is NaN for one seed, `half_width` for fewer than three."""

    mean: float
    std: float
    """sample standard deviation (n − 1)"""
    half_width: float
    """of the 95 % Student-t interval of the mean"""
    n: int


class Paired(NamedTuple):
    """How one method differs from another on the same seeds. All but mean, std and n are NaN for fewer than three seeds."""

    mean: float
    """mean of a − b"""
    std: float
    """sample standard deviation of a − b"""
    low: float
    high: float
    """ends of the 95 % Student-t interval of the mean difference"""
    p: float
    """two-sided paired t-test"""
    wilcoxon: float
    """p of the two-sided signed-rank test, exact; with n seeds it cannot be below 2 / 2ⁿ"""
    effect: float
    """Cohen's d of paired differences, mean / std"""
    n: int


def summarise(values: npt.ArrayLike) -> Summary:
    """Mean, sample standard deviation and 95 % half-width t_{n−1} · std / √n of one value per seed."""
    array = np.asarray(values, dtype=np.float64)
    n = len(array)
    mean = float(array.mean()) if n else math.nan
    std = float(array.std(ddof=1)) if n > 1 else math.nan
    return Summary(mean, std, t_quantile(n) * std / math.sqrt(n) if n else math.nan, n)


def t_quantile(n: int) -> float:
    """Return the factor of the standard error that gives the half-width; NaN for too few seeds."""
    if n < FEWEST_SEEDS:
        return math.nan
    from scipy.special import stdtrit

    return float(stdtrit(n - 1, (1.0 + CONFIDENCE) / 2.0))


def paired(a: npt.ArrayLike, b: npt.ArrayLike) -> Paired:
    """Compare a and b, where a[i] and b[i] come from the same seed and therefore from the same stream.

    Differences that are all equal leave no doubt to the t-test: p is 0, or 1 when they are all zero.
    """
    first, second = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if first.shape != second.shape:
        raise ValueError(f"a paired test needs one value of each method per seed, got {first.shape} and {second.shape}")
    mean, std, half_width, n = summarise(first - second)
    if n < FEWEST_SEEDS or math.isnan(mean):
        return Paired(mean, std, math.nan, math.nan, math.nan, math.nan, math.nan, n)
    from scipy.special import stdtr

    t = abs(mean) / (std / math.sqrt(n)) if std else (math.inf if mean else 0.0)
    p = 2.0 * float(stdtr(n - 1, -t))
    effect = mean / std if std else (math.copysign(math.inf, mean) if mean else 0.0)
    return Paired(mean, std, mean - half_width, mean + half_width, p, signed_rank(first - second), effect, n)


def signed_rank(differences: npt.ArrayLike) -> float:
    """Return p of Wilcoxon's two-sided signed-rank test, from the distribution over all signs; zeros are left out,
    ties share ranks.

    Wilcoxon, Individual Comparisons by Ranking Methods, Biometrics Bulletin 1945.
    """
    array = np.asarray(differences, dtype=np.float64)
    array = array[array != 0]
    if not len(array):
        return 1.0
    from scipy.stats import rankdata

    doubled = np.rint(2 * rankdata(np.abs(array))).astype(np.int64)  # whole numbers, also where ties share a rank
    chances = np.ones(1)  # of each sum of the ranks that got a plus
    for rank in doubled:
        chances = 0.5 * (np.pad(chances, (0, rank)) + np.pad(chances, (rank, 0)))
    total = int(doubled[array > 0].sum())
    return min(1.0, 2.0 * float(min(chances[: total + 1].sum(), chances[total:].sum())))


def kendall(a: npt.ArrayLike, b: npt.ArrayLike) -> float:
    """Return Kendall's τ of two rankings of the same things by their values, τ-b where values are tied; NaN without any order.

    Kendall, A New Measure of Rank Correlation, Biometrika 1938.
    """
    first, second = (np.asarray(values, dtype=np.float64) for values in (a, b))
    upper = np.triu_indices(len(first), k=1)
    signs = [np.sign(values[:, None] - values[None, :])[upper] for values in (first, second)]
    scale = math.sqrt(float((signs[0] ** 2).sum()) * float((signs[1] ** 2).sum()))
    return float((signs[0] * signs[1]).sum()) / scale if scale else math.nan


def holm(p: Sequence[float]) -> list[float]:
    """Correct p-values for their number by Holm's step-down rule, in the given order; NaN stays NaN and does not count.

    Holm, A Simple Sequentially Rejective Multiple Test Procedure, Scandinavian Journal of Statistics 1979.
    """
    order = sorted((value, place) for place, value in enumerate(p) if not math.isnan(value))
    corrected, largest = [math.nan] * len(p), 0.0
    for rank, (value, place) in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * value))
        corrected[place] = largest
    return corrected


def power(n: int, effect: float) -> float:
    """Return the chance that n paired seeds show a difference of `effect` standard deviations, with its sign, in a
    t-test at 5 %.
    """
    from scipy.stats import nct

    threshold = t_quantile(n)
    shift = min(30.0, abs(effect) * math.sqrt(n))  # power is 1 there, and scipy's distribution fails far beyond it
    return float(nct.sf(threshold, n - 1, shift))


def seeds_to_tell(difference: Paired, points: float) -> float:
    """Return the paired seeds at which a true difference of so many points is found with 80 % power, given the
    spread seen.

    At least three; infinite for a difference of nothing or beyond 10,000 seeds; NaN where the spread is not known.
    """
    if difference.n < FEWEST_SEEDS or math.isnan(difference.std):
        return math.nan
    if not points:
        return math.inf
    if not difference.std:
        return float(FEWEST_SEEDS)
    effect = abs(points) / difference.std
    if power(MOST_SEEDS, effect) < POWER:
        return math.inf
    few, enough = FEWEST_SEEDS - 1, MOST_SEEDS
    while enough - few > 1:
        middle = (few + enough) // 2
        few, enough = (few, middle) if power(middle, effect) >= POWER else (middle, enough)
    return float(enough)


class Ranking(NamedTuple):
    """Methods over several settings, by their mean ranks; 1 is the best."""

    ranks: list[float]
    p: float
    """of Friedman's test that all methods are alike"""
    critical: float
    """mean ranks that differ by less cannot be told apart (Nemenyi's test at 5 %)"""
    settings: int


def ranking(values: npt.ArrayLike, *, higher_is_better: bool = True) -> Ranking:
    """Rank methods in a table [settings, methods], at least two by two: Friedman's test, and Nemenyi's critical
    difference.

    CD = q · √(k (k + 1) / (6 N)) for k methods in N settings, q the 5 % point of the Studentized range over √2. Demšar, Statistical
    Comparisons of Classifiers over Multiple Data Sets, JMLR 2006.
    """
    table = np.asarray(values, dtype=np.float64)
    if table.ndim != 2 or min(table.shape) < 2 or not np.isfinite(table).all():
        raise ValueError(f"ranks over settings need a whole table of at least two settings and two methods, got {table.shape}")
    from scipy.special import chdtrc
    from scipy.stats import rankdata, studentized_range

    settings, methods = table.shape
    ranks = rankdata(-table if higher_is_better else table, axis=1)
    mean_ranks = ranks.mean(axis=0)
    between = settings * ((mean_ranks - (methods + 1) / 2) ** 2).sum()
    within = ((ranks - (methods + 1) / 2) ** 2).sum() / (settings * (methods - 1))
    p = float(chdtrc(methods - 1, between / within)) if within else 1.0
    q = float(studentized_range.ppf(CONFIDENCE, methods, math.inf)) / math.sqrt(2)
    return Ranking(mean_ranks.tolist(), p, q * math.sqrt(methods * (methods + 1) / (6 * settings)), settings)
