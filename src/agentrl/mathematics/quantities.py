"""Numbers with a unit, a currency or a percent sign, and where letters are words."""

import re
from collections.abc import Iterator

from agentrl.mathematics.answers import Answer, Percent, Quantity, Unit, Value
from agentrl.mathematics.expressions import read_value
from agentrl.mathematics.notation import without_thousands
from agentrl.mathematics.units import DEGREE, is_unit, read_unit

_MONEY = {
    r"\dollar": "dollar",
    r"\euro": "euro",
    r"\sterling": "gbp",
    r"\yen": "yen",
    r"\cent": "cent",
}
_MONEY_SIGN = re.compile(r"\\(?:dollar|euro|sterling|yen|cent)(?![A-Za-z])")
_UNIT_PART = r"(?:\\text\{[^{}]*\}|[A-Za-z\u00b5]+\.?)(?:\^\{-?\d+\})?"
_UNIT = re.compile(rf"{_UNIT_PART}(?:\s*(?:/|\\cdot|-|\s)\s*{_UNIT_PART})*\s*\.?")
_MODULUS = re.compile(r"(.+?)\s*(?:\\pmod|\\bmod|\(?\\text\{mod\}|\(?\bmod\b)\s*\{?(\w+)\}?\)?")
_NUMBER_AND_UNIT = re.compile(r"(\d+(?:\.\d+)?) ?(?:\\text\{)?([A-Za-z]+)\}?")
_COMPOUND = re.compile(rf"{_NUMBER_AND_UNIT.pattern}(?:(?: |,|and)+{_NUMBER_AND_UNIT.pattern})+")
_VOWEL = re.compile("[aeiouyAEIOUY]")
_ALPHABET = "abcdefghijklmnopqrstuvwxyz"
_PROSE = {
    "is", "it", "so", "the", "are", "be", "we", "get", "thus", "then", "of", "has", "have",
    "and", "not", "for",
}  # fmt: skip


def read_quantity(text: str) -> Answer | None:
    """A number with a unit, a currency or a percent sign; None for other texts."""
    if text.endswith(r"\percent"):
        number = read_value(without_thousands(text.removesuffix(r"\percent")))
        return Percent(number) if number is not None else None
    congruent = _MODULUS.fullmatch(text)
    if congruent is not None:
        number, modulus = read_value(congruent[1]), congruent[2].replace(" ", "")
        of = Unit(1, frozenset(), frozenset({f"modulo {modulus}"}))
        return Quantity(number, of) if number is not None else None
    money = _MONEY_SIGN.search(text)
    if money is not None:
        rest = text[: money.start()] + text[money.end() :]
        number = read_value(without_thousands(without_unit(rest)))
        unit = read_unit(_MONEY[money[0]])
        return Quantity(number, unit) if number is not None and unit is not None else None
    if text.endswith(r"\degree"):
        number = read_value(text.removesuffix(r"\degree"))
        return Quantity(number, DEGREE) if number is not None else None
    for place in _unit_starts(text):
        number = read_value(without_thousands(text[:place]))
        unit = _unit_of(text[place:]) if number is not None else None
        if number is None or unit is None:
            continue
        if number.expression.free_symbols and not text[place:].startswith(r"\text"):
            continue
        return Quantity(number, unit)
    return None


def read_compound(text: str) -> Answer | None:
    """A quantity in several units, such as 1 hour 20 minutes; None for other texts."""
    if not _COMPOUND.fullmatch(text):
        return None
    parts = [(read_value(part[1]), read_unit(part[2])) for part in _NUMBER_AND_UNIT.finditer(text)]
    whole, measured = None, None
    for number, unit in parts:
        if number is None or unit is None or not unit.dimensions or unit.things:
            return None
        if measured is not None and unit.dimensions != measured.dimensions:
            return None
        measured = measured or unit
        amount = number.expression * unit.factor / measured.factor
        whole = amount if whole is None else whole + amount
    return Quantity(Value(whole), measured) if measured is not None else None


def _unit_starts(text: str) -> Iterator[int]:
    """The indices at which a unit may begin: words that are not part of the mathematics."""
    for start in re.finditer(r"\\text\{|(?<![A-Za-z\\{])[A-Za-z\u00b5]+", text):
        if start.start() == 0 or not _UNIT.fullmatch(text, start.start()):
            continue
        word = start[0]
        if word != r"\text{":
            spaced = text[start.start() - 1] == " "
            if (len(word) == 1 and not spaced) or (len(word) < 3 and not is_unit(word)):
                continue
            if len(word) > 1 and not spaced and not is_unit(word):
                continue
            if len(word) == 1 and not is_unit(word):
                continue
        yield start.start()


def _unit_of(text: str) -> Unit | None:
    plain = re.sub(r"\\text\{([^{}]*)\}", r"\1 ", text).replace(r"\cdot", "*")
    plain = re.sub(r"\s+(?=\^)", "", plain)
    return DEGREE if re.fullmatch(r"\s*deg(?:ree)?s?\.?\s*", plain) else read_unit(plain)


def without_unit(text: str) -> str:
    """A side of a relation, or an end of an interval, without its unit or currency."""
    text = _MONEY_SIGN.sub("", text)
    return re.sub(r"\\text\{[^{}]*\}(?:\^\{\d\})?\s*$|\\degree\s*$", "", text.strip())


def has_words(text: str) -> bool:
    """Whether a text contains words, not only products of unknowns."""
    plain = re.sub(r"\\[A-Za-z]+|_\{[^{}]*\}", " ", text)
    if re.fullmatch(r"\s*[A-Za-z]{3}\s*", plain) and plain.strip().lower() not in _ALPHABET:
        return _VOWEL.search(plain) is not None
    runs = re.findall(r"[A-Za-z]+", plain)
    return any((len(run) > 3 and _VOWEL.search(run)) or run.lower() in _PROSE for run in runs)
