"""Compute error bars over seeds, and test paired differences."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import scipy  # its submodules are imported on first use, which most commands never reach

from peerbayes.errors import InputError


@dataclass(frozen=True)
class Summary:
    """A mean over seeds and its standard error.

    Args:
        mean: the mean.
        standard_error: ``s / √n`` with the n − 1 standard deviation s; None for one value or where
            one is infinite.
        count: the number n of values.

    Example:
        >>> from peerbayes.metrics import Summary
        >>> Summary(mean=97.312, standard_error=0.123, count=3).describe()
        '97.31 ± .12'
    """

    mean: float
    standard_error: float | None
    count: int

    def describe(self) -> str:
        """Return ``"97.31 ± .12"``: two digits of the standard error, as many decimals of the mean."""
        if self.standard_error is None:
            return _number(self.mean, _decimals(self.mean, digits=4))
        decimals = _decimals(self.standard_error or self.mean)
        return f"{_number(self.mean, decimals)} ± {_number(self.standard_error, decimals)}"


@dataclass(frozen=True)
class PairedDifference:
    """The difference ``a − b`` over the seeds that both have.

    Args:
        difference: mean of ``a_s − b_s``.
        standard_error: its standard error; None for one seed.
        seeds: the shared seeds, sorted.
        smallest_effect: the smallest true difference that this many seeds could have shown, given their
            spread; None for one seed or where all differences are equal.
        p_value: of the two-sided paired t-test; None for one seed or where all differences are equal,
            since nothing is then known about the spread.
        distinguishable: whether ``p_value`` is below the level; False where there is no p-value.

    Example:
        >>> from peerbayes.metrics import paired_difference
        >>> difference = paired_difference({0: 91.2, 1: 91.6, 2: 91.1}, {0: 90.1, 1: 90.3, 2: 90.2})
        >>> difference.seeds, difference.distinguishable
        ((0, 1, 2), True)
    """

    difference: float
    standard_error: float | None
    seeds: tuple[int, ...]
    smallest_effect: float | None
    p_value: float | None
    distinguishable: bool

    def describe(self, one_seed: str = " (not distinguishable: 1 seed has no spread)") -> str:
        """Return ``"+.10 ± .14 (not distinguishable: 3 seeds could have shown .42)"`` or the like.

        Args:
            one_seed: appended to a difference of one seed.
        """
        if self.standard_error is None:
            return self.value + one_seed
        return self.value + (f" ({self.remark})" if self.remark else "")

    @property
    def value(self) -> str:
        """The difference with its standard error, where it has one: ``"+.10 ± .14"``."""
        sign = "−" if self.difference < 0 else "+"
        text = sign + _number(abs(self.difference), self._decimals)
        return text if self.standard_error is None else f"{text} ± {_number(self.standard_error, self._decimals)}"

    @property
    def remark(self) -> str:
        """Why several seeds do not show the difference, and what they could have shown; empty if they show it."""
        if self.standard_error is None or self.distinguishable:
            return ""
        if self.smallest_effect is None:
            return f"not distinguishable: {len(self.seeds)} seeds differ by the same amount"
        shown = _number(self.smallest_effect, self._decimals)
        return f"not distinguishable: {len(self.seeds)} seeds could have shown {shown}"

    @property
    def _decimals(self) -> int:
        return _decimals(self.standard_error or self.difference)


def summarise(values: Iterable[float]) -> Summary:
    """Return the mean of ``values``, its standard error and their number.

    Args:
        values: one number a seed; infinity is allowed (an NLL can be infinite) and leaves no standard error.

    Example:
        >>> from peerbayes.metrics import summarise
        >>> summarise([97.1, 97.4, 97.3]).describe()
        '97.267 ± .088'
    """
    numbers = [float(value) for value in values]
    if not numbers or any(math.isnan(number) for number in numbers):
        raise InputError("values: empty or NaN; expected at least one number")
    count = len(numbers)
    if any(math.isinf(number) for number in numbers):
        return Summary(sum(numbers), None, count)
    mean = math.fsum(numbers) / count
    if count == 1:
        return Summary(mean, None, count)
    variance = math.fsum((number - mean) ** 2 for number in numbers) / (count - 1)
    return Summary(mean, math.sqrt(variance / count), count)


def paired_difference(
    a: Mapping[int, float], b: Mapping[int, float], *, level: float = 0.05, power: float = 0.8
) -> PairedDifference:
    """Compare two methods over the seeds they share, by the two-sided paired t-test.

    ``t = mean(a − b) / standard_error`` with n − 1 degrees of freedom. The smallest effect is
    ``λ · standard_error``, where λ is the noncentrality at which ``P(|T| > t_{1 − level/2}) = power`` for the
    noncentral t distribution.

    Args:
        a: value by seed.
        b: value by seed; seeds that only one side has are ignored.
        level: the probability of a false positive.
        power: the probability of detecting the smallest effect.

    Example:
        >>> from peerbayes.metrics import paired_difference
        >>> ours, theirs = {0: 91.2, 1: 91.6, 2: 91.1}, {0: 91.1, 1: 91.9, 2: 90.7}
        >>> paired_difference(ours, theirs).describe()
        '+.07 ± .20 (not distinguishable: 3 seeds could have shown 1.15)'
    """
    if not 0 < level < power < 1:
        raise InputError(f"level, power: got {level} and {power}; expected 0 < level < power < 1")
    seeds = tuple(sorted(a.keys() & b.keys()))
    if not seeds:
        raise InputError(f"a, b: no seed in common between {sorted(a)} and {sorted(b)}; expected at least one")
    for name, values in (("a", a), ("b", b)):
        for seed in seeds:
            if not math.isfinite(values[seed]):
                raise InputError(f"{name}: seed {seed} has the value {values[seed]}; expected a finite number")
    summary = summarise(a[seed] - b[seed] for seed in seeds)
    error = summary.standard_error
    if error is None:
        return PairedDifference(summary.mean, None, seeds, None, None, False)
    # Subtraction leaves rounding of this order: a spread below it is none.
    largest = max(max(abs(a[seed]), abs(b[seed])) for seed in seeds)
    if error <= 4 * math.ulp(largest):
        return PairedDifference(summary.mean, 0.0, seeds, None, None, False)
    freedom = len(seeds) - 1
    p_value = 2 * float(scipy.stats.t.sf(abs(summary.mean) / error, freedom))
    effect = error * _noncentrality(freedom, level, power)
    return PairedDifference(summary.mean, error, seeds, effect, p_value, p_value < level)


def _noncentrality(freedom: int, level: float, power: float) -> float:
    critical = float(scipy.stats.t.isf(level / 2, freedom))

    def missing(noncentrality: float) -> float:
        upper = scipy.stats.nct.sf(critical, freedom, noncentrality)
        # P(T < −t | λ), written as its mirror image because scipy's lower tail is NaN for large λ.
        lower = scipy.stats.nct.sf(critical, freedom, -noncentrality)
        return float(upper + lower) - power

    high = critical
    while missing(high) < 0:
        high *= 2
    return float(scipy.optimize.brentq(missing, 0.0, high))


def _decimals(value: float, digits: int = 2) -> int:
    if value == 0 or math.isinf(value):
        return digits
    return max(0, digits - 1 - math.floor(math.log10(abs(value))))


def _number(value: float, decimals: int) -> str:
    text = f"{value:.{decimals}f}".replace("-", "−")
    return text.replace("0.", ".", 1) if text.lstrip("−").startswith("0.") else text
