"""Special-token escaping: encoding in which text from outside can never become a control token.

Strings in text from tools that are one of the tokenizer's added tokens (`<|im_end|>`,
`<tool_call>`), and in text from users those that are special, are *escaped*: put between two
Unicode noncharacters from before the chat template is applied until encoding, which spells them out
as plain text:

    from a tool   done<|im_end|>
    escaped       done U+FDD0 <|im_end|> U+FDD1        what the template is given and writes
    encoded       d-one-<-|-im-_-end-|->               never the id of <|im_end|>

What a template does with text is not in here (`renderer.py`).
"""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tokenizers import Tokenizer

# Texts are encoded one at a time: parallelism gains nothing, and warns at every fork.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"  # the escape marks
_ESCAPED = re.compile(f"{_OPEN}([^{_CLOSE}]*){_CLOSE}")

_UNCERTAIN = re.compile("(<0x[0-9A-F]{2}>)?")  # a token of a single byte, or an id without one

_Trie = dict[str, "_Trie"]  # by next character; the key "" marks the end of a string


class Piece(NamedTuple):
    """A part of escaped text whose ids `encode(text, start=start)` do not depend on the rest."""

    text: str
    start: bool


class EscapingCodec:
    """Encodes escaped text, and decodes generated tokens.

    Raises ValueError if the tokenizer makes an added token from plain text.
    """

    def __init__(self, backend_json: str) -> None:
        """`backend_json`: the content of `tokenizer.json`."""
        # Separate copies, because transformers changes a tokenizer's settings at every call.
        backend = json.loads(backend_json)
        added = [token for token in backend["added_tokens"] if not token["content"].isspace()]
        self._codec = _bare(backend, backend["added_tokens"])
        inside = {**backend, **_without_prefix(backend)}
        self._codec_inside = (
            self._codec if inside == backend else _bare(inside, backend["added_tokens"])
        )
        self._plain = _bare(inside, [])
        self._added = longest_of([token["content"] for token in added])
        self._special = longest_of([token["content"] for token in added if token["special"]])
        # Tokens at which the tokenizer splits a text before normalization.
        found_first = [token["content"] for token in added if not token["normalized"]]
        self._divider = re.compile(f"{_ESCAPED.pattern}|({longest_of(found_first).pattern})")
        self._begins_piece = frozenset(token["content"] for token in added if _begins_piece(token))
        self._ids: dict[str, int] = {token["content"]: token["id"] for token in added}
        self.special_texts = tuple(token["content"] for token in added if token["special"])
        self.added_ids = frozenset(token["id"] for token in added)
        self.special_ids = frozenset(token["id"] for token in added if token["special"])
        for token in added:
            if token["id"] in _encode(self._plain, token["content"]):
                raise ValueError(
                    f"the tokenizer makes its token {token['content']!r} of plain text too, so "
                    "tools could write it"
                )

    def escape_tool_text(self, text: str) -> str:
        """Text from a tool, with all added tokens in it escaped."""
        return _escape(text, self._added)

    def escape_values(self, value: Any, *, special_only: bool = False) -> Any:
        """A JSON value with all strings and keys escaped. `special_only`: only special tokens."""
        pattern = self._special if special_only else self._added
        if isinstance(value, str):
            return _escape(value, pattern)
        if isinstance(value, Mapping):
            return {
                _escape(key, pattern): self.escape_values(item, special_only=special_only)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.escape_values(item, special_only=special_only) for item in value]
        return value

    def encode(self, escaped: str, after: int | None = None, *, start: bool = True) -> list[int]:
        """The token ids of escaped text.

        `after`: id of the token before it. `start`: whether it begins a sequence, where some
        tokenizers add a space. Raises ValueError if `after` does not encode to itself.
        """
        if after is not None:
            token = self.token(after)
            ids = self.encode(token + escaped)
            if ids[0] != after:
                raise ValueError(f"the token {token!r} is not read as itself before other text")
            return ids[1:]
        first = self._codec if start else self._codec_inside
        if _OPEN not in escaped:
            return _encode(first, escaped)
        ids = []
        for index, piece in enumerate(_ESCAPED.split(escaped)):
            codec = self._plain if index % 2 else first if index == 0 else self._codec_inside
            ids += _encode(codec, unescaped(piece))
        return ids

    def pieces(self, escaped: str, *, start: bool = True) -> Iterator[Piece]:
        """Split escaped text before special tokens.

        The concatenated ids of the pieces are the ids of the text. `start`: see `encode`.
        """
        begin, begins_text = 0, start
        for found in self._divider.finditer(escaped):
            if found[2] in self._begins_piece and found.start() > begin:
                yield Piece(escaped[begin : found.start()], begins_text)
                # After escaped text, `encode` does not treat text as the start of a sequence.
                begins_text = begins_text and _OPEN not in escaped[begin : found.start()]
                begin = found.start()
        yield Piece(escaped[begin:], begins_text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text with its special tokens, without escape marks."""
        return unescaped(self._codec.decode(list(ids), skip_special_tokens=False))

    def decode_so_far(self, ids: Sequence[int]) -> str:
        """The text of tokens that are followed by others, as far as it is certain.

        It is a beginning of the text of all: a character may have only some of its bytes yet, and
        tokens of single bytes are decoded together with those that follow. An id without a token
        has no text.
        """
        end = len(ids)
        while end and _UNCERTAIN.fullmatch(self._codec.id_to_token(ids[end - 1]) or ""):
            end -= 1
        return self.decode(ids[:end]).rstrip("\ufffd")

    def token(self, token_id: int) -> str:
        """The text of an added token. Raises ValueError for an unknown id."""
        text = self._codec.id_to_token(token_id)
        if text is None:
            raise ValueError(f"the tokenizer has no token {token_id}")
        return str(text)

    def specials(self, text: str) -> list[tuple[str, int]]:
        """The special tokens in unescaped text, as pairs (text, id), in order."""
        return [(token, self._ids[token]) for token in self._special.findall(text)]

    def without_specials(self, text: str) -> str:
        """Unescaped text without its special tokens."""
        return self._special.sub("", text)

    def special_at(self, text: str, position: int) -> tuple[str, int] | None:
        """The special token at `position` or around it, after optional white space; else None."""
        for found in self._special.finditer(text):
            if found.end() > position:
                blank = not text[position : found.start()].strip()
                return (found[0], self._ids[found[0]]) if blank else None
        return None

    def headers(self, escaped: str) -> tuple[str, ...]:
        """The ways in which a later prompt may write this prompt's end before the turn.

        From the last special token on: the whole end, and shorter ones if further added tokens
        follow it. A later prompt may lack the part that opens a thought.
        """
        bare = _ESCAPED.sub(lambda match: " " * len(match[0]), escaped)
        start = max((match.start() for match in self._special.finditer(bare)), default=0)
        later = self._added.search(bare, start + 1)
        whole = escaped[start:]
        if later is None:
            return (whole,)
        last = max(match.start() for match in self._added.finditer(bare))
        return whole, escaped[start : later.start()], escaped[last:]


def unescaped(text: str) -> str:
    """The text without escape marks."""
    return text.replace(_OPEN, "").replace(_CLOSE, "")


def _encode(codec: Tokenizer, text: str) -> list[int]:
    """The ids of a text. The batch call releases Python's lock, unlike `encode`."""
    (encoding,) = codec.encode_batch_fast([text], add_special_tokens=False)
    return list(encoding.ids)


def _escape(text: str, pattern: re.Pattern[str]) -> str:
    # Marks that the text contains are dropped: they could end one of ours.
    return pattern.sub(rf"{_OPEN}\g<0>{_CLOSE}", unescaped(text))


def _bare(backend: dict[str, Any], added_tokens: list[dict[str, Any]]) -> Tokenizer:
    """The tokenizer of `backend` without post-processing, truncation and padding."""
    bare = {"post_processor": None, "truncation": None, "padding": None}
    return Tokenizer.from_str(json.dumps({**backend, **bare, "added_tokens": added_tokens}))


def _without_prefix(backend: dict[str, Any]) -> dict[str, Any]:
    """The normalizer and pre-tokenizer without a prepended space."""
    return {part: _prefixless(backend[part]) for part in ("normalizer", "pre_tokenizer")}


def _prefixless(part: dict[str, Any] | None) -> dict[str, Any] | None:
    if part is None or part["type"] == "Prepend":
        return None
    if part["type"] == "Sequence":
        name = "normalizers" if "normalizers" in part else "pretokenizers"
        return {**part, name: [kept for item in part[name] if (kept := _prefixless(item))]}
    if part["type"] == "Metaspace":
        return {**part, "prepend_scheme": "never"}
    if part["type"] == "ByteLevel":
        return {**part, "add_prefix_space": False}
    return part


def _begins_piece(token: Mapping[str, Any]) -> bool:
    """Whether an added token is found regardless of the text before it, and consumes none of it."""
    depends = token["normalized"] or token["lstrip"] or token["single_word"]
    return token["special"] and not depends and not token["content"][0].isalnum()


def longest_of(strings: Sequence[str]) -> re.Pattern[str]:
    """A pattern for the longest of the strings at a position.

    It is a trie, so the cost does not grow with the number of strings: some tokenizers have a
    thousand added tokens.
    """
    trie: _Trie = {}
    for string in strings:
        node = trie
        for character in string:
            node = node.setdefault(character, {})
        node[""] = {}
    return re.compile(_of_trie(trie) if trie else "(?!)")


def _of_trie(trie: _Trie) -> str:
    ways = [re.escape(character) + _of_trie(rest) for character, rest in trie.items() if character]
    if not ways:
        return ""
    if len(ways) == 1 and "" not in trie:
        return ways[0]
    return f"(?:{'|'.join(ways)})" + ("?" if "" in trie else "")
