r"""Parses a text in canonical notation to an answer.

Brackets, commas, relations and units are parsed here, from the outside in. `expressions.py` parses
the values inside.
"""

import itertools
import re
from collections.abc import Iterable

import sympy

from agentrl.mathematics.answers import (
    Answer,
    Assignment,
    Based,
    Collection,
    Equation,
    Inequality,
    Interval,
    Ratio,
    Region,
    Row,
    Value,
    Words,
)
from agentrl.mathematics.expressions import read_value, sign_of
from agentrl.mathematics.matrices import read_matrix
from agentrl.mathematics.notation import without_thousands
from agentrl.mathematics.quantities import has_words, read_compound, read_quantity, without_unit
from agentrl.mathematics.regions import (
    combined,
    complement,
    half_line,
    is_unbounded,
    overlaps,
    solutions,
    united,
)
from agentrl.mathematics.structure import balanced, closing, split

_RELATION = re.compile(r"=|<|>|\\(?:le|ge|ne|approx|equiv|sim)(?![A-Za-z])")
_FLIPPED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}
_CONNECTIVE = re.compile(
    r"(?:,\s*)?(?<![A-Za-z\\])(and|or)(?![A-Za-z])|\\(wedge|vee)(?![A-Za-z])|[,;]", re.IGNORECASE
)
_NAME = r"(?:[A-Za-z]|\\[A-Za-z]+)(?:_\{[^{}]*\})?'*"
_ASSIGNED = re.compile(rf"{_NAME}(?:\s*\(\s*{_NAME}(?:\s*,\s*{_NAME})*\s*\))?")
_CALLED = re.compile(
    r"\\text\{[^{}]*\}|[A-Za-z]{3,}(?: [A-Za-z]+)*|[A-Z]{2}"
    r"|\\(?:angle|triangle|overline)\s*\{?[A-Z]{1,4}\}?"
)
_NAMES = re.compile(rf"\(\s*{_NAME}(?:\s*,\s*{_NAME})+\s*\)")
# \frac{\pi}{4} + k\pi, k \in \mathbb{Z}
_OF_INTEGERS = re.compile(
    rf"(?<=\S)\s*,\s*(?:where|for)?\s*{_NAME}\s*\\in\s*\\mathbb\{{[ZN]\}}(?:\^\{{?\+\}}?)?\s*$"
)
_MEMBER = re.compile(rf"^({_NAME})\s*\\in(?![A-Za-z])\s*(.+)$")
_BASED = re.compile(r"([0-9A-Za-z]+)_\{(?:\\text\{)?\s*([0-9A-Za-z]+)\s*\}*\}?")
_NUMBER_WORDS = [
    "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen",
]  # fmt: skip
_BASE_WORDS = {word: base for base, word in enumerate(_NUMBER_WORDS, 2)}
_REALS = {
    r"\mathbb{R}",
    r"\text{all real numbers}",
    "all real numbers",
    r"\text{all reals}",
    "all reals",
    r"\text{real numbers}",
}
_EMPTY = {r"\emptyset", r"\{\}", r"\{ \}"}
_CLOCK = re.compile(r"\d{1,2}:\d\d(?::\d\d)?")
_WORDS = re.compile(r"[A-Za-z][A-Za-z'.\-]*(?: [A-Za-z'.\-]+| \d{1,4}(?:st|nd|rd|th)?)*")
_MOST_WORDS = 5
_MOST_SIGNS = 4
_PLUS_MINUS = re.compile(r"\\pm(?![A-Za-z])\s*")
_MINUS_PLUS = re.compile(r"\\mp(?![A-Za-z])\s*")
_MOST_CHARACTERS = 3000


def read(text: str) -> Answer | None:
    """The answer in a text in canonical notation; None if it cannot be parsed."""
    text = text.strip().rstrip(".,;:").strip()
    text = _OF_INTEGERS.sub("", text)
    text = re.sub(r"^(?:=|\\approx(?![A-Za-z])|~)\s*", "", text)
    if not text or len(text) > _MOST_CHARACTERS or not balanced(text):
        return None
    for reader in (
        _whole, _based, read_compound, _joined, _signed_twice, _member, _relation, _matrix, _region,
        _bracketed, _ratio, read_quantity, _value, _words,
    ):  # fmt: skip
        answer = reader(text)
        if answer is not None:
            return answer
    return None


def _matrix(text: str) -> Answer | None:
    return read_matrix(text, read)


def _whole(text: str) -> Answer | None:
    """A text that is one symbol or word, or that has redundant braces around it."""
    if text in _EMPTY:
        return Collection(())
    if text.lower() in _REALS or text in _REALS:
        return Region((Interval(-sympy.oo, sympy.oo, True, True),))
    if text == r"\ldots":
        return Words("...")
    if text in (r"\mathbb{Z}", r"\mathbb{N}", r"\mathbb{Q}", r"\mathbb{C}"):
        return Words(text[-2].lower())
    if re.fullmatch(r"\(\s*[A-J]\s*\)", text):
        return Words(text.strip("() ").lower())
    if text.startswith("{") and closing(text, 0) == len(text) - 1:
        return read(text[1:-1])
    return None


def _based(text: str) -> Answer | None:
    found = _BASED.fullmatch(re.sub(r"\\text\{([^{}]*)\}\s*(?=_)", r"\1", text))
    if found is None:
        return None
    digits, base = found[1].upper(), found[2].lower()
    number = _BASE_WORDS.get(base) or (int(base) if base.isdigit() else 0)
    if not 2 <= number <= 36 or (not digits[0].isdigit() and number <= 10):
        return None
    try:
        int(digits, number)
    except ValueError:
        return None
    return Based(digits.lstrip("0") or "0", number)


def _joined(text: str) -> Answer | None:
    """Several answers separated by commas, `and` or `or`."""
    if _CLOCK.match(text) or (_WORDS.fullmatch(text) and not _CONNECTIVE.search(text)):
        return None
    text = without_thousands(text)
    parts, connectives = split(text, _CONNECTIVE)
    if len(parts) < 2:
        return None
    items = [read(part) for part in parts if part.strip()]
    if not items or any(item is None for item in items):
        return None
    found = [item for item in items if item is not None]
    if all(isinstance(item, Region) for item in found):
        return combined([item for item in found if isinstance(item, Region)], connectives)
    found = [_named_as_first(item, found[0]) for item in _flat(found)]
    return Row(tuple(found), bracketed=False) if len(found) > 1 else found[0]


def _named_as_first(item: Answer, first: Answer) -> Answer:
    """`item` with the name of `first`: in `x = 3, 5, 7` all are values of x."""
    if isinstance(first, Assignment) and isinstance(item, Value):
        return Assignment(first.name, item)
    return item


def _signed_twice(text: str) -> Answer | None:
    r"""Both values of `\pm`."""
    if not (_PLUS_MINUS.search(text) or _MINUS_PLUS.search(text)) or _RELATION.search(text):
        return None
    if (
        len(split(text, _CONNECTIVE)[0]) > 1
        or len(re.findall(r"\\[pm][pm](?![A-Za-z])", text)) > _MOST_SIGNS
    ):
        return None
    both = [
        read(_MINUS_PLUS.sub(minus, _PLUS_MINUS.sub(plus, text))) for plus, minus in ("+-", "-+")
    ]
    if any(each is None for each in both):
        return None
    return Row(tuple(each for each in both if each is not None), bracketed=False)


def _member(text: str) -> Answer | None:
    r"""`x \in S` is S."""
    found = _MEMBER.match(text)
    if found is None:
        return None
    of = read(found[2])
    if isinstance(of, Row) and len(of.items) == 2 and of.bracketed:
        region = _interval(found[2].strip())
        of = region if region is not None else of
    return Region(of.intervals, _name(found[1])) if isinstance(of, Region) else of


def _relation(text: str) -> Answer | None:
    sides, signs = split(text, _RELATION, keep_signs=True)
    if len(sides) < 2:
        return None
    signs = ["=" if sign in (r"\approx", r"\equiv", r"\sim") else sign for sign in signs]
    if all(sign == "=" for sign in signs):
        return _equation(sides)
    if len(sides) == 2:
        return _inequality(sides[0], signs[0], sides[1])
    parts = [
        _inequality(a, sign, b)
        for (a, b), sign in zip(itertools.pairwise(sides), signs, strict=True)
    ]
    regions = [part for part in parts if isinstance(part, Region)]
    return combined(regions, ["and"]) if len(regions) == len(parts) else None


def _equation(sides: list[str]) -> Answer | None:
    first, last = sides[0].strip(), sides[-1].strip()
    if not last:
        return None
    if any(name.fullmatch(first) for name in (_ASSIGNED, _NAMES, _CALLED)):
        value = read(last)
        if value is None:
            return None
        if isinstance(value, Assignment | Equation | Inequality):
            return value
        return Assignment(_name(first), value)
    if _ASSIGNED.fullmatch(last) and len(sides) == 2 and not _ASSIGNED.fullmatch(first):
        value = read(first)
        if isinstance(value, Value) and not value.expression.free_symbols:
            return Assignment(_name(last), value)
    left, right = read_value(first), read_value(last)
    if left is None or right is None:
        return None
    if len(sides) > 2 or not (left.expression - right.expression).free_symbols:
        return right  # the result is at the end of a chain of equations
    return Equation(left.expression - right.expression)


def _inequality(left_text: str, sign: str, right_text: str) -> Answer | None:
    left, right = read_value(without_unit(left_text)), read_value(without_unit(right_text))
    if left is None or right is None:
        return None
    start, end = left.expression, right.expression
    if start.free_symbols and not end.free_symbols and start.is_Symbol:
        return half_line(start, sign, end)
    if end.free_symbols and not start.free_symbols and end.is_Symbol:
        return half_line(end, _FLIPPED.get(sign, sign), start)
    if sign == r"\ne":
        return None
    difference = start - end if sign in ("<", r"\le") else end - start
    strict = sign in ("<", ">")
    unknowns = difference.free_symbols
    if len(unknowns) == 1:
        region = solutions(difference, next(iter(unknowns)), strict)
        if region is not None:
            return region
    return Inequality(difference, strict) if unknowns else None


def _region(text: str) -> Answer | None:
    """A union or difference of intervals and finite sets."""
    parts, _ = split(text, re.compile(r"\\setminus(?![A-Za-z])|\\cup(?![A-Za-z])"), keep_signs=True)
    signs = split(text, re.compile(r"\\setminus(?![A-Za-z])|\\cup(?![A-Za-z])"), keep_signs=True)[1]
    if len(parts) == 1:
        # (1, 2) is read as a tuple; `equality` also compares it as an interval.
        region = _interval(text)
        if region is None or (text[0] == "(" and text[-1] == ")" and not is_unbounded(region)):
            return None
        return region
    regions = [_interval_or_points(part.strip()) for part in parts]
    if any(region is None for region in regions):
        return None
    found = [region for region in regions if region is not None]
    intervals = found[0].intervals
    for sign, region in zip(signs, found[1:], strict=True):
        if sign == r"\cup":
            intervals = united([*intervals, *region.intervals])
        else:
            intervals = tuple(overlaps(intervals, complement(region.intervals)))
    return Region(intervals)


def _interval_or_points(text: str) -> Region | None:
    region = _interval(text)
    if region is not None:
        return region
    answer = read(text)
    if isinstance(answer, Region):
        return answer
    if isinstance(answer, Collection) and all(isinstance(item, Value) for item in answer.items):
        points = [item.expression for item in answer.items if isinstance(item, Value)]
        return Region(tuple(Interval(point, point, False, False) for point in points))
    return None


def _interval(text: str) -> Region | None:
    if len(text) < 5 or text[0] not in "([]" or text[-1] not in ")][":
        return None
    ends, _ = split(text[1:-1], re.compile(r"[,;]"))
    if len(ends) != 2:
        return None
    start, end = (read_value(without_unit(side)) for side in ends)
    if start is None or end is None:
        return None
    order = sign_of(end.expression - start.expression) if end.expression != start.expression else 0
    if order is not None and order < 0:
        return None
    open_start, open_end = text[0] in "(]", text[-1] in ")["
    return Region((Interval(start.expression, end.expression, open_start, open_end),))


def _bracketed(text: str) -> Answer | None:
    r"""A tuple, or a set in `\{\}`."""
    for opening, ending in ((r"\{", r"\}"), (r"\langle", r"\rangle"), ("(", ")"), ("[", "]")):
        if not (text.startswith(opening) and text.endswith(ending)):
            continue
        if len(opening) == 1 and closing(text, 0) != len(text) - 1:
            continue
        inside = text[len(opening) : len(text) - len(ending)].strip()
        if opening == r"\{":
            condition = re.split(r"(?<!\\)[:|]|\\mid(?![A-Za-z])", inside, maxsplit=1)
            if len(condition) == 2 and _NAME_ONLY.match(condition[0].strip()):
                return read(condition[1])
        parts = [part for part in split(inside, re.compile(r"[,;]"))[0] if part.strip()]
        items = [read(part) for part in parts]
        if not items or any(item is None for item in items):
            return None
        found = tuple(item for item in items if item is not None)
        if opening == r"\{":
            return Collection(_flat(found))
        if len(found) == 1:
            return None if opening != "[" else Row(found, bracketed=True)
        return Row(found, bracketed=True)
    return None


_NAME_ONLY = re.compile(rf"{_NAME}(?:\s*\\in\s*\S+)?$")


def _ratio(text: str) -> Answer | None:
    if ":" not in text or re.search(r"(?<!\\)\b[A-Za-z]{2}", text):
        return None
    if _CLOCK.fullmatch(text):
        return Ratio((), text)
    terms = [read_value(part) for part in text.split(":")]
    if len(terms) < 2 or any(term is None for term in terms):
        return None
    return Ratio(tuple(term for term in terms if term is not None), text.replace(" ", ""))


def _value(text: str) -> Answer | None:
    return None if has_words(text) else read_value(without_thousands(text))


def _words(text: str) -> Answer | None:
    text = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text)
    text = re.sub(r"\s+", " ", text.replace("(", " ").replace(")", " ")).strip()
    if not _WORDS.fullmatch(text) and not re.fullmatch(r"\d{1,2}:\d\d ?[ap]\.?m\.?", text, re.I):
        return None
    if len(text.split()) > _MOST_WORDS:
        return None
    return Words(re.sub(r"[^a-z0-9: ]", "", text.lower()))


def _name(text: str) -> str:
    return re.sub(r"\s+", "", text)


def _flat(items: Iterable[Answer]) -> tuple[Answer, ...]:
    """The items, with lists without brackets flattened."""
    flat: list[Answer] = []
    for item in items:
        flat += item.items if isinstance(item, Row) and not item.bracketed else (item,)
    return tuple(flat)
