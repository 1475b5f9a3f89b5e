"""Which rows make the gradient of a step infinite or NaN: a search, without the model.

A gradient that is not finite on some rows is one on any rows that hold these. So the rows are
halved until each that is left stands alone.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

Row = TypeVar("Row")


class NonFiniteGradient(FloatingPointError):
    """The policy's or the critic's gradient of a step is not finite. No weights were changed."""


def find_culprits(is_finite: Callable[[Sequence[Row]], bool], rows: Sequence[Row]) -> list[Row]:
    """Those of `rows` on which alone `is_finite` does not hold, in their order.

    `rows`: among which some are; that is not asked again. [] if none is one alone: then only the
    sum of several overflows. K culprits among N rows take about 2 K log2(N) passes.
    """
    if len(rows) == 1:
        return [] if is_finite(rows) else list(rows)
    middle = len(rows) // 2
    found: list[Row] = []
    for half in (rows[:middle], rows[middle:]):
        if len(half) == 1 or not is_finite(half):
            found += find_culprits(is_finite, half)
    return found
