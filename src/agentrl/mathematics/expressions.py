"""Parses expressions from canonical notation to SymPy, and compares them.

latex2sympy2_extended parses the notation. Forms that it would misread are changed before: a decimal
becomes an exact fraction, because it would become a float of 53 bits; two adjacent numbers are
refused, because it would add them.

Expressions are equal if their values at fixed points agree to 40 of 60 digits. Rational numbers
must be exactly equal.
"""

import logging
import math
import re
from decimal import Decimal
from functools import lru_cache

import sympy
from latex2sympy2_extended import latex2sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from sympy.core.function import AppliedUndef

from agentrl.mathematics.answers import Expression, Value

logging.getLogger("latex2sympy2_extended").setLevel(logging.CRITICAL)

_CONVERSION = ConversionConfig(lowercase_symbols=False, interpret_contains_as_eq=False)
_DECIMAL = re.compile(r"(?<![\d.])(\d*\.\d+|\d+\.(?!\d))")
_NUMBER = re.compile(r"[-+]?\s*(?:\d+\.?\d*|\.\d+)")
_SCIENTIFIC = re.compile(r"([-+]?\s*(?:\d+\.?\d*|\.\d+))\s*\\cdot\s*10\^\{([-+]?\d+)\}")
_FRACTION = re.compile(r"(-?)\s*(?:\\frac\{(\d{1,50})\}\{(\d{1,50})\}|(\d{1,50})/(\d{1,50}))")
_SIDE_BY_SIDE = re.compile(r"[\d.]\s+\.?\d|\d\s*\.\s*\d*\s*\.\s*\d")
_DEGREES = re.compile(r"(\d+(?:\.\d+)?)\s*\\degree")
_SUBSCRIPTED_E = re.compile(r"(?<![A-Za-z\\])E_\{(\w+)\}")
_PRIMED = re.compile(r"([A-Za-z])('+)")
_ALLOWED = re.compile(r"[\w\s\\{}()\[\]|.,+\-*/^!'=]*")
_UNKNOWN_COMMANDS = re.compile(
    r"\\(?:text|percent|dollar|euro|cent|ldots|degree|begin|mathbb|cup|in)(?![A-Za-z])"
)
_DIGITS = 60
_AGREEING = 40
_LARGEST_EXPONENT = 1e6
_POINTS = 4
_NOISE_BITS = 30
_LAZY = (
    sympy.Sum, sympy.Product, sympy.Integral, sympy.Limit, sympy.Derivative, sympy.UnevaluatedExpr,
)  # fmt: skip
_APPROXIMATE_FROM = 6  # significant digits


class TooLarge(ValueError):
    """A number with too many digits to compute."""


@lru_cache(maxsize=4096)  # a ground truth is parsed for each rollout of its group
def read_value(text: str) -> Value | None:
    """The value of a text in canonical notation; None if it is not an expression."""
    text = text.strip().strip(",;")
    number = _read_decimal(text) or _read_fraction(text)
    if number is not None:
        return number
    if not text or len(text) > 4000 or not _ALLOWED.fullmatch(text):
        return None
    text = _DEGREES.sub(r"(\1\\cdot\\frac{\\pi}{180})", text)
    if _SIDE_BY_SIDE.search(text) or _UNKNOWN_COMMANDS.search(text):
        return None
    text = _SUBSCRIPTED_E.sub(r"X_{E\1}", text)  # the parser takes E for a function
    text = _PRIMED.sub(lambda primed: f"{primed[1]}_{{{'p' * len(primed[2])}}}", text)
    text = _DECIMAL.sub(lambda decimal: _fraction(decimal[0]), text)
    try:
        read = latex2sympy(text, normalization_config=None, conversion_config=_CONVERSION)
    except Exception:  # the parser may raise anything for a text that is not mathematics
        return None
    if not isinstance(read, sympy.Expr):
        return None
    names = {
        symbol: sympy.Symbol(f"{symbol.name}_")
        for symbol in read.free_symbols
        if symbol.name == "I"
    }
    capital = sympy.Symbol("I")
    read = read.xreplace({sympy.I: capital, **names}).xreplace({sympy.Symbol("i"): sympy.I})
    return Value(read.replace(lambda part: isinstance(part, AppliedUndef), _as_symbol))


def equal(one: Value, other: Value) -> bool:
    """Whether two values are equal. Raises `TooLarge`."""
    if _is_rounded(one, other.expression) or _is_rounded(other, one.expression):
        return True
    return same(one.expression, other.expression)


def same(one: Expression, other: Expression) -> bool:
    """Whether two expressions are equal at the points where both have values. Raises `TooLarge`."""
    if one == other:
        return one is not sympy.nan and one is not sympy.zoo
    for expression in (one, other):
        check_size(expression)
    symbols = sorted(one.free_symbols | other.free_symbols, key=str)
    if not symbols:
        return _same_number(one, other)
    if sympy.oo in (one, other) or -sympy.oo in (one, other):
        return False
    pairs = [
        (first, second)
        for point in _points(symbols, whole=_is_lazy(one) or _is_lazy(other))
        if (first := _number(one.subs(point))) is not None
        and (second := _number(other.subs(point))) is not None
    ]
    # Prefer points where both are real: elsewhere roots and logarithms have several branches.
    real = [pair for pair in pairs if all(value.is_real for value in pair)]
    return bool(pairs) and all(_agree(*pair) for pair in real or pairs)


def proportion(one: Expression, other: Expression) -> Expression | None:
    """The constant factor c with one = c * other; None if there is none.

    With such a factor, one = 0 and other = 0 are the same equation; if c > 0, one < 0 and other < 0
    are the same inequality. Raises `TooLarge`.
    """
    for expression in (one, other):
        check_size(expression)
    symbols = sorted(one.free_symbols | other.free_symbols, key=str)
    if not symbols or one.free_symbols != other.free_symbols:
        return None
    factors = [
        first / second
        for point in _points(symbols)
        if (first := _number(one.subs(point))) is not None
        and (second := _number(other.subs(point)))
    ]
    if len(factors) < 2 or not all(_agree(factor, factors[0]) for factor in factors):
        return None
    return factors[0] or None


def sign_of(expression: Expression) -> int | None:
    """The sign -1, 0 or 1; None if the expression is not a real number. Raises `TooLarge`."""
    if expression in (sympy.oo, -sympy.oo):
        return 1 if expression == sympy.oo else -1
    check_size(expression)
    value = _number(expression)
    if value is None or not value.is_real:
        return None
    return 0 if _agree(value, sympy.Integer(0)) else (1 if value > 0 else -1)


def check_size(expression: Expression) -> None:
    """Raise `TooLarge` if the value of an expression may have millions of digits."""
    for part in sympy.preorder_traversal(expression):
        if isinstance(part, sympy.Pow) and not part.free_symbols:
            exponent = _magnitude(part.exp)
            if exponent > _LARGEST_EXPONENT:
                raise TooLarge(f"an exponent above {_LARGEST_EXPONENT:g}")
        if isinstance(part, sympy.factorial) and _magnitude(part.args[0]) > _LARGEST_EXPONENT:
            raise TooLarge(f"a factorial above {_LARGEST_EXPONENT:g}")


def _magnitude(expression: Expression) -> float:
    """An approximate upper bound of a number's magnitude; infinity for towers of powers."""
    if isinstance(expression, sympy.Pow):
        base, exponent = _magnitude(expression.base), _magnitude(expression.exp)
        try:
            return float(max(base, 1.0) ** exponent)
        except OverflowError:
            return math.inf
    if isinstance(expression, sympy.factorial):
        size = _magnitude(expression.args[0])
        return math.inf if size > 170 else math.gamma(size + 1)
    if expression.args:
        sizes = [max(_magnitude(part), 1.0) for part in expression.args]
        return math.prod(sizes) if isinstance(expression, sympy.Mul) else sum(sizes)
    try:
        return abs(float(expression))
    except (TypeError, ValueError):
        return 1.0
    except OverflowError:
        return math.inf


def _read_decimal(text: str) -> Value | None:
    """The value of a plain number or scientific notation, with its digits; None for other texts."""
    scientific = _SCIENTIFIC.fullmatch(text)
    written = scientific[1] if scientific else text
    if not _NUMBER.fullmatch(written) or len(written) > 4000:
        return None
    number, exponent = Decimal(written.replace(" ", "")), int(scientific[2]) if scientific else 0
    if abs(exponent) > _LARGEST_EXPONENT:
        return None
    value = sympy.Rational(*number.as_integer_ratio()) * sympy.Integer(10) ** exponent
    if "." not in written and not scientific:
        return Value(value)
    places = -int(number.as_tuple().exponent) - exponent
    return Value(value, places, len(str(abs(int(number.scaleb(-int(number.as_tuple().exponent)))))))


def _read_fraction(text: str) -> Value | None:
    """The value of a fraction of integers, which is very common; None for other texts."""
    found = _FRACTION.fullmatch(text)
    if found is None or not int(found[3] or found[5]):
        return None
    over, under = int(found[2] or found[4]), int(found[3] or found[5])
    return Value(sympy.Rational(-over if found[1] else over, under))


def _fraction(decimal: str) -> str:
    """A decimal as an exact LaTeX fraction in brackets."""
    whole, _, places = decimal.partition(".")
    if not places:
        return whole
    return rf"(\frac{{{int(whole + places)}}}{{1{'0' * len(places)}}})"


def _as_symbol(function: Expression) -> sympy.Symbol:
    """An undefined function such as f(x), as an unknown."""
    return sympy.Symbol(str(function))


def _is_rounded(decimal: Value, exact: Expression) -> bool:
    """Whether a decimal with enough digits is `exact`, rounded or truncated to them."""
    if decimal.decimals is None or decimal.digits < _APPROXIMATE_FROM or exact.free_symbols:
        return False
    check_size(exact)
    value = _number(exact)
    if value is None or not value.is_real or not value.is_finite:
        return False
    unit = sympy.Integer(10) ** decimal.decimals
    scaled, shown = value * unit, decimal.expression * unit
    if abs(scaled) > sympy.Integer(10) ** (_DIGITS - 10):
        return False
    cut = sympy.sign(scaled) * sympy.floor(abs(scaled))
    rounded = sympy.sign(scaled) * sympy.floor(abs(scaled) + sympy.Rational(1, 2))
    return shown in (cut, rounded)


def _points(
    symbols: list[sympy.Symbol], whole: bool = False
) -> list[dict[sympy.Symbol, Expression]]:
    """The fixed points at which expressions are compared.

    Positive and negative fractions, and integers for expressions that are defined only there.
    `whole`: integers only, as bounds of sums must be.
    """
    points: list[dict[sympy.Symbol, Expression]] = []
    for place in range(0 if whole else _POINTS):
        sign = -1 if place % 2 else 1
        numerators = (
            (7919 * (place + 1) + 6101 * (n + 1)) % 9973 + 500 for n in range(len(symbols))
        )
        points.append(
            {s: sympy.Rational(sign * n, 3181) for s, n in zip(symbols, numerators, strict=True)}
        )
    points += [
        {symbol: sympy.Integer(4 + place + 3 * n) for n, symbol in enumerate(symbols)}
        for place in range(_POINTS if whole else 2)
    ]
    return points


def _number(expression: Expression) -> Expression | None:
    """The value of an expression without unknowns; None if it has none."""
    try:
        value = sympy.N(expression.doit() if _is_lazy(expression) else expression, _DIGITS)
    except (
        TypeError,
        ValueError,
        ArithmeticError,
        AttributeError,
        NotImplementedError,
        RecursionError,
    ):
        return None
    if not value.is_number or value in (sympy.nan, sympy.zoo):
        return None
    return value


def _is_lazy(expression: Expression) -> bool:
    return bool(expression.has(*_LAZY))


def _same_number(one: Expression, other: Expression) -> bool:
    first, second = _number(one), _number(other)
    if first is None or second is None:
        return False
    if not first.is_finite or not second.is_finite:
        return bool(first == second)
    if not _agree(first, second):
        return False
    if one.is_rational and other.is_rational:
        return bool(one.doit() - other.doit() == 0)
    return True


def _agree(one: Expression, other: Expression) -> bool:
    """Whether two numbers agree to `_AGREEING` digits."""
    if not (one.is_finite and other.is_finite):
        return bool(one == other)
    one, other = (sympy.Integer(0) if _is_noise(number) else number for number in (one, other))
    scale = max(abs(one), abs(other))
    return bool(scale == 0 or abs(one - other) < scale * sympy.Float(10) ** -_AGREEING)


def _is_noise(number: Expression) -> bool:
    """Whether a number is only rounding noise, left after all digits cancelled."""
    return isinstance(number, sympy.Float) and number._prec < _NOISE_BITS
