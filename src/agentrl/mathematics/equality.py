"""Whether a model's answer equals the ground truth.

Each kind of answer is compared with its own kind, and with kinds that are written in its place: one
side may omit a unit, a name (`x =`) or brackets.
"""

import re
from collections.abc import Sequence
from functools import singledispatch

import sympy

from agentrl.mathematics.answer_part import last_mathematics, marked_answer
from agentrl.mathematics.answers import (
    Answer,
    Assignment,
    Based,
    Collection,
    Equation,
    Inequality,
    Interval,
    Matrix,
    Percent,
    Quantity,
    Ratio,
    Region,
    Row,
    Value,
    Words,
)
from agentrl.mathematics.expressions import equal as equal_values
from agentrl.mathematics.expressions import proportion, same
from agentrl.mathematics.notation import canonical
from agentrl.mathematics.plain_forms import is_plain
from agentrl.mathematics.quantities import has_words
from agentrl.mathematics.reading import read

_IN_PERCENT = re.compile(r"%|\bper ?cent(?:age)?\b", re.IGNORECASE)
_LONGEST_ANSWER = 400  # characters; a longer text needs a marked answer
_ZERO = sympy.Integer(0)


def is_equal(ground_truth: str, model_answer: str, question: str = "") -> bool:
    """Whether the answer equals the ground truth.

    `question`: if it mentions percent, plain numbers are percentages. Raises ValueError if the
    ground truth cannot be parsed, `TooLarge` for numbers of millions of digits.
    """
    truth = read_ground_truth(ground_truth)
    answer = _read_marked(model_answer)
    unread = answer is None and marked_answer(model_answer) is None
    if unread or (isinstance(answer, Words) and not isinstance(truth, Words)):
        answer = _read_prose(model_answer) or answer
    if answer is None:
        return False
    if _IN_PERCENT.search(question):
        truth, answer = _as_percent(truth), _as_percent(answer)
    return _equal(truth, answer)


def read_ground_truth(text: str) -> Answer:
    """The answer in a ground truth. Raises ValueError if it cannot be parsed."""
    answer = _read_marked(text)
    if answer is None:
        raise ValueError(f"{text[:80]!r} is no mathematics")
    return answer


def is_readable(ground_truth: str) -> bool:
    """Whether a ground truth can be parsed; fast for common forms."""
    marked = marked_answer(ground_truth)
    text = canonical(ground_truth if marked is None else marked)
    plain = len(text) <= _LONGEST_ANSWER and not has_words(text) and is_plain(text)
    return plain or _read_marked(ground_truth) is not None


def _read_marked(text: str) -> Answer | None:
    """The answer that a text marks, else the whole text as an answer; None if unreadable."""
    marked = marked_answer(text)
    if marked is not None:
        return read(canonical(marked))
    return read(canonical(text)) if len(text) <= _LONGEST_ANSWER else None


def _read_prose(text: str) -> Answer | None:
    """The last mathematics in prose; None if the text has no words."""
    part = last_mathematics(text) if has_words(text) else None
    return read(canonical(part)) if part is not None else None


def _as_percent(answer: Answer) -> Answer:
    return Percent(answer) if isinstance(answer, Value) else answer


def _equal(truth: Answer, answer: Answer) -> bool:
    if type(truth) is type(answer):
        return _same_kind(truth, answer)
    return _other_kind(truth, answer) or _other_kind(answer, truth)


@singledispatch
def _same_kind(truth: Answer, answer: Answer) -> bool:
    """Whether two answers of the same kind are equal."""
    raise AssertionError(type(truth))


@_same_kind.register
def _(truth: Value, answer: Value) -> bool:
    return equal_values(truth, answer)


@_same_kind.register
def _(truth: Percent, answer: Percent) -> bool:
    return equal_values(truth.number, answer.number)


@_same_kind.register
def _(truth: Quantity, answer: Quantity) -> bool:
    one, other = truth.unit, answer.unit
    if one.dimensions != other.dimensions:
        return False
    if not (one.things <= other.things or other.things <= one.things):
        return False
    if one.factor == other.factor:
        return equal_values(truth.number, answer.number)
    return same(truth.number.expression * one.factor, answer.number.expression * other.factor)


@_same_kind.register
def _(truth: Based, answer: Based) -> bool:
    return int(truth.digits, truth.base) == int(answer.digits, answer.base)


@_same_kind.register
def _(truth: Ratio, answer: Ratio) -> bool:
    if truth.text == answer.text:
        return True
    first, second = truth.terms, answer.terms
    if not first or len(first) != len(second):
        return False
    return all(
        isinstance(a, Value) and isinstance(b, Value)
        and isinstance(first[0], Value) and isinstance(second[0], Value)
        and same(a.expression * second[0].expression, b.expression * first[0].expression)
        for a, b in zip(first, second, strict=True)
    )  # fmt: skip


@_same_kind.register
def _(truth: Words, answer: Words) -> bool:
    return truth.text == answer.text


@_same_kind.register
def _(truth: Row, answer: Row) -> bool:
    if truth.bracketed or answer.bracketed:
        return _in_order(truth.items, answer.items)
    return _in_any_order(truth.items, answer.items)


@_same_kind.register
def _(truth: Collection, answer: Collection) -> bool:
    return _in_any_order(truth.items, answer.items)


@_same_kind.register
def _(truth: Matrix, answer: Matrix) -> bool:
    return len(truth.rows) == len(answer.rows) and all(map(_in_order, truth.rows, answer.rows))


@_same_kind.register
def _(truth: Region, answer: Region) -> bool:
    if truth.variable and answer.variable and truth.variable != answer.variable:
        return False
    return len(truth.intervals) == len(answer.intervals) and all(
        map(_same_interval, truth.intervals, answer.intervals)
    )


@_same_kind.register
def _(truth: Assignment, answer: Assignment) -> bool:
    names = {truth.name, answer.name}
    # y and y(x), or f and f(x), may name the same function.
    functions = sum("(" in name for name in names)
    if len(names) == 2 and not (
        functions and any(name[0] in "yf" and len(name) < 5 for name in names)
    ):
        return False
    return _equal(truth.value, answer.value)


@_same_kind.register
def _(truth: Equation, answer: Equation) -> bool:
    return proportion(truth.difference, answer.difference) is not None


@_same_kind.register
def _(truth: Inequality, answer: Inequality) -> bool:
    factor = proportion(truth.difference, answer.difference)
    return truth.strict == answer.strict and factor is not None and bool(factor > 0)


@singledispatch
def _other_kind(one: Answer, other: Answer) -> bool:
    """Whether the second answer, of another kind, is another notation of the first one."""
    return False


@_other_kind.register
def _(one: Quantity, other: Answer) -> bool:
    if not isinstance(other, Value):
        return False
    if equal_values(one.number, other):
        return True
    if not one.unit.dimensions:  # 3.5 billion
        return same(one.number.expression * one.unit.factor, other.expression)
    angle = one.unit.dimensions == frozenset({("angle", 1)})
    return angle and other.expression.has(sympy.pi) and same(
        one.number.expression * one.unit.factor, other.expression
    )  # fmt: skip


@_other_kind.register
def _(one: Percent, other: Answer) -> bool:
    if not isinstance(other, Value):
        return False
    number = one.number
    decimals = None if number.decimals is None else number.decimals + 2
    return equal_values(Value(number.expression / 100, decimals, number.digits), other)


@_other_kind.register
def _(one: Based, other: Answer) -> bool:
    return isinstance(other, Value) and str(other.expression) == one.digits


@_other_kind.register
def _(one: Ratio, other: Answer) -> bool:
    if len(one.terms) != 2 or not isinstance(other, Value):
        return False
    over, under = one.terms
    assert isinstance(over, Value) and isinstance(under, Value)
    return not same(under.expression, _ZERO) and same(
        over.expression / under.expression, other.expression
    )


@_other_kind.register
def _(one: Words, other: Answer) -> bool:
    return isinstance(other, Value) and str(other.expression).lower() == one.text


@_other_kind.register
def _(one: Row, other: Answer) -> bool:
    if isinstance(other, Collection):
        return not one.bracketed and _in_any_order(one.items, other.items)
    if isinstance(other, Matrix):
        return _in_order(one.items, _vector(other)) and one.bracketed
    if isinstance(other, Region):
        return _is_open_interval(one, other)
    if isinstance(other, Assignment):  # (x, y) = (1, 2)
        return _equal(one, other.value)
    return False


@_other_kind.register
def _(one: Collection, other: Answer) -> bool:
    return len(one.items) == 1 and not isinstance(other, Row) and _equal(one.items[0], other)


@_other_kind.register
def _(one: Assignment, other: Answer) -> bool:
    if isinstance(other, Equation):
        if not isinstance(one.value, Value) or not re.fullmatch(r"\\?[A-Za-z]+", one.name):
            return False
        name = sympy.Symbol(one.name.removeprefix("\\"))
        return proportion(name - one.value.expression, other.difference) is not None
    return not isinstance(other, Row) and _equal(one.value, other)


def _in_order(one: Sequence[Answer], other: Sequence[Answer]) -> bool:
    return len(one) == len(other) and all(map(_equal, one, other))


def _in_any_order(one: Sequence[Answer], other: Sequence[Answer]) -> bool:
    """Whether the answers of both are equal in some order."""
    if len(one) != len(other):
        return False
    left = list(other)
    for item in one:
        place = next((place for place, each in enumerate(left) if _equal(item, each)), None)
        if place is None:
            return False
        del left[place]
    return True


def _same_interval(one: Interval, other: Interval) -> bool:
    return (
        one.open_start == other.open_start
        and one.open_end == other.open_end
        and same(one.start, other.start)
        and same(one.end, other.end)
    )


def _is_open_interval(row: Row, region: Region) -> bool:
    """Whether a pair in round brackets equals an open interval."""
    if len(row.items) != 2 or len(region.intervals) != 1 or not row.bracketed:
        return False
    start, end = row.items
    if not isinstance(start, Value) or not isinstance(end, Value):
        return False
    interval = Interval(start.expression, end.expression, True, True)
    return _same_interval(interval, region.intervals[0])


def _vector(matrix: Matrix) -> Sequence[Answer]:
    """The entries of a matrix with one row or one column; [] for other matrices."""
    if len(matrix.rows) == 1:
        return matrix.rows[0]
    return [row[0] for row in matrix.rows] if len(matrix.rows[0]) == 1 else []
