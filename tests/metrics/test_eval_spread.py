"""Error bars against scipy, and the smallest effect against simulated experiments."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from peerbayes.errors import InputError
from peerbayes.metrics.spread import PairedDifference, Summary, paired_difference, summarise

values = st.lists(st.floats(-100, 100), min_size=2, max_size=12)


@settings(max_examples=50, deadline=None)
@given(values)
def test_summary_agrees_with_scipy(numbers):
    summary = summarise(numbers)
    assert summary.mean == pytest.approx(np.mean(numbers), abs=1e-12)
    assert summary.standard_error == pytest.approx(stats.sem(numbers), abs=1e-12)
    assert summary.count == len(numbers)


def test_one_value_has_no_error_bar_and_infinity_is_kept():
    assert summarise([0.5]) == Summary(0.5, None, 1)
    assert summarise([0.5, math.inf]) == Summary(math.inf, None, 2)
    assert summarise(v for v in (2.0, 2.0)) == Summary(2.0, 0.0, 2)
    for bad in ([], [1.0, math.nan]):
        with pytest.raises(InputError, match=r"^values"):
            summarise(bad)


def test_paired_test_agrees_with_scipy_on_shared_seeds():
    a = {0: 97.4, 3: 97.9, 1: 97.1, 7: 98.2, 9: 50.0}
    b = {0: 97.2, 1: 97.2, 3: 97.5, 7: 97.6, 8: 10.0}
    result = paired_difference(a, b)
    shared = [0, 1, 3, 7]
    left, right = [a[s] for s in shared], [b[s] for s in shared]
    oracle = stats.ttest_rel(left, right)
    assert result.seeds == (0, 1, 3, 7)
    assert result.p_value == pytest.approx(oracle.pvalue)
    assert result.difference / result.standard_error == pytest.approx(oracle.statistic)
    assert not result.distinguishable
    assert paired_difference(a, b, level=oracle.pvalue * 1.001).distinguishable
    mirrored = paired_difference(b, a)
    assert mirrored.difference == -result.difference
    assert mirrored.smallest_effect == result.smallest_effect


@pytest.mark.parametrize(("seeds", "level", "power"), [(2, 0.3, 0.6), (3, 0.05, 0.8), (5, 0.05, 0.8), (8, 0.3, 0.4)])
def test_smallest_effect_has_the_stated_power_in_simulation(seeds, level, power):
    # Differences with standard deviation 1, so a standard error of 1 / √n in truth, shifted by the smallest effect.
    rng = np.random.default_rng(0)
    unit = np.array([-1.0, 1.0] * (seeds // 2) + [0.0] * (seeds % 2))
    unit /= unit.std(ddof=1)
    result = paired_difference(dict(enumerate(unit)), dict.fromkeys(range(seeds), 0.0), level=level, power=power)
    experiments = rng.normal(result.smallest_effect, 1.0, (100_000, seeds))
    found = (stats.ttest_1samp(experiments, 0.0, axis=1).pvalue < level).mean()
    assert found == pytest.approx(power, abs=0.006)


@pytest.mark.parametrize(("seeds", "level", "power"), [(2, 0.001, 0.8), (3, 0.05, 0.999), (5000, 0.001, 0.8)])
def test_smallest_effect_is_finite_in_the_far_tails(seeds, level, power):
    unit = np.resize([-1.0, 1.0], seeds)
    result = paired_difference(dict(enumerate(unit)), dict.fromkeys(range(seeds), 0.0), level=level, power=power)
    ratio = result.smallest_effect / result.standard_error
    # Power by averaging the normal tail over quantiles of the estimated spread.
    spread = np.sqrt(stats.chi2.ppf((np.arange(200_000) + 0.5) / 200_000, seeds - 1) / (seeds - 1))
    critical = stats.t.isf(level / 2, seeds - 1) * spread
    assert np.mean(stats.norm.sf(critical - ratio) + stats.norm.cdf(-critical - ratio)) == pytest.approx(
        power, abs=1e-5
    )


@settings(max_examples=20, deadline=None)
@given(seeds=st.integers(2, 12), scale=st.floats(0.001, 1000))
def test_smallest_effect_scales_and_shrinks_with_seeds(seeds, scale):
    def effect(count, factor):
        unit = np.resize([-1.0, 0.0, 1.0], count) * factor
        result = paired_difference(dict(enumerate(unit)), dict.fromkeys(range(count), 0.0))
        return result.smallest_effect / result.standard_error, result.smallest_effect

    assert effect(seeds, scale)[1] == pytest.approx(scale * effect(seeds, 1.0)[1], rel=1e-6)
    # In standard errors it falls towards the normal limit z(.975) + z(.8).
    assert effect(seeds, 1.0)[0] > effect(seeds + 1, 1.0)[0] > 1.96 + 0.8416


def test_null_experiments_are_called_different_at_the_level():
    rng = np.random.default_rng(1)
    noise = rng.normal(size=(600, 2, 4))
    calls = [paired_difference(dict(enumerate(x)), dict(enumerate(y)), level=0.2).distinguishable for x, y in noise]
    assert np.mean(calls) == pytest.approx(0.2, abs=0.06)


def test_degenerate_comparisons_claim_nothing():
    assert paired_difference({0: 3.0}, {0: 1.0}) == PairedDifference(2.0, None, (0,), None, None, False)
    # The differences are .1 up to rounding, which must not become a spread.
    a, b = {0: 0.3, 1: 0.4, 2: 0.8}, {0: 0.2, 1: 0.3, 2: 0.7}
    same = paired_difference(a, b)
    assert (same.standard_error, same.p_value, same.smallest_effect, same.distinguishable) == (0, None, None, False)
    assert paired_difference(a, a) == PairedDifference(0.0, 0.0, (0, 1, 2), None, None, False)


def test_wrong_input_is_named():
    with pytest.raises(InputError, match=r"^a, b: no seed in common"):
        paired_difference({0: 1.0}, {1: 1.0})
    with pytest.raises(InputError, match=r"^b: seed 1 has the value inf"):
        paired_difference({0: 1.0, 1: 2.0}, {0: 1.0, 1: math.inf})
    for level, power in ((0.0, 0.8), (0.05, 1.0), (0.9, 0.8)):
        with pytest.raises(InputError, match=r"^level, power"):
            paired_difference({0: 1.0}, {0: 1.0}, level=level, power=power)


def test_sentences():
    unclear = PairedDifference(0.1, 0.14, (0, 1, 2), 0.42, 0.55, False)
    assert unclear.describe() == "+.10 ± .14 (not distinguishable: 3 seeds could have shown .42)"
    assert PairedDifference(-0.0021, 0.0004, (0, 1, 2), 0.002, 0.03, True).describe() == "−.00210 ± .00040"
    assert PairedDifference(-12.3, 1.5, (0, 1), 24.5, 0.08, False).describe() == (
        "−12.3 ± 1.5 (not distinguishable: 2 seeds could have shown 24.5)"
    )
    assert paired_difference({0: 3.0}, {0: 1.0}).describe() == "+2.0 (not distinguishable: 1 seed has no spread)"
    assert paired_difference({0: 3.0, 1: 4.0}, {0: 1.0, 1: 2.0}).describe() == (
        "+2.0 ± .0 (not distinguishable: 2 seeds differ by the same amount)"
    )
    assert Summary(97.312, 0.124, 3).describe() == "97.31 ± .12"
    assert Summary(0.0982, 0.0041, 3).describe() == ".0982 ± .0041"
    assert Summary(-0.5, 0.25, 3).describe() == "−.50 ± .25"
    assert Summary(97.312, None, 1).describe() == "97.31"
    assert Summary(0.5, 0.0, 2).describe() == ".50 ± .00"
    assert Summary(math.inf, None, 2).describe() == "inf"
    assert Summary(100.0, 30.0, 2).describe() == "100 ± 30"
