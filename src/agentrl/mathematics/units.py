r"""Units: their dimensions and factors.

    cm^2, square centimeters, \text{cm}^2     length^2, 1/10000
    miles per hour, mph, km/h                 length / time
    18 eggs                                   a count of the thing "egg"

Other words name things that are counted. Quantities of different things are not equal.
"""

import re
from fractions import Fraction

import sympy

from agentrl.mathematics.answers import Unit

_BASE: dict[str, tuple[str, Fraction | int]] = {}


def _define(dimension: str, **factors: Fraction | int | str) -> None:
    for names, factor in factors.items():
        for name in names.split("__"):
            _BASE[name] = (dimension, Fraction(factor))


_METRIC = {
    "n": "1/1000000000", "u": "1/1000000", "m": "1/1000", "c": "1/100", "d": "1/10", "k": "1000",
    "M": "1000000", "G": "1000000000",
}  # fmt: skip
_METRIC_WORDS = {
    "nano": "n", "micro": "u", "milli": "m", "centi": "c", "deci": "d", "kilo": "k", "mega": "M",
    "giga": "G",
}  # fmt: skip
_PREFIXED = {  # symbol: words, dimension, factor to its base
    "m": (("meter", "metre"), "length", "1"),
    "g": (("gram", "gramme"), "mass", "1"),
    "s": (("second",), "time", "1"),
    "L": (("liter", "litre"), "volume", "1/1000"),
    "l": ((), "volume", "1/1000"),
    "J": (("joule",), "energy", "1"),
    "W": (("watt",), "power", "1"),
    "N": (("newton",), "force", "1"),
    "Pa": (("pascal",), "pressure", "1"),
    "V": (("volt",), "voltage", "1"),
    "A": (("ampere", "amp"), "current", "1"),
    "Hz": (("hertz",), "frequency", "1"),
    "eV": (("electronvolt",), "electronvolt", "1"),
    "mol": (("mole",), "amount", "1"),
    "K": (("kelvin",), "temperature", "1"),
    "T": (("tesla",), "field", "1"),
    "C": (("coulomb",), "charge", "1"),
    "F": (("farad",), "capacity", "1"),
    "ohm": ((), "resistance", "1"),
}
for _symbol, (_words, _dimension, _factor) in _PREFIXED.items():
    for _name in (_symbol, *_words):
        _define(_dimension, **{_name: _factor})
    for _prefix, _power in _METRIC.items():
        _define(_dimension, **{_prefix + _symbol: Fraction(_factor) * Fraction(_power)})
    for _prefix_word, _prefix in _METRIC_WORDS.items():
        for _name in _words:
            _define(
                _dimension, **{_prefix_word + _name: Fraction(_factor) * Fraction(_METRIC[_prefix])}
            )
_define(
    "length", inch__inches__in="127/5000", foot__feet__ft="381/1250", yard__yd="1143/1250",
    mile__mi="201168/125",
)  # fmt: skip
_define(
    "mass", pound__lb__lbs="45359237/100000", ounce__oz="45359237/1600000", ton="1000000",
    tonne="1000000",
)  # fmt: skip
_define(
    "time", sec="1", min__minute="60", h__hr__hour="3600", day="86400", week="604800",
    fortnight="1209600",
)  # fmt: skip
_define("calendar", month="1", year__yr="12", decade="120", century__centuries="1200")
_define("money", dollar__usd__buck="1", cent__penny__pennies="1/100", nickel="1/20", dime="1/10")
_define("euro", euro__eur="1")
_define("pound sterling", gbp="1")
_define("yen", yen__jpy="1")
_define("rupee", rupee__rs__inr="1")
_define("volume", gallon__gal="473176473/125000000000", quart="473176473/500000000000",
        pint="473176473/1000000000000", cup="473176473/2000000000000", cc="1/1000000")  # fmt: skip
_define("area", acre="316160658/78125", hectare="10000")
_define("celsius", degc__celsius="1")
_define("fahrenheit", degf__fahrenheit="1")
_define("angle", radian__rad="1")
_define("", hundred="100", thousand="1000", million="1000000", billion="1000000000")
_define("", trillion="1000000000000", dozen="12")

_COMPOUND = {"mph": "mile / hour", "kmph": "km / hour", "kph": "km / hour", "kmh": "km / hour",
             "fps": "foot / second"}  # fmt: skip
_DERIVED: dict[str, tuple[tuple[str, int], ...]] = {
    "": (), "volume": (("length", 3),), "area": (("length", 2),),
}  # fmt: skip
_IRREGULAR = {
    "men": "man",
    "women": "woman",
    "children": "child",
    "people": "person",
    "mice": "mouse",
}
_NO_MEANING = frozenset({"unit", "of", "the", "a", "an", "total", "each", "exactly", "about"})
_COUNTED_AS_NUMBERS = frozenset({"way", "number", "integer", "solution", "time", "point"})
_TOKEN = re.compile(r"[A-Za-z\u00b5\u03bc\u03a9]+\.?|\^\{?-?\d+\}?|/|-|\*|\S")
DEGREE = Unit(sympy.pi / 180, frozenset({("angle", 1)}))


def is_unit(word: str) -> bool:
    """Whether a word is a known unit."""
    return _base(word) is not None or word in _COMPOUND


def read_unit(text: str) -> Unit | None:
    """The unit in a text without LaTeX; None if it is not a unit."""
    factor, dimensions, things = sympy.Integer(1), dict[str, int](), set[str]()
    sign, power_before = 1, 1
    last: tuple[str, ...] | None = None
    tokens = [token.rstrip(".") if len(token) > 1 else token for token in _TOKEN.findall(text)]
    tokens = [part for token in tokens for part in _COMPOUND.get(token.lower(), token).split()]
    for place, token in enumerate(tokens):
        word = token.lower()
        if word == "in" and tokens[place + 1 : place + 2] and tokens[place + 1][0].isalpha():
            continue  # 18 in total
        if token.startswith("^"):
            if last is None:
                continue  # 12 units^2
            exponent = int(token.strip("^{}"))
            factor, dimensions = _times(factor, dimensions, last[0], sign * (exponent - 1))
        elif word in ("/", "per"):
            sign = -1
        elif word in ("squared", "cubed") and last is not None:
            factor, dimensions = _times(factor, dimensions, last[0], 1 if word == "squared" else 2)
        elif word in ("square", "sq", "cubic", "cu"):
            power_before = 2 if word.startswith("sq") else 3
        elif word in ("*", "-", ".") or word in _NO_MEANING or _singular(word) in _NO_MEANING:
            continue
        elif not token[0].isalpha():
            return None
        elif _base(token) is not None:
            factor, dimensions = _times(factor, dimensions, token, sign * power_before)
            last, power_before = (token,), 1
        elif len(word) == 1:
            return None
        else:
            thing = _singular(word)
            if thing not in _COUNTED_AS_NUMBERS:
                things.add(thing)
            last = None
    return Unit(factor, frozenset((d, p) for d, p in dimensions.items() if p), frozenset(things))


def _base(word: str) -> tuple[str, Fraction | int] | None:
    """Dimension and factor of a unit, by symbol or by name (singular or plural); else None."""
    if word in _BASE:
        return _BASE[word]
    small = word.lower()
    if len(word) > 2 and small in _BASE:
        return _BASE[small]
    singular = _singular(small)
    return _BASE.get(singular) if len(singular) > 1 and singular != small else None


def _times(
    factor: sympy.Expr, dimensions: dict[str, int], unit: str, power: int
) -> tuple[sympy.Expr, dict[str, int]]:
    """Factor and dimensions, multiplied by a power of `unit`."""
    found = _base(unit)
    assert found is not None
    dimension, size = found
    after = dict(dimensions)
    for name, exponent in _DERIVED.get(dimension, ((dimension, 1),)):
        after[name] = after.get(name, 0) + exponent * power
    return factor * sympy.Rational(size) ** power, after


def _singular(word: str) -> str:
    if word in _IRREGULAR:
        return _IRREGULAR[word]
    if word.endswith("ies") and len(word) > 4:
        return word[:-3] + "y"
    if word.endswith(("ches", "shes", "xes", "sses")):
        return word[:-2]
    return word[:-1] if word.endswith("s") and not word.endswith("ss") and len(word) > 2 else word
