"""Answers to httpx's clients (tools, judges), read up to a size: see `limited_read`.

Bodies are limited here. The events of an MCP server's stream are limited by the SDK, which is told
the same size.
"""

import ssl
from collections.abc import AsyncIterator
from functools import cache

import httpx2

MAX_ANSWER_BYTES = 32 << 20  # more than of any tool's result is kept
TOO_LARGE = f"an answer of more than {MAX_ANSWER_BYTES >> 20} MiB, which was not read"
UNPACKED = {"Accept-Encoding": "identity"}  # packed, a small answer could be one of any size


@cache
def tls_context() -> ssl.SSLContext:
    """The one of all clients, for the certificates take tens of ms to read. The first time it is
    asked for beside the event loop."""
    return httpx2.create_ssl_context()


class AnswerTooLarge(httpx2.ReadError):
    """An answer that is not read to its end. Its request was served."""

    def __init__(self) -> None:
        super().__init__(TOO_LARGE)


async def limit_answer(response: httpx2.Response) -> None:
    """Have the reading of an answer end with `AnswerTooLarge` after `MAX_ANSWER_BYTES`.

    A hook of a client for responses, whose requests have the headers `UNPACKED`. Raises
    `AnswerTooLarge` for an answer that is packed in spite of that.
    """
    if response.headers.get("content-encoding", "identity").lower() != "identity":
        await response.aclose()
        raise AnswerTooLarge
    if not response.headers.get("content-type", "").lower().startswith("text/event-stream"):
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = _Limited(response.stream)


class LimitedTransport(httpx2.AsyncBaseTransport):
    """A transport for what is read before a client's hooks are called."""

    def __init__(self, transport: httpx2.AsyncBaseTransport) -> None:
        self._transport = transport

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        request.headers.update(UNPACKED)
        response = await self._transport.handle_async_request(request)
        await limit_answer(response)
        return response

    async def aclose(self) -> None:
        await self._transport.aclose()


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
