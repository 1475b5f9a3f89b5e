"""Limits the size of answers to httpx clients (tools, judges). `limited_read` does so for aiohttp.

Bodies are limited here. The MCP SDK limits the events of a stream to the same size.
"""

import ssl
from collections.abc import AsyncIterator
from functools import cache

import httpx2

from agentrl.foreign_text import shown

MAX_ANSWER_BYTES = 32 << 20  # more than is kept of any tool result
TOO_LARGE = f"an answer of more than {MAX_ANSWER_BYTES >> 20} MiB, which was not read"
UNPACKED = {"Accept-Encoding": "identity"}  # a small compressed answer could expand to any size


@cache
def tls_context() -> ssl.SSLContext:
    """One context for all clients: reading the certificates takes tens of milliseconds. Call it
    first in a thread."""
    return httpx2.create_ssl_context()


class AnswerNotRead(httpx2.ReadError):
    """An answer was not read, or not to its end. The request itself was served.

    The message is what the server gave, as in "it gave ...".
    """


class AnswerTooLarge(AnswerNotRead):
    """An answer exceeds the limit and was not read further."""

    def __init__(self) -> None:
        super().__init__(TOO_LARGE)


class AnswerCompressed(AnswerNotRead):
    """An answer is compressed, although the request asked for one that is not."""

    def __init__(self, encoding: str) -> None:
        super().__init__(
            f"a compressed answer ({shown(encoding)}), which was not read: the request asked for "
            "none"
        )


async def limit_answer(response: httpx2.Response) -> None:
    """Make reading the answer raise `AnswerTooLarge` after `MAX_ANSWER_BYTES` bytes.

    For requests with the headers `UNPACKED`, as a client's response hook or in a transport. Raises
    `AnswerCompressed` for an answer that is compressed nevertheless.
    """
    encoding = response.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        await response.aclose()
        raise AnswerCompressed(encoding)
    if not response.headers.get("content-type", "").lower().startswith("text/event-stream"):
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = _Limited(response.stream)


class _Limited(httpx2.AsyncByteStream):
    def __init__(self, stream: httpx2.AsyncByteStream) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        read = 0
        async for piece in self._stream:
            read += len(piece)
            if read > MAX_ANSWER_BYTES:
                raise AnswerTooLarge
            yield piece

    async def aclose(self) -> None:
        await self._stream.aclose()
