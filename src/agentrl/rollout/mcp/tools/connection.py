"""One connection to an MCP server over streamable HTTP, that outlives what goes wrong on it.

Which tools there are and what a call means is not known here (`tools.py`).
"""

import asyncio
import logging
from typing import Any, Self

import httpx2
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client
from mcp_types import INVALID_REQUEST

log = logging.getLogger(__name__)

_WIRE_FAULT, _REFUSED = -32050, -32051  # JSON-RPC codes of our own, see _FaultIsolation

# A call holds its connection while the tool works, and the samplers bound their own concurrency.
# Idle connections are dropped before the 5 s after which uvicorn closes them.
_LIMITS = httpx2.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=4.0)


class ConnectFailed(Exception):
    """A connection was not made. `refused`: waiting longer would not help."""

    refused = False

    @classmethod
    def of(cls, error: BaseException) -> Self:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        failure = cls(error.message if isinstance(error, MCPError) else str(error) or repr(error))
        failure.refused = isinstance(error, MCPError) and error.code == _REFUSED
        return failure


class Connection:
    """An MCP client in a task of its own, because it must be left by the task that entered it."""

    def __init__(self, url: str, token: str | None, timeout_s: float) -> None:
        self._closing = asyncio.Event()
        self._ready: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold(url, token, timeout_s), name=f"mcp {url}")

    @classmethod
    async def open(cls, url: str, token: str | None, timeout_s: float) -> Self:
        """Connect and agree on a protocol version. Raises `ConnectFailed`.

        `timeout_s`: of that, and of every request that is given no time-out of its own.
        """
        connection = cls(url, token, timeout_s)
        either: set[asyncio.Future[Any]] = {connection._ready, connection._task}
        try:
            await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not connection._ready.done():
                connection._task.cancel()
        if connection._ready.done():
            return connection
        await asyncio.wait({connection._task})
        if connection._task.cancelled():
            raise ConnectFailed(f"no answer within {timeout_s:g} s")
        error = connection._task.exception()
        raise ConnectFailed.of(error or RuntimeError("closed at once")) from None

    @property
    def client(self) -> Client:
        """The SDK's client; any number of tasks may use it at once."""
        return self._ready.result()

    @property
    def ended(self) -> bool:
        """Whether the SDK gave the connection up."""
        return self._task.done()

    async def close(self) -> None:
        """Leave the client and its session."""
        self._closing.set()
        await asyncio.wait({self._task})
        if not self._task.cancelled() and (error := self._task.exception()) is not None:
            log.warning("the MCP connection ended with an error: %r", error)

    async def _hold(self, url: str, token: str | None, timeout_s: float) -> None:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        http = httpx2.AsyncClient(
            headers=headers,
            # The client bounds every request; a read time-out here would be one for all tools.
            timeout=httpx2.Timeout(None, connect=timeout_s),
            transport=_FaultIsolation(httpx2.AsyncHTTPTransport(limits=_LIMITS)),
        )
        transport = streamable_http_client(url, http_client=http)
        async with http, Client(transport, read_timeout_seconds=timeout_s) as client:
            self._ready.set_result(client)
            await self._closing.wait()


class _FaultIsolation(httpx2.AsyncBaseTransport):
    """Answers a request whose connection fails with a JSON-RPC error.

    The SDK's transport lets such an exception end the whole session, and with it the calls of all
    other records; an error answer ends only the call that it belongs to.
    """

    def __init__(self, transport: httpx2.AsyncBaseTransport) -> None:
        self._transport = transport

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        try:
            response = await self._transport.handle_async_request(request)
            if response.status_code in (401, 403):
                await response.aclose()
                return _json_rpc_error(
                    request,
                    _REFUSED,
                    f"HTTP {response.status_code}, the server wants another bearer token "
                    "(--mcp_auth_token)",
                )
            if response.headers.get("content-type", "").lower().startswith("application/json"):
                await response.aread()  # here, so that a connection lost half way is caught too
            return response
        except httpx2.RequestError as error:
            return _json_rpc_error(request, _WIRE_FAULT, str(error) or type(error).__name__)

    async def aclose(self) -> None:
        await self._transport.aclose()


def _json_rpc_error(request: httpx2.Request, code: int, message: str) -> httpx2.Response:
    error = {"jsonrpc": "2.0", "id": None, "error": {"code": code, "message": message}}
    return httpx2.Response(502, json=error, request=request)


def session_is_gone(error: MCPError) -> bool:
    """Whether the server no longer knows the session, and so has not seen the call either."""
    # What the SDK's transport makes of an HTTP 404 for a session id.
    return error.code == INVALID_REQUEST and error.message == "Session terminated"
