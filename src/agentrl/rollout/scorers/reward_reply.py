"""Reads the answer of a reward service, with limits on size, encoding and form.

A service is a user's program and may answer anything. Each error becomes one sentence.
"""

import json
import math
import zlib

import aiohttp

from agentrl.foreign_text import shown
from agentrl.rollout.scorers.results import Score

MOST_BYTES = 4 << 20  # of an answer, both packed and unpacked
_SHOWN = 200  # characters shown of an unusable answer
_FORM = 'not {"score": number or null}'
_WINDOW_BITS = {
    "gzip": 16 + zlib.MAX_WBITS,
    "x-gzip": 16 + zlib.MAX_WBITS,
    "deflate": zlib.MAX_WBITS,
}


class BadReply(Exception):
    """An unusable answer. The message continues a sentence after the service's name."""


async def read_body(response: aiohttp.ClientResponse) -> bytes:
    """The unpacked body of an answer. Raises `BadReply` if it is too long or cannot be unpacked."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > MOST_BYTES:
            raise BadReply(f"sent more than {MOST_BYTES >> 20} MB, {_FORM}")
    packing = response.headers.get("Content-Encoding", "identity").strip().lower()
    if packing in ("", "identity"):
        return bytes(body)
    if packing not in _WINDOW_BITS:
        raise BadReply(f"answered in the encoding {packing!r}, which was not asked for")
    return _unpacked(bytes(body), packing)


def _unpacked(body: bytes, packing: str) -> bytes:
    unpacking = zlib.decompressobj(_WINDOW_BITS[packing])
    try:
        unpacked = unpacking.decompress(body, MOST_BYTES + 1)
    except zlib.error:
        raise BadReply(f"answered what is no {packing}, though it says so") from None
    if len(unpacked) > MOST_BYTES:
        raise BadReply(f"sent more than {MOST_BYTES >> 20} MB, packed, {_FORM}")
    return unpacked


def read_score(body: bytes) -> Score:
    """The score in an answer's body. Raises `BadReply`."""
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):  # not JSON, not text, or nested too deeply
        answer = None
    if not isinstance(answer, dict) or "score" not in answer:
        raise BadReply(f'answered {beginning(body)}, not {{"score": number or null}}')
    score, explanation = answer["score"], answer.get("explanation")
    if score is not None:
        if isinstance(score, bool) or not isinstance(score, int | float):
            raise BadReply(f"answered the score {shown(score)}, {_FORM}")
        if not _is_finite(score):
            raise BadReply(f"answered the score {shown(score)}, which is not a finite number")
    if explanation is not None and not isinstance(explanation, str):
        raise BadReply(f"answered the explanation {shown(explanation)}, which is no text")
    return Score(score, explanation)


def beginning(body: bytes) -> str:
    """The beginning of an answer, for an error."""
    text = body[: 4 * _SHOWN].decode("utf-8", "replace")
    return repr(text[:_SHOWN]) + (" and so on" if len(text) > _SHOWN else "")


def _is_finite(number: float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # an integer too large for a float
        return False
