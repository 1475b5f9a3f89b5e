"""One connection to an MCP server, from handshake to goodbye.

Which tools there are and what a call means is not known here (`server.py`), nor what it runs over
(`transports.py`).
"""

import asyncio
import logging
from typing import Any, Self

import anyio
import httpx2
from mcp import Client, MCPError
from mcp_types import CONNECTION_CLOSED

from agentrl.rollout.tools.transports import Wires, refusal
from agentrl.rollout.tools.wire_faults import NOT_REACHED, REFUSED, SESSION_GONE, WIRE_FAULT

log = logging.getLogger(__name__)

_GOODBYE_S = 10.0  # a process is given 4 s to end before it is killed


class ConnectFailed(Exception):
    """A connection was not made. `refused`: waiting longer would not help."""

    def __init__(self, message: str, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """What the SDK or the system said, in words."""
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
    """An MCP client in a task of its own, because it must be left by the task that entered it."""

    def __init__(self, wires: Wires, timeout_s: float, with_session: bool) -> None:
        self._ending = asyncio.Event()
        self._ready: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold(wires, timeout_s, with_session), name="mcp")

    @classmethod
    async def open(cls, wires: Wires, timeout_s: float, *, with_session: bool = False) -> Self:
        """Connect and agree on a protocol version. Raises `ConnectFailed`.

        `timeout_s`: of that, and of every request that is given no time-out of its own.
        `with_session`: by a handshake that begins a session, which newer protocol versions lack.
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
    def client(self) -> Client:
        """The SDK's client; any number of tasks may use it at once."""
        return self._ready.result()

    @property
    def ended(self) -> bool:
        """Whether nothing can be asked any more."""
        return self._ending.is_set() or self._task.done()

    def abandon(self) -> None:
        """Say that it was found to be of no use; leaves it in the background."""
        self._ending.set()

    async def close(self) -> None:
        """Leave the client and its session, within some seconds."""
        self._ending.set()
        _, late = await asyncio.wait({self._task}, timeout=_GOODBYE_S)
        if late:
            log.warning("an MCP server did not let go of its connection; it is dropped")
            self._task.cancel()
            await asyncio.wait({self._task})
        if not self._task.cancelled() and (error := self._task.exception()) is not None:
            log.warning("an MCP connection ended with an error: %r", error)

    async def _hold(self, wires: Wires, timeout_s: float, with_session: bool) -> None:
        client = Client(
            wires.open(self._ending.set),
            read_timeout_seconds=timeout_s,
            mode="legacy" if with_session else "auto",
        )
        async with client:
            self._ready.set_result(client)
            await self._ending.wait()


async def shake_hands(wires: Wires, timeout_s: float) -> None:
    """Connect and leave again: whether the server answers. Raises `ConnectFailed`."""
    connection = await Connection.open(wires, timeout_s)
    await connection.close()


def session_is_gone(error: MCPError) -> bool:
    """Whether the server no longer knows the session, and so has not seen the call either."""
    return error.code == SESSION_GONE


def connection_is_lost(error: Exception) -> bool:
    """Whether it broke under the call: what the server made of that is not known."""
    # Servers use the same code for errors of their own.
    return (
        isinstance(error, MCPError)
        and error.code == CONNECTION_CLOSED
        and error.message == "Connection closed"
    ) or isinstance(error, anyio.ClosedResourceError | anyio.BrokenResourceError)


def server_is_out_of_reach(error: Exception) -> bool:
    """Whether a request got no answer of the server's: none was reached, or it refused us."""
    return isinstance(error, MCPError) and error.code in (WIRE_FAULT, NOT_REACHED, REFUSED)


def never_had_it(error: Exception) -> bool:
    """Whether the server cannot have seen the request."""
    return isinstance(error, MCPError) and error.code in (NOT_REACHED, REFUSED)
