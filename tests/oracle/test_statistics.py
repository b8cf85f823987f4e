"""What seeds say: against scipy, against distributions written out in full, and against cases computed by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from gracecl.functional import statistics


def test_summary_over_seeds() -> None:
    mean, std, half_width, n = statistics.summarise([60.0, 62.0, 67.0])
    assert (mean, n) == (63.0, 3)
    assert std == pytest.approx(math.sqrt((9 + 1 + 16) / 2))
    assert half_width == pytest.approx(4.302653 * std / math.sqrt(3), rel=1e-6)  # Student t, two degrees of freedom
    single = statistics.summarise([60.0])
    assert (single.mean, single.n) == (60.0, 1)
    assert math.isnan(single.std)
    assert math.isnan(single.half_width)
    assert statistics.summarise([]).n == 0


def test_paired_difference_against_scipy() -> None:
    a, b = [61.0, 64.5, 66.0, 59.0], [60.0, 62.0, 66.5, 57.0]
    result = statistics.paired(a, b)
    reference = stats.ttest_rel(a, b)
    interval = reference.confidence_interval(0.95)
    assert result.mean == pytest.approx(1.25)
    assert result.p == pytest.approx(reference.pvalue)
    assert (result.low, result.high) == (pytest.approx(interval.low), pytest.approx(interval.high))
    assert result.n == 4


def test_paired_edge_cases() -> None:
    assert statistics.paired([1.0, 2.0, 4.0], [1.0, 2.0, 4.0]).p == 1.0
    assert statistics.paired([2.0, 3.0, 5.0], [1.0, 2.0, 4.0]).p == 0.0
    assert math.isnan(statistics.paired([2.0], [1.0]).p)
    with pytest.raises(ValueError, match="per seed"):
        statistics.paired([1.0, 2.0], [1.0])


def test_differences_that_are_all_equal_have_an_infinite_effect_with_their_sign() -> None:
    low, high = [1.0, 2.0, 4.0], [2.0, 3.0, 5.0]
    above, below, none = statistics.paired(high, low), statistics.paired(low, high), statistics.paired(low, low)
    assert (above.mean, above.std, above.low, above.high, above.effect) == (1.0, 0.0, 1.0, 1.0, math.inf)
    assert (below.mean, below.std, below.low, below.high, below.effect) == (-1.0, 0.0, -1.0, -1.0, -math.inf)
    assert (none.mean, none.p, none.wilcoxon, none.effect) == (0.0, 1.0, 1.0, 0.0)
    assert above.wilcoxon == below.wilcoxon == 2 / 2**3
    assert [statistics.seeds_to_tell(found, found.mean) for found in (above, below, none)] == [3.0, 3.0, math.inf]


def test_a_value_that_is_missing_leaves_nothing_to_test() -> None:
    """A rule that was not evaluated gives NaN; no number may look like a test then."""
    found = statistics.paired([1.0, math.nan, 3.0, 4.0], [0.0, 1.0, 1.0, 2.0])
    assert all(map(math.isnan, found[:-1]))
    assert found.n == 4
    assert math.isnan(statistics.seeds_to_tell(found, 1.0))
    assert statistics.holm([0.01, math.nan, 0.04]) == pytest.approx([0.02, math.nan, 0.04], nan_ok=True)


def test_one_seed_and_none_have_no_spread() -> None:
    for values, mean in (([], math.nan), ([7.0], 7.0)):
        found = statistics.summarise(values)
        assert found == pytest.approx((mean, math.nan, math.nan, len(values)), nan_ok=True)
        difference = statistics.paired(values, values)
        assert all(map(math.isnan, (difference.std, difference.p, difference.wilcoxon, difference.effect)))
        assert math.isnan(statistics.seeds_to_tell(difference, 1.0))


def test_methods_that_tie_everywhere_cannot_be_told_apart() -> None:
    found = statistics.ranking([[1.0, 1.0, 1.0]] * 4)
    assert (found.ranks, found.p) == ([2.0, 2.0, 2.0], 1.0)


def test_two_seeds_have_a_spread_and_no_interval() -> None:
    assert statistics.summarise([60.0, 62.0])[:2] == (61.0, pytest.approx(math.sqrt(2)))
    assert math.isnan(statistics.summarise([60.0, 62.0]).half_width)
    found = statistics.paired([60.0, 62.0], [59.0, 59.0])
    assert (found.mean, found.std, found.n) == (2.0, pytest.approx(math.sqrt(2)), 2)
    assert all(map(math.isnan, (found.low, found.high, found.p, found.wilcoxon, found.effect)))


@pytest.mark.parametrize("n", [3, 5, 8, 12])
def test_signed_rank_against_scipy(n: int) -> None:
    differences = np.random.default_rng(n).normal(0.5, 1.0, n)
    assert statistics.signed_rank(differences) == pytest.approx(stats.wilcoxon(differences, method="exact").pvalue)


@pytest.mark.parametrize(
    "differences", [[1.0, 1.0, -1.0, 2.0, 3.0], [0.0, 1.0, 2.0, 2.0, -2.0, 4.0], [1.0, -1.0, 1.0, -1.0], [2.0, 2.0, 2.0]]
)
def test_signed_rank_with_ties_and_zeros_against_all_signs(differences: list[float]) -> None:
    left = np.array([value for value in differences if value])
    ranks = stats.rankdata(np.abs(left))
    sums = np.array([ranks[np.array(signs) > 0].sum() for signs in itertools.product((-1, 1), repeat=len(left))])
    observed = ranks[left > 0].sum()
    expected = min(1.0, 2 * min((sums <= observed).mean(), (sums >= observed).mean()))
    assert statistics.signed_rank(differences) == pytest.approx(expected)


def test_signed_rank_by_hand() -> None:
    assert statistics.signed_rank([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2 / 32)
    assert statistics.signed_rank([0.0, 0.0]) == 1.0


def test_effect_by_hand() -> None:
    """Differences 1, 2, 3: mean 2, standard deviation 1."""
    found = statistics.paired([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert (found.effect, found.std) == (pytest.approx(2.0), pytest.approx(1.0))
    assert statistics.paired([1.0, 2.0, 3.0], [0.0, 1.0, 2.0]).effect == math.inf


def test_holm_is_the_step_down_rule() -> None:
    """Holm (1979), literally: the smallest times n, the next times n - 1, never below one before it, never above 1."""
    assert statistics.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert statistics.holm([0.5, 0.6]) == pytest.approx([1.0, 1.0])
    assert statistics.holm([0.03]) == pytest.approx([0.03])
    mixed = statistics.holm([math.nan, 0.02, 0.01])
    assert math.isnan(mixed[0])
    assert mixed[1:] == pytest.approx([0.02, 0.02])


@pytest.mark.parametrize(("effect", "seeds"), [(0.2, 199), (0.5, 34), (0.8, 15), (1.0, 10), (2.0, 5), (20.0, 3)])
def test_seeds_for_a_power_of_eighty_percent(effect: float, seeds: int) -> None:
    """The numbers that tables of the paired t-test at 5 % give (Cohen, Statistical Power Analysis, 1988; G*Power)."""
    difference = statistics.paired([1.0, 2.0, 3.0], [0.0, 0.0, 0.0])
    assert difference.std == 1.0
    assert statistics.seeds_to_tell(difference, effect) == seeds
    assert statistics.seeds_to_tell(difference, -effect) == seeds
    twice_as_wide = statistics.paired([2.0, 4.0, 6.0], [0.0, 0.0, 0.0])
    assert statistics.seeds_to_tell(twice_as_wide, 2 * effect) == seeds


@pytest.mark.parametrize("seeds", [4, 6])
def test_power_against_simulated_seeds(seeds: int) -> None:
    drawn = np.random.default_rng(0).normal(1.0, 1.0, (20_000, seeds))
    found = (stats.ttest_1samp(drawn, 0.0, axis=1).pvalue < 0.05).mean()
    assert statistics.power(seeds, 1.0) == pytest.approx(found, abs=0.01)


def test_seeds_that_cannot_be_named() -> None:
    assert math.isnan(statistics.seeds_to_tell(statistics.paired([1.0, 2.0], [0.0, 0.0]), 1.0))
    spread = statistics.paired([1.0, 2.0, 3.0], [0.0, 0.0, 0.0])
    assert statistics.seeds_to_tell(spread, 0.0) == math.inf
    assert statistics.seeds_to_tell(spread, 0.001) == math.inf
    assert statistics.seeds_to_tell(statistics.paired([1.0, 1.0, 1.0], [0.0, 0.0, 0.0]), 1.0) == 3


def test_ranking_against_scipy_and_the_published_constants() -> None:
    """Nemenyi's q at 5 % for 2 to 5 methods is 1.960, 2.343, 2.569, 2.728 (Demšar 2006, table 5)."""
    table = np.random.default_rng(1).normal(size=(12, 4)) + np.arange(4) * 0.5
    found = statistics.ranking(table)
    assert found.p == pytest.approx(stats.friedmanchisquare(*table.T).pvalue)
    assert found.ranks == pytest.approx(np.mean([stats.rankdata(-row) for row in table], axis=0))
    assert found.settings == 12
    for methods, q in ((2, 1.960), (3, 2.343), (4, 2.569), (5, 2.728)):
        values = np.arange(6.0 * methods).reshape(6, methods)
        assert statistics.ranking(values).critical == pytest.approx(q * math.sqrt(methods * (methods + 1) / 36), abs=1e-3)


def test_ranking_with_ties_against_scipy() -> None:
    table = np.array([[1.0, 1.0, 2.0], [3.0, 1.0, 3.0], [2.0, 5.0, 1.0], [4.0, 4.0, 4.0]])
    assert statistics.ranking(table).p == pytest.approx(stats.friedmanchisquare(*table.T).pvalue)
    assert statistics.ranking(table, higher_is_better=False).ranks == pytest.approx(
        (4 - np.array(statistics.ranking(table).ranks)).tolist()
    )
    assert statistics.ranking([[1.0, 1.0], [2.0, 2.0]]).p == 1.0
    with pytest.raises(ValueError, match="at least two settings"):
        statistics.ranking([[1.0, 2.0]])
