"""Gemma 4: keys and values between braces, strings between tokens of their own.

    <|tool_call>call:stock{bin:<|"|>B7<|"|>,count:3,tags:[<|"|>a<|"|>],deep:{x:true}}<tool_call|>

Keys stand bare; a string is literal up to the next `<|"|>`, nothing in it is escaped. Several calls
follow each other. The thought stands before them, from `<|channel>thought` to `<channel|>`. Text
that is no number and no word of JSON is a string, as vLLM and SGLang read it.

Source: https://ai.google.dev/gemma/docs/core/prompt-formatting-gemma4
"""

import re
from typing import Any

import orjson

from agentrl.rollout.tool_calls.calls import (
    MAX_DEPTH,
    Call,
    MalformedCall,
    ParsedTurn,
    Tools,
    make_call,
    quote,
)
from agentrl.rollout.tool_calls.elements import read_elements

_OPEN, _CLOSE = "<|tool_call>", "<tool_call|>"
_THOUGHT = ("<|channel>", "<channel|>")
_QUOTE = '<|"|>'
_HEAD = re.compile(r"\s*+call:\s*+([^\s{}<>\"]++)\s*+\{")
_SPACE = re.compile(r"\s*+")
_BARE_KEY = re.compile(r"[^:,{}\[\]<>]*+")
_BARE = re.compile(r"[^,{}\[\]]*+")
_JSON_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*"', re.DOTALL)
_NUMBER = re.compile(r"[+-]?(?:\d++(?:\.\d*+)?|\.\d++)(?:[eE][+-]?\d++)?")
_WORDS: dict[str, bool | None] = {
    "true": True, "false": False, "null": None, "None": None,  # the template writes None
}  # fmt: skip
_MAX_DIGITS = 20  # longer integers exceed 64 bits


def parse_gemma4(text: str, tools: Tools = ()) -> ParsedTurn:
    """The calls of a turn of Gemma 4."""
    return read_elements(text, _OPEN, _CLOSE, lambda body: (_read_call(body),), thought=_THOUGHT)


def _read_call(body: str) -> Call:
    head = _HEAD.match(body)
    if head is None:
        return MalformedCall(
            f"the tool call does not begin with call:NAME{{, but with {quote(body.strip())}"
        )
    reader = _Reader(body, head.end())
    try:
        arguments = reader.read_object(MAX_DEPTH)
    except _UnreadableError as error:
        return MalformedCall(f"the tool call cannot be read: {error}")
    rest = body[reader.at :].strip()
    if rest:
        return MalformedCall(f"the tool call holds {quote(rest)} after its last brace")
    return make_call(head[1], arguments)


class _UnreadableError(ValueError):
    """The arguments cannot be parsed. The message tells the model why."""


class _Reader:
    """Parses arguments from index `at` on, and moves `at` behind them."""

    def __init__(self, text: str, at: int) -> None:
        self.text = text
        self.at = at

    def read_object(self, depth: int) -> dict[str, Any]:
        """The object after an opening brace, with at most `depth` nested levels."""
        items: dict[str, Any] = {}
        while not self._take("}"):
            key = self._read_key()
            if key in items:
                raise _UnreadableError(f"the key {quote(key)} is given twice")
            items[key] = self._read_value(depth)
            if not self._take(","):
                self._expect("}", f"after the value of {quote(key)}")
                break
        return items

    def _read_key(self) -> str:
        if self._take(_QUOTE):
            key = self._read_string()
        else:
            match = _JSON_STRING.match(self.text, self.at) or _BARE_KEY.match(self.text, self.at)
            assert match is not None, "no character is a bare key too"
            self.at = match.end()
            key = match.group().strip().strip('"')
        self._expect(":", f"after the key {quote(key)}")
        return key

    def _read_value(self, depth: int) -> Any:
        if self._take(_QUOTE):
            return self._read_string()
        for opening, read in (("{", self.read_object), ("[", self._read_array)):
            if self._take(opening):
                if depth == 0:
                    raise _UnreadableError("the arguments have too many levels of nesting")
                return read(depth - 1)
        if match := _JSON_STRING.match(self.text, self.at):
            self.at = match.end()
            try:
                return orjson.loads(match.group())
            except orjson.JSONDecodeError:
                return match.group()[1:-1]
        return self._read_bare()

    def _read_array(self, depth: int) -> list[Any]:
        items: list[Any] = []
        while not self._take("]"):
            items.append(self._read_value(depth))
            if not self._take(","):
                self._expect("]", f"after item {len(items)} of an array")
                break
        return items

    def _read_string(self) -> str:
        end = self.text.find(_QUOTE, self.at)
        if end < 0:
            raise _UnreadableError(f"a string is not closed with {_QUOTE}")
        string = self.text[self.at : end]
        self.at = end + len(_QUOTE)
        return string

    def _read_bare(self) -> Any:
        match = _BARE.match(self.text, self.at)
        assert match is not None, "no character is bare text too"
        bare = match.group().strip()
        if not bare or _QUOTE in bare:
            raise _UnreadableError(f"a value was expected instead of {self._here()}")
        self.at = match.end()
        if bare in _WORDS:
            return _WORDS[bare]
        if not _NUMBER.fullmatch(bare):
            return bare
        if not bare.lstrip("+-").isdigit():
            return float(bare)
        if len(bare) > _MAX_DIGITS:
            raise _UnreadableError(f"the number {quote(bare)} has more than 64 bits")
        return int(bare)

    def _take(self, mark: str) -> bool:
        """Skip white space, then the mark if it comes next; returns whether it does."""
        space = _SPACE.match(self.text, self.at)
        assert space is not None, "no space is space too"
        self.at = space.end()
        if not self.text.startswith(mark, self.at):
            return False
        self.at += len(mark)
        return True

    def _expect(self, mark: str, where: str) -> None:
        if not self._take(mark):
            raise _UnreadableError(f"{mark!r} was expected {where} instead of {self._here()}")

    def _here(self) -> str:
        if self.at >= len(self.text):
            return "the end of the call"
        return quote(self.text[self.at : self.at + 50])
