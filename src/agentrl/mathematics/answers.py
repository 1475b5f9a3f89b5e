"""The kinds of answers there are. Their leaves are SymPy expressions."""

from dataclasses import dataclass
from typing import Any

Expression = Any
"""A SymPy expression: the library has no types."""


@dataclass(frozen=True)
class Value:
    """A number or an expression. `decimals`: of a number that is written as a decimal, the digits
    after its point; `digits`: its significant digits."""

    expression: Expression
    decimals: int | None = None
    digits: int = 0


@dataclass(frozen=True)
class Unit:
    """What a quantity measures: powers of base dimensions, things that are counted, and the factor
    to the base units."""

    factor: Expression
    dimensions: frozenset[tuple[str, int]]
    things: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Quantity:
    """A number of some unit."""

    number: Value
    unit: Unit


@dataclass(frozen=True)
class Percent:
    """A number of hundredths."""

    number: Value


@dataclass(frozen=True)
class Based:
    """A whole number in a base that is written beside it."""

    digits: str
    base: int


@dataclass(frozen=True)
class Ratio:
    """a : b"""

    terms: tuple["Answer", ...]
    text: str


@dataclass(frozen=True)
class Words:
    """A word or a few, without case and punctuation: a name, a choice, yes."""

    text: str


@dataclass(frozen=True)
class Row:
    """Several answers in an order. `bracketed`: they stand in brackets, as a tuple's do; a list
    without any has no order."""

    items: tuple["Answer", ...]
    bracketed: bool


@dataclass(frozen=True)
class Collection:
    """A set of finitely many."""

    items: tuple["Answer", ...]


@dataclass(frozen=True)
class Matrix:
    """Rows of answers, all of one length."""

    rows: tuple[tuple["Answer", ...], ...]


@dataclass(frozen=True)
class Interval:
    """From `start` to `end`, with or without each."""

    start: Expression
    end: Expression
    open_start: bool
    open_end: bool


@dataclass(frozen=True)
class Region:
    """A union of intervals, in order. `variable`: whose, where it is named."""

    intervals: tuple[Interval, ...]
    variable: str | None = None


@dataclass(frozen=True)
class Assignment:
    """name = value"""

    name: str
    value: "Answer"


@dataclass(frozen=True)
class Equation:
    """left - right = 0"""

    difference: Expression


@dataclass(frozen=True)
class Inequality:
    """difference < 0, or <= 0, of more than one unknown."""

    difference: Expression
    strict: bool


Answer = (
    Value | Quantity | Percent | Based | Ratio | Words | Row | Collection | Matrix | Region
    | Assignment | Equation | Inequality
)  # fmt: skip
