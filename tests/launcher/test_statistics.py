"""Success rates against numbers worked out by hand, and against brute force."""

import random
from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations, product
from math import comb, sqrt
from statistics import NormalDist, mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.launcher.statistics import (
    Estimate,
    TaskOutcome,
    clustered_wilson,
    mean_over_tasks,
    pass_at_k,
    pass_curve,
    powers_of_two,
    sign_flip,
    wilson,
)


@pytest.mark.parametrize(
    ("rollouts", "successes", "k", "expected"),
    [
        (4, 1, 1, 1 / 4),
        (4, 1, 2, 1 - 3 / 6),  # of 6 pairs, 3 hold no success
        (4, 2, 2, 1 - 1 / 6),
        (4, 3, 2, 1.0),  # every pair holds one
        (5, 2, 3, 1 - 1 / 10),
        (4, 0, 4, 0.0),
        (1, 1, 1, 1.0),
    ],
)
def test_pass_at_k_by_hand(rollouts: int, successes: int, k: int, expected: float) -> None:
    assert pass_at_k(rollouts, successes, k) == pytest.approx(expected, abs=1e-12)


@given(st.integers(1, 8), st.data())
def test_pass_at_k_is_the_share_of_choices_that_hold_a_success(
    rollouts: int, data: st.DataObject
) -> None:
    successes = data.draw(st.integers(0, rollouts))
    k = data.draw(st.integers(1, rollouts))
    outcomes = [i < successes for i in range(rollouts)]
    choices = [any(choice) for choice in combinations(outcomes, k)]
    assert pass_at_k(rollouts, successes, k) == pytest.approx(sum(choices) / len(choices))


@pytest.mark.parametrize(("rollouts", "successes", "k"), [(4, 5, 1), (4, 2, 5), (4, 2, 0)])
def test_pass_at_k_refuses_what_cannot_be(rollouts: int, successes: int, k: int) -> None:
    with pytest.raises(ValueError):
        pass_at_k(rollouts, successes, k)


def test_the_pass_curve_averages_over_tasks_and_leaves_out_those_with_too_few_attempts() -> None:
    outcomes = [TaskOutcome(4, 1), TaskOutcome(4, 4), TaskOutcome(1, 0), TaskOutcome(0, 0)]
    curve = pass_curve(outcomes, [1, 2, 8])
    assert curve[1].mean == pytest.approx((0.25 + 1 + 0) / 3)
    assert curve[2].mean == pytest.approx((0.5 + 1) / 2)
    assert (curve[1].tasks, curve[2].tasks) == (3, 2)
    assert 8 not in curve


def test_the_interval_over_tasks_holds_the_mean_and_shrinks_with_more_tasks() -> None:
    few = mean_over_tasks([0.0, 1.0] * 10)
    many = mean_over_tasks([0.0, 1.0] * 1000)
    assert few.mean == many.mean == 0.5
    assert few.low and few.high and many.low and many.high
    # The standard error of 20 coins is 0.112, so the interval is about 0.5 +- 0.219.
    assert few.low == pytest.approx(0.281, abs=0.04)
    assert few.high == pytest.approx(0.719, abs=0.04)
    assert many.high - many.low < 0.06
    assert mean_over_tasks([0.0, 1.0] * 10) == few, "the same values give the same interval"


def test_the_interval_over_few_tasks_is_students_and_equal_values_have_none() -> None:
    # "Student" 1908, Biometrika 6:1, the extra sleep of ten patients under two soporifics: the
    # mean is 1.58, its 95 % interval 0.70 to 2.46.
    sleep = [1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4]
    found = mean_over_tasks(sleep)
    assert (found.mean, found.low, found.high) == pytest.approx((1.58, 0.70, 2.46), abs=5e-3)
    # s / sqrt(2) is 0.5, t of one degree of freedom 12.706; a difference in success is at most 1
    two = mean_over_tasks([0.0, 1.0], largest=1.0)
    assert (two.mean, two.low, two.high) == (0.5, -1.0, 1.0)
    assert mean_over_tasks([0.0, 1.0]).high == pytest.approx(0.5 + 12.7062 * 0.5)
    for n in (1, 3, 100):
        assert mean_over_tasks([1.0] * n) == Estimate(1.0, None, None)


def test_the_interval_over_few_tasks_holds_the_truth_about_as_often_as_it_says() -> None:
    rng = random.Random(0)
    for tasks in (3, 8, 19):
        held = 0
        for _ in range(500):
            found = mean_over_tasks([rng.gauss(0.3, 0.4) for _ in range(tasks)])
            assert found.low is not None and found.high is not None
            held += found.low <= 0.3 <= found.high
        assert held / 500 == pytest.approx(0.95, abs=0.03)


def test_the_wilson_interval_by_hand() -> None:
    # 8 of 10: (0.8 + 0.19207) / 1.38415 +- 0.22681
    rate = wilson(8, 10)
    assert (rate.mean, rate.low, rate.high) == pytest.approx((0.8, 0.4902, 0.9433), abs=1e-4)
    assert wilson(10, 10).high == pytest.approx(1.0)
    assert wilson(0, 10).low == 0.0


@pytest.mark.parametrize(
    ("successes", "rollouts", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611),
     (1, 29, 0.0061, 0.1718)],
)  # fmt: skip
def test_the_wilson_interval_is_that_of_the_literature(
    successes: int, rollouts: int, low: float, high: float
) -> None:
    # Newcombe 1998, Statistics in Medicine 17:857, table I, method 3
    rate = wilson(successes, rollouts)
    assert (rate.low, rate.high) == pytest.approx((low, high), abs=5e-5)


def test_attempts_at_one_task_count_as_much_as_they_vary_from_task_to_task() -> None:
    # One rollout a task: nothing is alike.
    once = [1.0] * 8 + [0.0] * 2
    assert clustered_wilson(once, 10) == wilson(8, 10)
    # Four rollouts a task that always agree say no more than one.
    assert clustered_wilson(once, 40) == clustered_wilson(once, 10)
    # Four that are independent say as much as 40 rollouts: s^2 is p (1 - p) / 4, about 0.04.
    independent = [0.75] * 4 + [1.0] * 4 + [0.5] * 2
    assert clustered_wilson(independent, 40) == wilson(32, 40)
    # Between: s^2 = 1/9, so 0.25 * 10 / (1/9) = 22.5 rollouts of the 40.
    between = [0.5, 0.5, 0.5, 0.5, 1.0, 1.0, 0.0, 0.0, 0.5, 0.5]
    half = clustered_wilson(between, 40)
    assert wilson(11, 22).low < half.low < wilson(12, 24).low
    # All right: the interval is that of the tasks, and no point.
    assert clustered_wilson([1.0] * 10, 40) == wilson(10, 10)


def test_powers_of_two_end_with_the_number_of_attempts() -> None:
    assert powers_of_two(1) == [1]
    assert powers_of_two(4) == [1, 2, 4]
    assert powers_of_two(6) == [1, 2, 4, 6]


def test_the_sign_flip_test_is_mcnemars_exact_test_with_one_rollout_a_task() -> None:
    for better, worse in ((9, 1), (3, 3), (30, 14), (1, 0), (200, 150)):
        differences = [Fraction(1)] * better + [Fraction(-1)] * worse + [Fraction(0)] * 50
        n, least = better + worse, max(better, worse)
        exact = min(1.0, 2 * sum(comb(n, k) for k in range(least, n + 1)) / 2**n)
        assert sign_flip(differences) == pytest.approx(exact)
        assert sign_flip([value / 4 for value in differences]) == pytest.approx(exact)
    assert sign_flip([Fraction(0), Fraction(0)]) == 1.0


def share_of_patterns(differences: Sequence[Fraction]) -> float:
    """The share of all patterns of signs whose sum is at least as far from 0."""
    sums = [
        abs(sum(sign * value for sign, value in zip(signs, differences, strict=True)))
        for signs in product((1, -1), repeat=len(differences))
    ]
    return mean(value >= abs(sum(differences)) for value in sums)


def test_the_sign_flip_test_counts_all_patterns_of_signs() -> None:
    differences = [Fraction(n, 4) for n in (2, -1, 3, 1, 0, 2, -3, 4)]
    assert sign_flip(differences) == pytest.approx(share_of_patterns(differences))
    # Of many differences; their sums are nearly normal.
    rng = random.Random(1)
    steps = [Fraction(n, 12) for n in (3, 6, 9, -3, -6, 4)]
    many = [rng.choice(steps) for _ in range(60)]
    deviation = sqrt(sum(value**2 for value in many))
    normal = 2 * (1 - NormalDist().cdf(abs(sum(many)) / deviation))
    assert sign_flip(many) == pytest.approx(normal, abs=0.02)
    # And of ones without a common unit that is coarse enough, where patterns are drawn.
    odd = [value + Fraction(1, rng.randint(1000, 9999)) for value in many]
    assert sign_flip(odd) == pytest.approx(normal, abs=0.03)
    # So many differences of one sign are no accident.
    assert sign_flip([Fraction(1, 2)] * 90) == pytest.approx(2 / 2**90, rel=1e-9)


def test_the_pattern_that_was_seen_counts_itself_however_many_attempts_a_task_has() -> None:
    # Six tasks of up to 128 attempts, each better by far: only the two patterns of one sign.
    better = [
        Fraction(80, 127) - Fraction(40, 128), Fraction(75, 125) - Fraction(37, 128),
        Fraction(74, 123) - Fraction(39, 127), Fraction(70, 121) - Fraction(35, 126),
        Fraction(71, 119) - Fraction(38, 125), Fraction(66, 113) - Fraction(36, 128),
    ]  # fmt: skip
    assert sign_flip(better) == 2 / 2**6
    rng = random.Random(2)
    for attempts in (16, 64, 128):
        for _ in range(5):
            other = [
                Fraction(rng.randint(0, n), n) - Fraction(rng.randint(0, m), m)
                for n, m in [(attempts, attempts - rng.randint(1, 9)) for _ in range(6)]
            ]
            assert sign_flip(other) == pytest.approx(share_of_patterns(other))
