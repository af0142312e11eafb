"""Whether one configuration is better than another, from runs of both with the same seeds: the statistics."""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from pytorch_accelerated.optional import require

_SIGNIFICANCE = 0.05
_POWER = 0.8
_MOST_PAIRS = 100_000
_SAME = 1e-9  # times the values: a smaller spread is one of rounding


class Verdict(NamedTuple):
    """What the pairs of runs say about the second configuration.

    Attributes:
        outcome: "better" or "worse" than the first one, or "not decided".
        means: of the values of the first configuration, and of the second.
        difference: the mean of second minus first.
        margin: the 95 % confidence interval of the difference is this much to either side; None if all differences
            are the same, which says nothing about their spread.
        p_value: how likely so large a difference is, in either direction, between configurations that are equally good.
        pairs_needed: how many pairs would decide a difference of this size, with a probability of 80 %; None if there
            is no difference, or 100,000 are too few.
    """

    outcome: str
    means: tuple[float, float]
    difference: float
    margin: float | None
    p_value: float
    pairs_needed: int | None


def judge(first: Sequence[float], second: Sequence[float], *, greater_is_better: bool) -> Verdict:
    """Test whether the values of two configurations differ, by the paired t-test, two-sided at 5 %.

    Where all differences are the same, as coarse metrics have it, their spread is unknown and t infinite. The test is
    then that of signs: n equal differences have p = 2 / 2**n, so that it takes six pairs.

    Args:
        first: the values of one configuration, two at least.
        second: those of the other, in the order of the same seeds.
        greater_is_better: whether greater values are better.

    Raises:
        MissingDependencyError: if scipy is not installed.
    """
    stats = require("scipy.stats", needed_by="`compare --seeds`")
    differences = [float(b - a) for a, b in zip(first, second, strict=True)]
    mean, spread = statistics.fmean(differences), statistics.stdev(differences)
    means = statistics.fmean(first), statistics.fmean(second)
    margin: float | None = None
    rounding = _SAME * max(map(abs, (*first, *second)))
    if spread <= rounding:
        is_zero = abs(mean) <= rounding
        p_value = 1.0 if is_zero else 2.0 ** (1 - len(differences))
        needed = None if is_zero else 6
    else:
        test = stats.ttest_rel(second, first)
        low, high = test.confidence_interval(1 - _SIGNIFICANCE)
        p_value, margin = float(test.pvalue), float(high - low) / 2
        needed = pairs_needed(abs(mean) / spread)
    outcome = "better" if (mean > 0) == greater_is_better else "worse"
    return Verdict(outcome if p_value <= _SIGNIFICANCE else "not decided", means, mean, margin, p_value, needed)


def pairs_needed(effect: float) -> int | None:
    """The fewest pairs with which the paired t-test finds a difference with a probability of 80 %.

    The power of the test is a tail of the noncentral t distribution with n - 1 degrees of freedom and the noncentrality
    effect * sqrt(n): Cohen, Statistical Power Analysis for the Behavioral Sciences, 2nd edition (1988), chapter 2.

    Args:
        effect: the mean of the differences, as a multiple of their standard deviation.

    Returns:
        None if 100,000 pairs are too few.
    """
    stats = require("scipy.stats", needed_by="`compare --seeds`")

    def power(pairs: int) -> float:
        limit = stats.t.isf(_SIGNIFICANCE / 2, pairs - 1)
        return float(stats.nct.sf(limit, pairs - 1, effect * pairs**0.5))

    # scipy has no value (NaN) far beyond the power that is asked for; `bisect` takes that as enough.
    found = bisect.bisect_left(range(_MOST_PAIRS + 1), _POWER, lo=2, key=power)
    return found if found <= _MOST_PAIRS else None
