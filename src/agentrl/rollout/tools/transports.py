"""The transports to one server: HTTP requests, a stream of events, or the pipes of a process.

The SDK implements the protocol over them (`connection.py`), and `stateless.py` the calls to servers
without sessions. A server that is an object of this process needs none (`in_process.py`).
"""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, Protocol

import httpx2
from mcp import Client
from mcp.client.caching import CacheMode
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamable_http_client
from mcp_types import CallToolResult, ListToolsResult, RequestParamsMeta

from agentrl.limited_httpx import MAX_ANSWER_BYTES, UNPACKED, tls_context
from agentrl.rollout.tools.in_process import LocalServer
from agentrl.rollout.tools.pipes import process_pipes
from agentrl.rollout.tools.server_list import ServerSpec, ToolTransport
from agentrl.rollout.tools.sockets import Sockets
from agentrl.rollout.tools.stateless import StatelessDispatcher
from agentrl.rollout.tools.wire_faults import FaultIsolation

Streams = tuple[Any, Any]  # the SDK's read and write streams


class ToolClient(Protocol):
    """What is used of the SDK's client."""

    async def call_tool(
        self,
        name: str,
        arguments: dict[str, Any] | None,
        read_timeout_seconds: float | None,
        *,
        meta: RequestParamsMeta | None,
    ) -> CallToolResult:
        """Call a tool."""

    async def list_tools(
        self, *, cursor: str | None = None, cache_mode: CacheMode = "use"
    ) -> ListToolsResult:
        """One page of the tools."""


class Wires:
    """Connects to one server. HTTP connections share a pool of sockets.

    `connect_timeout_s`: of connecting. The caller limits the time of answers.
    """

    def __init__(self, spec: ServerSpec, connect_timeout_s: float) -> None:
        self._spec = spec
        self._headers = httpx2.Headers(dict(spec.headers))
        self._headers.update(UNPACKED)
        in_process = spec.transport is ToolTransport.PYTHON
        self._local = LocalServer(spec.python, spec.label) if in_process else None
        self._connect_timeout_s = connect_timeout_s
        self._sockets: Sockets | None = None

    async def open(self, timeout_s: float) -> None:
        """Import a server that is an object.

        Raises `ConfigError` if it cannot be used, and `TimeoutError`, which says where it stands.
        """
        if self._local is not None:
            await self._local.load(timeout_s)

    def client(
        self, on_lost: Callable[[], None], timeout_s: float, *, with_session: bool
    ) -> AbstractAsyncContextManager[ToolClient]:
        """A client of one connection. `timeout_s`: the default of requests."""
        mode = "legacy" if with_session else "auto"
        if self._local is not None:
            return self._local.client(on_lost, timeout_s, mode)
        opening = self._open(on_lost)
        client = Client(opening, read_timeout_seconds=timeout_s, mode=mode)
        if self._spec.transport is ToolTransport.HTTP:

            async def connect(stack: AsyncExitStack, *_: object) -> StatelessDispatcher:
                streams = await stack.enter_async_context(opening)
                # Not `_Borrowed`, as below: the dispatcher closes no transport, a client does.
                transport = FaultIsolation(self._shared_sockets())
                return StatelessDispatcher(streams, transport, self._spec.url, self._headers)

            # The SDK has no public place for a dispatcher (tests/rollout/tools/test_mcp_sdk.py).
            client._connect = connect
        return client

    async def close(self) -> None:
        """Close the shared sockets, or let the thread end."""
        if self._sockets is not None:
            await self._sockets.aclose()
        if self._local is not None:
            self._local.close()

    @asynccontextmanager
    async def _open(self, on_lost: Callable[[], None]) -> AsyncIterator[Streams]:
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
            client = self._client(FaultIsolation(_Borrowed(self._shared_sockets())))
            async with streamable_http_client(
                spec.url, http_client=client, max_sse_event_size=MAX_ANSWER_BYTES
            ) as streams:
                yield streams

    def _client(self, transport: httpx2.AsyncBaseTransport) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(headers=self._headers, timeout=None, transport=transport)

    def _shared_sockets(self) -> Sockets:
        if self._sockets is None:
            self._sockets = Sockets(tls_context(), self._connect_timeout_s)
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
