"""Detects turns that repeat or loop: pure functions.

A turn *repeats* earlier ones if each of its calls was made before with the same arguments and the
same result. A call with a new result (the next page, the state of a job) is no repetition. A
malformed call has its error as the result.

A turn *loops* if it ends with many repetitions of the same tokens.

The samplers decide what follows.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import orjson

LOOP_TIMES = 8  # least number of repetitions at the end of a turn
LOOP_TOKENS = 128  # least length of all repetitions together: a row of dashes is no loop
_LOOP_WINDOW = 4096  # tokens checked at the end of a turn


def call_key(name: str, arguments: Mapping[str, Any], result: str) -> bytes:
    """A 16-byte hash of a call and its result. The order of arguments does not matter."""
    content = orjson.dumps([name, arguments, result], option=orjson.OPT_SORT_KEYS)
    return hashlib.blake2b(content, digest_size=16).digest()


def repeats(keys: Sequence[bytes], earlier: Collection[bytes]) -> bool:
    """Whether all calls of a turn (`keys`) are among `earlier` ones. False without calls."""
    return bool(keys) and all(key in earlier for key in keys)


def loops(ids: Sequence[int]) -> bool:
    """Whether token ids [n] of a turn (without its stop token) end in a loop.

    A loop is a sequence repeated at least `LOOP_TIMES` times, over at least `LOOP_TOKENS` tokens.
    """
    if len(ids) < LOOP_TOKENS:
        return False
    tail = ids[: -_LOOP_WINDOW - 1 : -1]  # the last token first
    # The prefix function of Knuth, Morris and Pratt: `border` is the length of the longest proper
    # prefix of the first `length` tokens that is also a suffix, so `length - border` is the period.
    borders = [0] * len(tail)
    border = 0
    for place in range(1, len(tail)):
        while border and tail[place] != tail[border]:
            border = borders[border - 1]
        border += tail[place] == tail[border]
        borders[place] = border
        length = place + 1
        if length >= LOOP_TOKENS and length >= LOOP_TIMES * (length - border):
            return True
    return False
