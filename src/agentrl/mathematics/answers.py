"""The kinds of answers there are. Their leaves are SymPy expressions."""

from dataclasses import dataclass
from typing import Any

Expression = Any
"""A SymPy expression; SymPy has no type annotations."""


@dataclass(frozen=True)
class Value:
    """A number or an expression.

    For a number in decimal notation, `decimals` are the digits after the point and `digits` the
    significant digits.
    """

    expression: Expression
    decimals: int | None = None
    digits: int = 0


@dataclass(frozen=True)
class Unit:
    """A unit: powers of base dimensions, counted things, and the factor to the base units."""

    factor: Expression
    dimensions: frozenset[tuple[str, int]]
    things: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Quantity:
    """A number with a unit."""

    number: Value
    unit: Unit


@dataclass(frozen=True)
class Percent:
    """A percentage: `number` is 100 times the value."""

    number: Value


@dataclass(frozen=True)
class Based:
    """An integer with an explicit base."""

    digits: str
    base: int


@dataclass(frozen=True)
class Ratio:
    """A ratio a : b. `text`: as written; a clock time has no terms."""

    terms: tuple["Answer", ...]
    text: str


@dataclass(frozen=True)
class Words:
    """A few words in lower case without punctuation, such as a name, a choice or "yes"."""

    text: str


@dataclass(frozen=True)
class Row:
    """Several answers. `bracketed`: a tuple, whose order counts; without brackets it does not."""

    items: tuple["Answer", ...]
    bracketed: bool


@dataclass(frozen=True)
class Collection:
    """A finite set."""

    items: tuple["Answer", ...]


@dataclass(frozen=True)
class Matrix:
    """Rows of answers, all of the same length."""

    rows: tuple[tuple["Answer", ...], ...]


@dataclass(frozen=True)
class Interval:
    """The interval from `start` to `end`; an open end is excluded."""

    start: Expression
    end: Expression
    open_start: bool
    open_end: bool


@dataclass(frozen=True)
class Region:
    """A union of intervals, in order. `variable`: its name, if given."""

    intervals: tuple[Interval, ...]
    variable: str | None = None


@dataclass(frozen=True)
class Assignment:
    """The equation name = value."""

    name: str
    value: "Answer"


@dataclass(frozen=True)
class Equation:
    """The equation difference = 0."""

    difference: Expression


@dataclass(frozen=True)
class Inequality:
    """The inequality difference < 0 (`strict`) or <= 0, with unknowns."""

    difference: Expression
    strict: bool


Answer = (
    Value | Quantity | Percent | Based | Ratio | Words | Row | Collection | Matrix | Region
    | Assignment | Equation | Inequality
)  # fmt: skip
