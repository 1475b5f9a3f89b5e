"""The sockets below the MCP clients: httpx2's requests over aiohttp's connections.

The SDK speaks httpx2, whose own connections take four times the CPU of aiohttp's for a call.
"""

import select
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from weakref import WeakSet

import aiohttp
import httpx2
from aiohttp.client_proto import ResponseHandler
from aiohttp.connector import Connection
from aiohttp.tracing import Trace
from yarl import URL

from agentrl.limited_httpx import limit_answer

# Idle connections expire before uvicorn closes them after 5 s.
KEEPALIVE_S = 4.0
_LARGEST_FIELD = 64 * 1024  # bytes of a header


class Sockets(httpx2.AsyncBaseTransport):
    """A transport whose answers are limited in size. It uses no proxy and follows no redirect.

    The number of connections is not limited: a call holds its own while the tool works, and
    samplers limit their concurrency. `connect_timeout_s`: of finding, reaching and greeting the
    server. Answers have no time limit; the caller sets one.
    """

    def __init__(self, tls: ssl.SSLContext, connect_timeout_s: float) -> None:
        self._session = aiohttp.ClientSession(
            connector=_Connector(limit=0, keepalive_timeout=KEEPALIVE_S, ssl=tls),
            timeout=aiohttp.ClientTimeout(total=None, connect=connect_timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            max_line_size=_LARGEST_FIELD,
            max_field_size=_LARGEST_FIELD,
        )

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request once, and return its answer when the headers have come.

        Raises `httpx2.ConnectError` or `httpx2.ConnectTimeout` if nothing was sent. Raises
        `httpx2.TransportError` if the answer is lost.
        """
        url = request.url.copy_with(userinfo=None) if request.url.userinfo else request.url
        with _httpx_errors():
            answer = await self._session.request(
                request.method,
                URL(str(url), encoded=True),
                data=await request.aread() or None,
                headers=[(name.decode(), value.decode()) for name, value in request.headers.raw],
                allow_redirects=False,
            )
        response = httpx2.Response(
            answer.status,
            headers=answer.raw_headers,
            stream=_Body(answer),
            extensions={"reason_phrase": (answer.reason or "").encode()},
        )
        await limit_answer(response)
        return response

    async def aclose(self) -> None:
        await self._session.close()


class _Connector(aiohttp.TCPConnector):
    """A pool that hands out no kept connection on which the server sent or closed anything.

    aiohttp knows of a close once the event loop has read it. Until then a request would be sent on
    the dead connection and, as the server may have executed it, never be sent again. And what a
    server sent unasked would be taken for the answer to the next request.
    """

    def __init__(self, *, limit: int, keepalive_timeout: float, ssl: ssl.SSLContext) -> None:
        super().__init__(limit=limit, keepalive_timeout=keepalive_timeout, ssl=ssl)
        self._used: WeakSet[ResponseHandler] = WeakSet()

    async def connect(
        self, req: aiohttp.ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout
    ) -> Connection:
        while True:
            connection = await super().connect(req, traces, timeout)
            protocol = connection.protocol
            assert protocol is not None, "it is not released yet"
            if protocol not in self._used:  # new
                self._used.add(protocol)
                return connection
            if not protocol.should_close and not _is_readable(protocol):
                return connection
            connection.close()


def _is_readable(protocol: ResponseHandler) -> bool:
    """Whether the server sent something, or closed, although nothing was asked."""
    assert protocol.transport is not None, "the pool keeps no lost connection"
    poll = select.poll()
    poll.register(protocol.transport.get_extra_info("socket"), select.POLLIN)
    return bool(poll.poll(0))


class _Body(httpx2.AsyncByteStream):
    """An answer's body, as it comes. Closing it early closes the connection."""

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self._answer = answer

    async def __aiter__(self) -> AsyncIterator[bytes]:
        with _httpx_errors():
            async for piece in self._answer.content.iter_any():
                yield piece

    async def aclose(self) -> None:
        self._answer.close()


@contextmanager
def _httpx_errors() -> Iterator[None]:
    """Raise aiohttp's errors as those of httpx2."""
    try:
        yield
    except aiohttp.ConnectionTimeoutError as error:
        raise httpx2.ConnectTimeout(str(error)) from error
    except aiohttp.ClientSSLError as error:
        raise httpx2.ConnectError(str(error)) from error
    except aiohttp.ClientConnectorError as error:
        reason = error.os_error.strerror or str(error.os_error)
        raise httpx2.ConnectError(f"all connection attempts failed: {reason}") from error
    except aiohttp.ClientResponseError as error:  # its text has the URL, which may have a key
        said = error.message.partition("\n")[0]
        raise httpx2.RemoteProtocolError(f"no HTTP answer: {said}") from error
    except (aiohttp.ClientError, ValueError, OSError) as error:
        raise httpx2.RemoteProtocolError(str(error) or type(error).__name__) from error
