"""Brackets: splitting a text outside of them, and finding pairs."""

import re

_OPEN, _CLOSE = "([{", ")]}"
_DEEPEST = 40


def split(
    text: str, at: "re.Pattern[str]", keep_signs: bool = False
) -> tuple[list[str], list[str]]:
    """Split at the matches of `at` outside of all brackets; returns the parts and the separators.

    `keep_signs`: return whole matches as separators, not their first group.
    """
    parts, signs, depth, begins, place = [], [], 0, 0, 0
    while place < len(text):
        if text.startswith((r"\{", r"\}"), place):
            depth += 1 if text[place + 1] == "{" else -1
            place += 2
            continue
        if text.startswith((r"\begin", r"\end"), place):
            depth += 1 if text[place + 1] == "b" else -1
        found = at.match(text, place) if depth == 0 else None
        if found is not None and found.end() > place:
            parts.append(text[begins:place])
            signs.append(
                found[0] if keep_signs else next((g for g in found.groups() if g), found[0])
            )
            begins = place = found.end()
            continue
        depth += (text[place] in _OPEN) - (text[place] in _CLOSE)
        place += 1
    return [*parts, text[begins:]], signs


def closing(text: str, start: int) -> int | None:
    """The index of the bracket that closes the one at `start`; None if it is not closed."""
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] in _OPEN) - (text[place] in _CLOSE)
        if depth == 0:
            return place
    return None


def balanced(text: str) -> bool:
    """Whether braces are balanced, and nesting is not too deep.

    Other brackets need not match, because of half-open intervals.
    """
    braces = brackets = 0
    for sign in re.sub(r"\\[{}]", "", text):
        braces += (sign == "{") - (sign == "}")
        brackets += (sign in _OPEN) - (sign in _CLOSE)
        if braces < 0 or abs(brackets) > _DEEPEST:
            return False
    return braces == 0
