"""A fast check of ground truths, most of which are numbers, fractions, roots and polynomials.

The parser of `expressions.py` takes milliseconds for each, and a file has many thousands. It can
parse every text without words that is accepted here, and some others.
"""

import re

_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d+)?|\.\d+)|(?P<letter>[A-DF-Za-z](?:_\{\w+\})?)"
    r"|(?P<constant>\\(?:pi|theta|alpha|beta|gamma|lambda|mu|omega|phi)(?![A-Za-z]))"
    r"|(?P<pair>\\(?:frac|binom)(?![A-Za-z]))|(?P<root>\\sqrt(?:\[\d+\])?)"
    r"|(?P<function>\\(?:sin|cos|tan|ln|log)(?![A-Za-z]))|(?P<times>\\cdot(?![A-Za-z])|/)"
    r"|(?P<sign>[-+])|(?P<other>[(){}^!]))"
)
_MOST_TOKENS = 200


def is_plain(text: str) -> bool:
    """Whether a text in canonical notation is a simple expression, which can be parsed."""
    tokens: list[tuple[str, str]] = []
    place = 0
    while place < len(text):
        found = _TOKEN.match(text, place)
        if found is None or len(tokens) >= _MOST_TOKENS:
            return False
        assert found.lastgroup is not None
        tokens.append((found.lastgroup, found[found.lastgroup]))
        place = found.end()
    return _Reader(tokens).reads_all()


class _Reader:
    """A recursive-descent recogniser. Each method returns whether its construct was found, and then
    moves behind it."""

    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self._tokens = [*tokens, ("end", "")]
        self._at = 0

    def reads_all(self) -> bool:
        return self._sum() and self._tokens[self._at][0] == "end"

    def _take(self, what: str) -> bool:
        """Skip the next token if it has this kind or text; returns whether it does."""
        found = what in self._tokens[self._at]
        self._at += found
        return found

    def _sum(self) -> bool:
        self._take("sign")
        if not self._product():
            return False
        while self._take("sign"):
            if not self._product():
                return False
        return True

    def _product(self) -> bool:
        if not self._factor():
            return False
        while True:
            if self._take("times"):
                if not self._factor():
                    return False
            elif self._tokens[self._at][0] in ("end", "sign", "number") or (
                self._tokens[self._at][1] in (")", "}")
            ):
                return True
            elif not self._factor():
                return False

    def _factor(self) -> bool:
        if not self._atom():
            return False
        while self._take("^"):
            if not self._group():
                return False
        while self._take("!"):
            pass
        return True

    def _atom(self) -> bool:
        if self._take("number") or self._take("letter") or self._take("constant"):
            return True
        if self._take("pair"):
            return self._group() and self._group()
        if self._take("root"):
            return self._group()
        if self._take("function"):
            return self._factor()
        return self._take("(") and self._sum() and self._take(")")

    def _group(self) -> bool:
        return self._take("{") and self._sum() and self._take("}")
