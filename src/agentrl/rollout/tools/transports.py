"""The transports to one server: HTTP requests, a stream of events, or the pipes of a process.

The SDK implements the protocol over them (`connection.py`).
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx2
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamable_http_client

from agentrl.limited_httpx import (
    MAX_ANSWER_BYTES,
    TOO_LARGE,
    AnswerTooLarge,
    LimitedTransport,
    tls_context,
)
from agentrl.rollout.tools.pipes import process_pipes
from agentrl.rollout.tools.server_list import ServerSpec, ToolTransport
from agentrl.rollout.tools.wire_faults import OVERSIZE, REFUSED, SESSION_GONE, WIRE_FAULT

NOT_SERVING = frozenset({502, 503, 504})  # a proxy's answers while its server is away

# No limit: a call holds its connection while the tool works, and samplers limit their concurrency.
# Idle connections expire before uvicorn closes them after 5 s.
SOCKET_LIMITS = httpx2.Limits(
    max_connections=None, max_keepalive_connections=None, keepalive_expiry=4.0
)

Streams = tuple[Any, Any]  # the SDK's read and write streams


class Wires:
    """Opens streams to one server. HTTP connections share a pool of sockets.

    `connect_timeout_s`: of connecting. The caller limits the time of answers.
    """

    def __init__(self, spec: ServerSpec, connect_timeout_s: float) -> None:
        self._spec = spec
        self._timeout = httpx2.Timeout(None, connect=connect_timeout_s)
        self._sockets: LimitedTransport | None = None

    @asynccontextmanager
    async def open(self, on_lost: Callable[[], None]) -> AsyncIterator[Streams]:
        """The streams of one connection. `on_lost` is called when they are found to be broken."""
        spec = self._spec
        if spec.transport is ToolTransport.STDIO:
            async with process_pipes(spec, on_lost) as (read, write):
                yield _EndNoticed(read, on_lost), write
        elif spec.transport is ToolTransport.SSE:
            # Answers come over the stream, so a request that cannot be sent would wait forever.
            client = self._client(_Borrowed(self._shared_sockets(), on_failed_post=on_lost))

            def our_client(*_: object, **__: object) -> httpx2.AsyncClient:
                return client  # with our timeouts and headers

            async with sse_client(spec.url, httpx_client_factory=our_client) as (read, write):
                yield _EndNoticed(read, on_lost), write
        else:
            client = self._client(_FaultIsolation(_Borrowed(self._shared_sockets())))
            async with streamable_http_client(
                spec.url, http_client=client, max_sse_event_size=MAX_ANSWER_BYTES
            ) as streams:
                yield streams

    async def close(self) -> None:
        """Close the shared sockets."""
        if self._sockets is not None:
            await self._sockets.aclose()

    def _client(self, transport: httpx2.AsyncBaseTransport) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(
            headers=dict(self._spec.headers), timeout=self._timeout, transport=transport
        )

    def _shared_sockets(self) -> LimitedTransport:
        if self._sockets is None:
            sockets = httpx2.AsyncHTTPTransport(verify=tls_context(), limits=SOCKET_LIMITS)
            self._sockets = LimitedTransport(sockets)
        return self._sockets


class _Borrowed(httpx2.AsyncBaseTransport):
    """A transport over shared sockets, which closing does not close."""

    def __init__(
        self,
        sockets: httpx2.AsyncBaseTransport,
        on_failed_post: Callable[[], None] = lambda: None,
    ) -> None:
        self._sockets = sockets
        self._on_failed_post = on_failed_post

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        try:
            response = await self._sockets.handle_async_request(request)
        except httpx2.RequestError:
            if request.method == "POST":
                self._on_failed_post()
            raise
        if request.method == "POST" and response.is_error:
            self._on_failed_post()
        return response

    async def aclose(self) -> None:
        """Keep the shared sockets open."""


class _FaultIsolation(httpx2.AsyncBaseTransport):
    """Turns failures below MCP into JSON-RPC error answers.

    In the SDK's transport, a failed connection ends the whole session with the calls of all other
    records. An error answer ends only its own call. The SDK also drops the HTTP status, which these
    answers contain.
    """

    def __init__(self, transport: httpx2.AsyncBaseTransport) -> None:
        self._transport = transport

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        try:
            response = await self._transport.handle_async_request(request)
            if response.status_code in (401, 403):
                await response.aclose()
                return _json_rpc_error(request, REFUSED, refusal(response.status_code))
            if response.status_code in NOT_SERVING:
                await response.aclose()
                return _json_rpc_error(request, WIRE_FAULT, f"HTTP {response.status_code}")
            if "mcp-session-id" in request.headers and await _forgot_session(response):
                await response.aclose()
                return _json_rpc_error(request, SESSION_GONE, "the session is gone")
            if response.headers.get("content-type", "").lower().startswith("application/json"):
                await response.aread()  # read here, to catch a connection lost half way
            return response
        except AnswerTooLarge:
            return _json_rpc_error(request, OVERSIZE, f"it gave {TOO_LARGE}")
        except httpx2.RequestError as error:
            return _json_rpc_error(request, WIRE_FAULT, str(error) or type(error).__name__)


async def _forgot_session(response: httpx2.Response) -> bool:
    """Whether the server does not know the request's session.

    The protocol's status is 404. Servers based on the TypeScript SDK's examples answer 400.
    """
    if response.status_code == 400:
        return b"session" in (await response.aread()).lower()
    return response.status_code == 404


def refusal(status: int) -> str:
    """A sentence for HTTP status 401 or 403."""
    return f"HTTP {status}, the server wants another bearer token (--mcp_auth_token)"


def _json_rpc_error(request: httpx2.Request, code: int, message: str) -> httpx2.Response:
    error = {"jsonrpc": "2.0", "id": None, "error": {"code": code, "message": message}}
    return httpx2.Response(502, json=error, request=request)


class _EndNoticed:
    """A read stream of the SDK that calls `on_end` when the server has closed it."""

    def __init__(self, stream: Any, on_end: Callable[[], None]) -> None:
        self._stream = stream
        self._on_end = on_end

    @property
    def last_context(self) -> Any:
        """The context of the last message's sender, as in the SDK's own streams."""
        return getattr(self._stream, "last_context", None)

    async def receive(self) -> Any:
        return await self._stream.receive()

    async def aclose(self) -> None:
        await self._stream.aclose()

    def __aiter__(self) -> "_EndNoticed":
        return self

    async def __anext__(self) -> Any:
        try:
            return await self._stream.__anext__()
        except StopAsyncIteration:
            self._on_end()
            raise

    async def __aenter__(self) -> "_EndNoticed":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
