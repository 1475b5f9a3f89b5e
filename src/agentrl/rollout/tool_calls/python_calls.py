"""Calls written in Python: a name, and named arguments that are literals.

    stock(bin="B7", count=3, tags=['a', "b"], deep={"x": None})

Read by hand and not with `ast`: Python's own parser takes exponential time or overflows on some
texts. JSON's `true`, `false` and `null` are read too, and a string may run over several lines.
"""

import re
from typing import Any

import orjson

from agentrl.rollout.tool_calls.calls import MAX_DEPTH, quote

_SPACE = re.compile(r"\s*+")
_NAME = re.compile(r"[^\W\d][\w.\-]*+")
_NUMBER = re.compile(r"[+-]?(?:\d++(?:\.\d*+)?|\.\d++)(?:[eE][+-]?\d++)?")
# No possessive groups: Pythons up to 3.11.2 match some of them wrongly.
_STRING = re.compile(
    r'"""([^"\\]*+(?:(?:\\.|"(?!""))[^"\\]*+)*)"""'
    r"|'''([^'\\]*+(?:(?:\\.|'(?!''))[^'\\]*+)*)'''"
    r'|"([^"\\]*+(?:\\.[^"\\]*+)*)"'
    r"|'([^'\\]*+(?:\\.[^'\\]*+)*)'",
    re.DOTALL,
)
_ESCAPE = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{1,3})|(.))", re.DOTALL
)
_ESCAPED = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": "",
    "\\": "\\", "'": "'", '"': '"',
}  # fmt: skip
_WORDS: dict[str, bool | None] = {
    "True": True, "False": False, "None": None, "true": True, "false": False, "null": None,
}  # fmt: skip
_MAX_DIGITS = 20  # longer integers exceed 64 bits


class UnreadableError(ValueError):
    """The text is not a call. The message tells the model why."""


class PythonReader:
    """Parses calls from index `at` on, and moves `at` behind them."""

    def __init__(self, text: str, at: int = 0) -> None:
        self.text = text
        self.at = at

    def skip_space(self) -> None:
        """Skip white space."""
        match = _SPACE.match(self.text, self.at)
        assert match is not None, "no space is space too"
        self.at = match.end()

    def take(self, mark: str) -> bool:
        """Skip white space, then the mark if it comes next; returns whether it does."""
        self.skip_space()
        if not self.text.startswith(mark, self.at):
            return False
        self.at += len(mark)
        return True

    def read_call(self) -> tuple[str, dict[str, Any]]:
        """A call's name and arguments. Raises `UnreadableError`."""
        self.skip_space()
        name = self._read_name("the name of a tool")
        self._expect("(", f"after {name}")
        arguments: dict[str, Any] = {}
        while not self.take(")"):
            self.skip_space()
            key = self._read_name(f"NAME=VALUE in the arguments of {name}")
            self._expect("=", f"after {key} in the arguments of {name}")
            if key in arguments:
                raise UnreadableError(f"the argument {key} of {name} is given twice")
            arguments[key] = self.read_value(MAX_DEPTH)
            if not self.take(","):
                self._expect(")", f"after the argument {key} of {name}")
                break
        return name, arguments

    def read_value(self, depth: int) -> Any:
        """A literal with at most `depth` nested levels. Raises `UnreadableError`."""
        self.skip_space()
        if match := _STRING.match(self.text, self.at):
            self.at = match.end()
            return _string(match)
        if match := _NUMBER.match(self.text, self.at):
            self.at = match.end()
            return _number(match.group())
        for opening, closing in (("[", "]"), ("(", ")"), ("{", "}")):
            if self.take(opening):
                if depth == 0:
                    raise UnreadableError("the arguments have too many levels of nesting")
                if opening == "{":
                    return self._read_dict(depth - 1)
                return self._read_items(closing, depth - 1)
        word = _NAME.match(self.text, self.at)
        if word is None or word.group() not in _WORDS:
            raise UnreadableError(f"a value was expected instead of {self._here()}")
        self.at = word.end()
        return _WORDS[word.group()]

    def _read_items(self, closing: str, depth: int) -> list[Any]:
        items: list[Any] = []
        while not self.take(closing):
            items.append(self.read_value(depth))
            if not self.take(","):
                self._expect(closing, "after a list's last item")
                break
        return items

    def _read_dict(self, depth: int) -> dict[str, Any]:
        items: dict[str, Any] = {}
        while not self.take("}"):
            key = self.read_value(depth)
            if not isinstance(key, str):
                raise UnreadableError("the keys of a dict must be strings")
            self._expect(":", "after a dict's key")
            items[key] = self.read_value(depth)
            if not self.take(","):
                self._expect("}", "after a dict's last item")
                break
        return items

    def _read_name(self, what: str) -> str:
        match = _NAME.match(self.text, self.at)
        if match is None:
            raise UnreadableError(f"{what} was expected instead of {self._here()}")
        self.at = match.end()
        return match.group()

    def _expect(self, mark: str, where: str) -> None:
        if not self.take(mark):
            raise UnreadableError(f"{mark!r} was expected {where} instead of {self._here()}")

    def _here(self) -> str:
        if self.at >= len(self.text):
            return "the end of the text"
        return quote(self.text[self.at : self.at + 50])


def _string(match: re.Match[str]) -> str:
    if match[3] is not None:
        try:  # most are JSON, where two escapes may form one character
            text = orjson.loads(match.group())
            assert isinstance(text, str), "a string in double quotes"
            return text
        except orjson.JSONDecodeError:
            pass
    body = next(group for group in match.groups() if group is not None)
    return _ESCAPE.sub(_unescape, body) if "\\" in body else body


def _unescape(match: re.Match[str]) -> str:
    for group, base in ((1, 16), (2, 16), (3, 16), (4, 8)):
        if match[group] is not None:
            code = int(match[group], base)
            return chr(code) if code <= 0x10FFFF else match.group()
    return _ESCAPED.get(match[5], match.group())


def _number(text: str) -> int | float:
    if text.lstrip("+-").isdigit():
        if len(text) > _MAX_DIGITS:
            raise UnreadableError(f"the number {quote(text)} has more than 64 bits")
        return int(text)
    return float(text)
