"""Limits the size of answers to httpx clients (tools, judges). `limited_read` does so for aiohttp.

Bodies are limited here. The MCP SDK limits the events of a stream to the same size.
"""

import ssl
from collections.abc import AsyncIterator
from functools import cache

import httpx2

MAX_ANSWER_BYTES = 32 << 20  # more than is kept of any tool result
TOO_LARGE = f"an answer of more than {MAX_ANSWER_BYTES >> 20} MiB, which was not read"
UNPACKED = {"Accept-Encoding": "identity"}  # a small compressed answer could expand to any size


@cache
def tls_context() -> ssl.SSLContext:
    """The one of all clients, for the certificates take tens of ms to read. The first time it is
    asked for beside the event loop."""
    return httpx2.create_ssl_context()


class AnswerTooLarge(httpx2.ReadError):
    """An answer exceeds the limit and was not read further. The request itself was served."""

    def __init__(self) -> None:
        super().__init__(TOO_LARGE)


async def limit_answer(response: httpx2.Response) -> None:
    """Make reading the answer raise `AnswerTooLarge` after `MAX_ANSWER_BYTES` bytes.

    For requests with the headers `UNPACKED`, as a client's response hook or in a transport. Raises
    `AnswerTooLarge` for an answer that is compressed nevertheless.
    """
    if response.headers.get("content-encoding", "identity").lower() != "identity":
        await response.aclose()
        raise AnswerTooLarge
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
