"""Converts texts of models, tools and agents to a form that MongoDB can store.

`storable` converts or cuts such values, with a note where it cuts. It never changes trained data
(token ids, logprobs), which are bytes. `fault` reports what MongoDB cannot store; it is for input
that can still be refused, such as a line of a task file.
"""

import asyncio
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime
from numbers import Integral, Real
from typing import Any

from agentrl.foreign_text import text_of

LARGEST_BYTES = 14 * 2**20  # MongoDB's limit is 16 MiB, and a document grows when it is settled
# Of a turn or a Record. Its texts are for display only, and encoding 14 MiB blocks the process for
# 90 ms.
LARGEST_TURN_BYTES = 4 * 2**20
DEEPEST = 90  # levels of nesting; MongoDB's limit is 100
_BRIEF_BYTES = 4000  # of an error
_INT64 = range(-(2**63), 2**63)
_ELEMENT_BYTES = 16  # upper bound of BSON's overhead per element, without its key
_KEPT_BYTES = 1000  # the least that is kept of a cut text
_NOTE_BYTES = 100  # reserved for the note after a cut text
_QUICK_BYTES = 2**18  # `storable` takes about a millisecond for this size
_PLAIN = (type(None), bool, float, bytes, datetime)
# Nearly all values are exactly of these types, which is cheaper to see than `isinstance`.
_EXACTLY_PLAIN = frozenset(_PLAIN)
_OF_ONE_SIZE = frozenset({type(None), bool, int, float, datetime})


async def made_storable(
    document: Mapping[str, Any], largest: int = LARGEST_TURN_BYTES
) -> dict[str, Any]:
    """`storable`, in a thread if the document is large."""
    if weight(document) < _QUICK_BYTES:
        return storable(document, largest)
    return await asyncio.to_thread(storable, document, largest)


def storable(document: Mapping[str, Any], largest: int = LARGEST_BYTES) -> dict[str, Any]:
    """The document in a form that MongoDB can store.

    Lone surrogates become U+FFFD, as does NUL in keys. Integers beyond 64 bits become text. Values
    nested too deeply are replaced by a note. If the document exceeds `largest` bytes, its longest
    texts are cut, each with a note. Raises `ValueError` if it would still be too large.
    """
    clean = {_key(name): _clean(value, 1) for name, value in document.items()}
    most = weight(clean)
    if most <= largest:
        return clean
    texts = list(_texts(clean))
    lengths = sorted(len(text.encode()) for text in texts)
    others = most - sum(map(_most_bytes, texts))
    cap = _cap(lengths, largest - others)
    if cap < _KEPT_BYTES:
        raise ValueError(
            f"the document has {(others + sum(lengths)) / 1e6:.0f} MB, of which "
            f"{sum(lengths) / 1e6:.0f} MB are texts that could be cut; MongoDB stores "
            f"{largest / 1e6:.0f} MB at the most"
        )
    cut = _cut(clean, cap)
    assert isinstance(cut, dict)
    return cut


def brief(text: str, most: int = _BRIEF_BYTES) -> str:
    """A text in storable form, cut to `most` bytes; a note says so if it was cut."""
    return str(_cut(_text(text), most))


def weight(value: object) -> int:
    """An upper bound of a value's BSON size in bytes.

    The time does not grow with the length of texts: in a text that is not ASCII, each character
    counts as 4 bytes.
    """
    if type(value) in _OF_ONE_SIZE:
        return _ELEMENT_BYTES
    if isinstance(value, str):
        return _ELEMENT_BYTES + _most_bytes(value)
    if isinstance(value, bytes):
        return _ELEMENT_BYTES + len(value)
    most = _ELEMENT_BYTES
    if isinstance(value, dict | Mapping):
        for key, each in value.items():
            most += len(key if type(key) is str else text_of(key)) + weight(each)
    elif isinstance(value, list | tuple):
        for each in value:
            most += 6 + weight(each)
    return most


def fault(value: object, where: str) -> str | None:
    """A sentence on the first part of a value that MongoDB cannot store; None if there is none.

    `where`: the value's name. The reader of task files checks lone surrogates and nesting.
    """
    if isinstance(value, bool):
        return None
    if isinstance(value, int) and value not in _INT64:
        shown = str(value) if value.bit_length() < 128 else f"{value.bit_length()} bits long"
        return f"{where} holds a whole number beyond 64 bits ({shown}): write it as a text"
    if isinstance(value, Mapping):
        for key, each in value.items():
            if "\0" in str(key):
                return f"{where} holds a key with a NUL character ({key!r})"
            found = fault(each, where)
            if found is not None:
                return found
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return next(filter(None, (fault(each, where) for each in value)), None)
    return None


def _clean(value: object, depth: int) -> object:
    if type(value) in _EXACTLY_PLAIN:
        return value
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, dict | list):
        return _cleaned(value, depth)
    if type(value) is int and value in _INT64:
        return value
    if isinstance(value, Integral):  # includes numpy's
        return int(value) if int(value) in _INT64 else _digits(int(value))
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, Mapping | list | tuple | set | frozenset):
        return _cleaned(value, depth)
    return _text(text_of(value))


def _cleaned(value: Mapping[Any, Any] | Collection[Any], depth: int) -> object:
    if depth >= DEEPEST:
        return "[left out: nested too deeply to be stored]"
    if isinstance(value, dict | Mapping):
        return {_key(key): _clean(each, depth + 1) for key, each in value.items()}
    return [_clean(each, depth + 1) for each in value]


def _text(text: str) -> str:
    if text.isascii():
        return str(text)  # an enum's member becomes its value
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return str(text)


def _key(key: object) -> str:
    if type(key) is str and key.isascii() and "\0" not in key:
        return key
    return _text(text_of(key)).replace("\0", "\ufffd")


def _digits(number: int) -> str:
    # Python limits the length of decimal conversion.
    return str(number) if number.bit_length() < 10_000 else hex(number)


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)


def _most_bytes(text: str) -> int:
    return len(text) if text.isascii() else 4 * len(text)


def _cap(lengths: Sequence[int], room: int) -> int:
    """The largest number of bytes per text with which all fit into `room`; `lengths` ascending."""
    left = room
    for number, length in enumerate(lengths):
        share = left // (len(lengths) - number)
        if length > share:
            return share
        left -= length
    return max(lengths, default=0)


def _cut(value: object, cap: int) -> object:
    if isinstance(value, str) and _most_bytes(value) > cap and len(value.encode()) > cap:
        kept = value.encode()[: cap - _NOTE_BYTES].decode(errors="ignore")
        return f"{kept}\n[cut here: the database keeps {len(kept)} of {len(value)} characters]"
    if isinstance(value, dict):
        return {key: _cut(each, cap) for key, each in value.items()}
    if isinstance(value, list):
        return [_cut(each, cap) for each in value]
    return value
