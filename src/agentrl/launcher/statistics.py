"""Success rates and their uncertainty, as pure functions of counts."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import comb, inf, lcm

import numpy as np

_RESAMPLES = 2000
_EXACT_UP_TO = 100_000  # units that all differences add up to
_ENUMERATED_UP_TO = 16  # differences whose patterns are counted one by one
_FLIPS = 10_000
# The 0.975 quantiles of Student's t for 1, 2, ... degrees of freedom.
_STUDENT = (
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281, 2.2010,
    2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009,
)  # fmt: skip


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95 % confidence interval; None where too little is known for one."""

    mean: float
    low: float | None
    high: float | None

    @property
    def cells(self) -> tuple[str, str]:
        """Mean and interval, as text."""
        return f"{self.mean:.3f}", self.interval()

    def interval(self, form: str = ".3f") -> str:
        """The interval as text, its numbers in the form."""
        if self.low is None or self.high is None:
            return "-"
        return f"{self.low:{form}} to {self.high:{form}}"


@dataclass(frozen=True)
class Rate(Estimate):
    """A share from 0 to 1, which always has an interval."""

    low: float
    high: float


@dataclass(frozen=True)
class PassRate(Rate):
    """pass@k with the number of tasks that it is estimated from."""

    tasks: int


@dataclass(frozen=True)
class TaskOutcome:
    """All rollouts of one task that ended with a score."""

    rollouts: int
    successes: int


def pass_at_k(rollouts: int, successes: int, k: int) -> float:
    """Unbiased estimate of the probability that at least one of `k` rollouts succeeds.

    1 - C(n-c, k) / C(n, k) for c successes among n rollouts (Chen et al. 2021, arXiv 2107.03374,
    equation 1): the share of all choices of k rollouts that hold a success. Needs n >= k.
    """
    if not 0 <= successes <= rollouts:
        raise ValueError(f"{successes} successes among {rollouts} rollouts")
    if not 1 <= k <= rollouts:
        raise ValueError(f"pass@{k} cannot be estimated from {rollouts} rollouts")
    return 1.0 - comb(rollouts - successes, k) / comb(rollouts, k)


def mean_over_tasks(values: Sequence[float], largest: float = inf, seed: int = 0) -> Estimate:
    """The mean of `values` (one per task, each from -`largest` to `largest`) with its interval.

    The interval is over tasks, because rollouts of one task are correlated and an interval over
    rollouts would be too narrow. It is the percentile bootstrap's from 20 tasks on, and Student's t
    for fewer, of which the bootstrap has seen too little. Equal values say nothing of what another
    task would give, so they have none. Raises ValueError without values.
    """
    if not values:
        raise ValueError("no value to estimate from")
    array = np.asarray(values, dtype=np.float64)
    mean, freedom = float(array.mean()), len(array) - 1
    if array.min() == array.max():
        return Estimate(mean, None, None)
    if freedom <= len(_STUDENT):
        half = _STUDENT[freedom - 1] * float(array.std(ddof=1)) / len(array) ** 0.5
        return Estimate(mean, max(mean - half, -largest), min(mean + half, largest))
    rng = np.random.default_rng(seed)
    means = np.empty(_RESAMPLES)
    for i in range(_RESAMPLES):  # one by one: a [resamples, tasks] matrix could be large
        means[i] = array[rng.integers(0, len(array), len(array))].mean()
    low, high = np.percentile(means, [2.5, 97.5])
    return Estimate(mean, float(low), float(high))


def sign_flip(differences: Sequence[Fraction], seed: int = 0) -> float:
    """Two-sided p-value of the sign-flip test that paired differences have mean 0.

    If two models are alike, each task's difference might as well have the other sign (Fisher 1935).
    The value is the share of all sign patterns whose sum is at least as far from 0. With one
    rollout a task it is that of McNemar's exact test. Fractions, not floats, because ties count.
    It is exact, by the distribution of the sum over the common unit of the differences or, for few
    differences, by all patterns. Where the unit is too fine for many, it is estimated from random
    patterns (Phipson and Smyth 2010).
    """
    unit = lcm(*(difference.denominator for difference in differences))
    signed = [int(difference * unit) for difference in differences if difference]
    sizes, reached = [abs(value) for value in signed], abs(sum(signed))
    most = sum(sizes)
    if most <= _EXACT_UP_TO:
        share = np.zeros(2 * most + 1)  # of the patterns, by their sum from -most to most
        share[most] = 1.0
        for size in sizes:
            share = (np.roll(share, size) + np.roll(share, -size)) / 2
        sums = np.abs(np.arange(-most, most + 1))
        return min(1.0, float(share[sums >= reached].sum()))
    if len(sizes) <= _ENUMERATED_UP_TO:
        totals = [0]
        for size in sizes:
            totals = [total + size for total in totals] + [total - size for total in totals]
        return sum(abs(total) >= reached for total in totals) / len(totals)
    rng = np.random.default_rng(seed)
    whole = np.array(sizes, dtype=object)  # a common unit of many denominators is beyond int64
    further = 0
    for _ in range(_FLIPS):  # one by one: a [flips, tasks] matrix could be large
        flipped = whole[rng.integers(0, 2, len(sizes)) == 1].sum()
        further += abs(2 * flipped - most) >= reached
    return (1 + further) / (1 + _FLIPS)


def pass_curve(outcomes: Sequence[TaskOutcome], ks: Sequence[int]) -> dict[int, PassRate]:
    """pass@k over tasks, for each k, with Wilson intervals.

    Tasks with fewer than k scored rollouts are left out of it, and a k that no task has rollouts
    for is left out altogether. What is left may be harder tasks: pass@4 can be below pass@2.
    """
    curve: dict[int, PassRate] = {}
    for k in ks:
        enough = [o for o in outcomes if o.rollouts >= k]
        if enough:
            values = [pass_at_k(o.rollouts, o.successes, k) for o in enough]
            rate = clustered_wilson(values, sum(o.rollouts for o in enough) / k)
            curve[k] = PassRate(rate.mean, rate.low, rate.high, len(enough))
    return curve


def powers_of_two(largest: int) -> list[int]:
    """1, 2, 4, ... and `largest` itself."""
    ks = [2**i for i in range(largest.bit_length()) if 2**i <= largest]
    return ks if largest in ks else [*ks, largest]


def wilson(successes: int, rollouts: int) -> Rate:
    """A success rate with its 95 % Wilson score interval (Wilson 1927), also valid near 0 and 1."""
    if rollouts <= 0:
        raise ValueError("no rollout to estimate from")
    return _wilson(successes / rollouts, rollouts)


def clustered_wilson(rates: Sequence[float], rollouts: float) -> Rate:
    """The mean of `rates` (one per task, each from 0 to 1) with a clustered Wilson interval.

    Rollouts of one task are correlated. The interval uses the effective number of independent
    rollouts p (1 - p) / (s^2 / tasks), with s^2 the variance of the rates (the design effect; Dean
    and Pagano 2015, J. Surv. Stat. Methodol. 3:484), at least the number of tasks and at most
    `rollouts`. It is the number of tasks if all rates are 0 or all are 1.
    """
    tasks = len(rates)
    if tasks == 0:
        raise ValueError("no task to estimate from")
    rate = sum(rates) / tasks
    variance = sum((value - rate) ** 2 for value in rates) / max(1, tasks - 1)
    independent = rate * (1 - rate) * tasks / variance if variance > 0 else float(tasks)
    return _wilson(rate, min(max(independent, tasks), max(rollouts, tasks)))


def _wilson(rate: float, n: float) -> Rate:
    z = 1.959964
    spread = 1 + z**2 / n
    centre = (rate + z**2 / (2 * n)) / spread
    half = z * ((rate * (1 - rate) + z**2 / (4 * n)) / n) ** 0.5 / spread
    return Rate(rate, max(0.0, centre - half), min(1.0, centre + half))
