"""Unions of intervals: pure functions of their ends."""

import itertools
from collections.abc import Iterator

import sympy

from agentrl.mathematics.answers import Expression, Interval, Region


def half_line(symbol: Expression, sign: str, limit: Expression) -> Region:
    r"""The solutions of `symbol sign limit`; for `\ne`, all numbers but `limit`."""
    name, infinity = str(symbol), sympy.oo
    if sign == r"\ne":
        return Region(
            (Interval(-infinity, limit, True, True), Interval(limit, infinity, True, True)), name
        )
    if sign in ("<", r"\le"):
        return Region((Interval(-infinity, limit, True, sign == "<"),), name)
    return Region((Interval(limit, infinity, sign == ">", True),), name)


def solutions(difference: Expression, unknown: Expression, strict: bool) -> Region | None:
    """The solutions of difference < 0 (`strict`) or <= 0 in `unknown`; None if SymPy finds none."""
    real = sympy.Symbol("x", real=True)
    below = difference.subs(unknown, real)
    try:
        found = sympy.solve_univariate_inequality(
            below < 0 if strict else below <= 0, real, relational=False
        )
    except (NotImplementedError, TypeError, ValueError, AttributeError, ArithmeticError):
        return None
    intervals = [_interval_of(part) for part in sympy.Union.make_args(found)]
    if any(interval is None for interval in intervals):
        return None
    return Region(united([i for part in intervals if part for i in part]), str(unknown))


def _interval_of(part: Expression) -> list[Interval] | None:
    if isinstance(part, sympy.FiniteSet):
        return [Interval(point, point, False, False) for point in part]
    if isinstance(part, sympy.Interval):
        return [Interval(part.start, part.end, bool(part.left_open), bool(part.right_open))]
    return None


def combined(regions: list[Region], connectives: list[str]) -> Region | None:
    """Combine regions: `or` is the union, `and` the intersection.

    A comma means `and`, or `or` if the intersection is empty.
    """
    union = Region(united([i for region in regions for i in region.intervals]), regions[0].variable)
    if any(word.lower() in ("or", "vee") for word in connectives):
        return union
    common = regions[0].intervals
    for region in regions[1:]:
        common = tuple(overlaps(common, region.intervals))
    return Region(common, regions[0].variable) if common else union


def united(intervals: list[Interval]) -> tuple[Interval, ...]:
    """The sorted intervals, touching ones merged; unchanged if ends cannot be compared."""
    try:
        ordered = sorted(intervals, key=lambda i: (_position(i.start), i.open_start))
    except ValueError:
        return tuple(intervals)
    united: list[Interval] = []
    for interval in ordered:
        if united and _touch(united[-1], interval):
            last = united.pop()
            later = max((last, interval), key=lambda i: (_position(i.end), not i.open_end))
            interval = Interval(last.start, later.end, last.open_start, later.open_end)
        united.append(interval)
    return tuple(united)


def _touch(one: Interval, next_: Interval) -> bool:
    end, start = _position(one.end), _position(next_.start)
    return start < end or (start == end and not (one.open_end and next_.open_start))


def overlaps(one: tuple[Interval, ...], other: tuple[Interval, ...]) -> Iterator[Interval]:
    """The intersections of each interval of `one` with each of `other`."""
    for a, b in itertools.product(one, other):
        try:
            start = max((a, b), key=lambda i: (_position(i.start), i.open_start))
            end = min((a, b), key=lambda i: (_position(i.end), not i.open_end))
            low, high = _position(start.start), _position(end.end)
        except ValueError:
            continue
        if low < high or (low == high and not (start.open_start or end.open_end)):
            yield Interval(start.start, end.end, start.open_start, end.open_end)


def complement(intervals: tuple[Interval, ...]) -> tuple[Interval, ...]:
    """The real numbers outside of the intervals."""
    gaps: list[Interval] = []
    start, open_start = -sympy.oo, True
    for interval in united(list(intervals)):
        if interval.start != -sympy.oo:
            gaps.append(Interval(start, interval.start, open_start, not interval.open_start))
        start, open_start = interval.end, not interval.open_end
    if start != sympy.oo:
        gaps.append(Interval(start, sympy.oo, open_start, True))
    return tuple(gaps)


def is_unbounded(region: Region) -> bool:
    """Whether an end is infinite."""
    return any(
        interval.start == -sympy.oo or interval.end == sympy.oo for interval in region.intervals
    )


def _position(expression: Expression) -> float:
    """The position on the real line. Raises ValueError if it depends on an unknown."""
    try:
        return float(expression)
    except (TypeError, OverflowError) as error:
        raise ValueError(str(expression)) from error
