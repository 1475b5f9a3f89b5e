"""Finds the rows that make the gradient of a step infinite or NaN, by bisection.

If the gradient of some rows is not finite, that of any superset is not finite either.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

Row = TypeVar("Row")


class NonFiniteGradient(FloatingPointError):
    """The policy's or the critic's gradient of a step is not finite. No weights were changed."""


def find_culprits(is_finite: Callable[[Sequence[Row]], bool], rows: Sequence[Row]) -> list[Row]:
    """Return the rows for which alone `is_finite` is false, in order.

    `rows` together are known not to be finite. The result is empty if only the sum of several rows
    overflows. K culprits among N rows take about 2 K log2(N) passes.
    """
    if len(rows) == 1:
        return [] if is_finite(rows) else list(rows)
    middle = len(rows) // 2
    found: list[Row] = []
    for half in (rows[:middle], rows[middle:]):
        if len(half) == 1 or not is_finite(half):
            found += find_culprits(is_finite, half)
    return found
