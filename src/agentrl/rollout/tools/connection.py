"""One connection to an MCP server, from handshake to close.

`server.py` handles tools and calls, `transports.py` the streams below.
"""

import asyncio
import logging
from typing import Any, Self

import anyio
import httpx2
from mcp import MCPError
from mcp_types import CONNECTION_CLOSED

from agentrl.rollout.tools.transports import ToolClient, Wires
from agentrl.rollout.tools.wire_faults import (
    OUTAGE,
    REFUSED,
    SESSION_GONE,
    WIRE_FAULT,
    refusal,
)

log = logging.getLogger(__name__)

# What the SDK says of a connection that broke off, and of an answer's stream that did.
_LOST = frozenset(
    {
        "Connection closed",
        "SSE stream ended without a response",
        "SSE stream ended and reconnection attempts were exhausted",
    }
)
_GOODBYE_S = 10.0  # longer than the 4 s after which the SDK kills a process


class ConnectFailed(Exception):
    """A connection failed. `refused`: whether retrying would not help."""

    def __init__(self, message: str, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """The failure for an error of the SDK or the system."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, MCPError):
            return cls(error.message, refused=error.code == REFUSED)
        if isinstance(error, httpx2.HTTPStatusError) and error.response.status_code in (401, 403):
            return cls(refusal(error.response.status_code), refused=True)
        if isinstance(error, FileNotFoundError | PermissionError):
            return cls(f"it cannot be started: {error.strerror}", refused=True)
        return cls(str(error) or repr(error))


class Connection:
    """An MCP client in a separate task, because the same task must enter and leave it."""

    def __init__(self, wires: Wires, timeout_s: float, with_session: bool) -> None:
        self._ending = asyncio.Event()
        self._ready: asyncio.Future[ToolClient] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold(wires, timeout_s, with_session), name="mcp")

    @classmethod
    async def open(cls, wires: Wires, timeout_s: float, *, with_session: bool = False) -> Self:
        """Connect and agree on a protocol version. Raises `ConnectFailed`.

        `timeout_s`: of connecting, and the default of requests. `with_session`: use a handshake
        that begins a session, which newer protocol versions lack.
        """
        connection = cls(wires, timeout_s, with_session)
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
        if connection._ending.is_set():
            raise ConnectFailed("it ended before it answered")
        error = connection._task.exception()
        raise ConnectFailed.of(error or RuntimeError("closed at once")) from None

    @property
    def client(self) -> ToolClient:
        """The client; tasks may use it concurrently."""
        return self._ready.result()

    @property
    def ended(self) -> bool:
        """Whether the connection can no longer be used."""
        return self._ending.is_set() or self._task.done()

    def abandon(self) -> None:
        """Mark the connection as unusable; it closes in the background."""
        self._ending.set()

    async def close(self) -> None:
        """Close the client and its session, within `_GOODBYE_S`."""
        self._ending.set()
        _, late = await asyncio.wait({self._task}, timeout=_GOODBYE_S)
        if late:
            log.warning("an MCP server did not let go of its connection; it is dropped")
            self._task.cancel()
            await asyncio.wait({self._task})
        if not self._task.cancelled() and (error := self._task.exception()) is not None:
            log.warning("an MCP connection ended with an error: %r", error)

    async def _hold(self, wires: Wires, timeout_s: float, with_session: bool) -> None:
        lost = self._ending.set
        async with wires.client(lost, timeout_s, with_session=with_session) as client:
            self._ready.set_result(client)
            await self._ending.wait()


async def shake_hands(wires: Wires, timeout_s: float) -> None:
    """Connect and disconnect, to check that the server answers. Raises `ConnectFailed`."""
    connection = await Connection.open(wires, timeout_s)
    await connection.close()


def session_is_gone(error: MCPError) -> bool:
    """Whether the server no longer knows the session; it has then not executed the call."""
    return error.code == SESSION_GONE


def connection_is_lost(error: Exception) -> bool:
    """Whether the connection broke during the call; the server may have executed it."""
    # The message is compared too, because servers use the same code for other errors.
    return (
        isinstance(error, MCPError) and error.code == CONNECTION_CLOSED and error.message in _LOST
    ) or isinstance(error, anyio.ClosedResourceError | anyio.BrokenResourceError)


def others_are_to_blame(error: Exception) -> bool:
    """Whether the request failed for what is not its record's doing."""
    return isinstance(error, MCPError) and error.code == OUTAGE


def server_is_out_of_reach(error: Exception) -> bool:
    """Whether the server was not reached, or refused the request."""
    return isinstance(error, MCPError) and error.code in (WIRE_FAULT, REFUSED)
