"""A session with an MCP server that is begun again when it is lost.

There are two kinds. A shared session serves all records and has no state of theirs, so a call that
the server has not executed goes to the next session. A record's own session contains the record's
state: when it is lost, the model is told before anything else is done.

A call that the server may have executed is never sent twice.

Failed calls are classified. An error answer or an unreadable answer is the call's failure
(`CallFailed`). A server that is not reached, refuses us or dies during the call is an outage
(`ToolServerUnreachable`). A timeout is the call's failure only if the server still answers other
requests. If only a record's own session died, the call failed. A call that blocks a server of our
process fails its attempt (`ToolBlocks`).
"""

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from types import TracebackType
from typing import Self, cast

import anyio
from mcp import MCPError
from mcp_types import REQUEST_TIMEOUT, CallToolResult, RequestParamsMeta
from pydantic import ValidationError

from agentrl.rollout.tools.calls import (
    CallFailed,
    ToolRequest,
    ToolServerUnreachable,
    ToolSessionFailed,
)
from agentrl.rollout.tools.connection import (
    ConnectFailed,
    Connection,
    connection_is_lost,
    others_are_to_blame,
    server_is_out_of_reach,
    session_is_gone,
    shake_hands,
)
from agentrl.rollout.tools.results import read_result
from agentrl.rollout.tools.server_list import ServerSpec, ToolTransport
from agentrl.rollout.tools.transports import ToolClient, Wires

log = logging.getLogger(__name__)

_CLOSE_CALL_S = 5.0
_SIGN_OF_LIFE_S = 5.0  # the time in which a live server answers a small request

SDK_FAILURES = (
    MCPError,  # an error answer, a timeout, a closed connection
    ValidationError,  # an answer that is not a CallToolResult
    RuntimeError,  # content that does not fit the tool's schema, or a request for input
    ValueError,
    anyio.ClosedResourceError,
    anyio.BrokenResourceError,
)
"""What the SDK raises for a failed request."""


@dataclass(frozen=True, slots=True)
class Ownership:
    """The calls that begin and end a record's own session; None if the server lacks such tools."""

    create: ToolRequest | None
    close: ToolRequest | None


class Session:
    """A session with a server; an async context manager.

    `handshake_s`: timeout of each request before the first call. `ownership`: None for a shared
    session. Entering a shared session raises `ConnectFailed`. Entering a record's own session
    raises `ToolSessionFailed` if the server refuses it, and `ToolServerUnreachable`.
    """

    def __init__(
        self,
        spec: ServerSpec,
        wires: Wires,
        handshake_s: float,
        ownership: Ownership | None = None,
    ) -> None:
        self.n_calls = 0  # calls in progress
        self._spec = spec
        self._wires = wires
        self._handshake_s = handshake_s
        self._ownership = ownership
        self._connection: Connection | None = None
        self._beginning = asyncio.Lock()
        self._n_failed = 0  # failed attempts to begin it again
        self._why = ""  # why the last attempt failed

    async def __aenter__(self) -> Self:
        try:
            await self._begin()
        except CallFailed as failure:
            raise ToolSessionFailed(
                f"the tool server {self._spec.label} opened no session for the record: {failure}"
            ) from None
        except ConnectFailed as failure:
            if self._ownership is None:
                raise
            raise self._unreachable(f"it opened no session for a record: {failure}") from None
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        connection = self._connection
        if connection is not None and not connection.ended and self._ownership is not None:
            await self._say_goodbye(connection, self._ownership.close)
        if connection is not None:
            await connection.close()

    @property
    def client(self) -> ToolClient:
        """The client of the current connection."""
        assert self._connection is not None, "the session is not entered"
        return self._connection.client

    async def call(self, call: ToolRequest) -> CallToolResult:
        """Call a tool. Raises `CallFailed`, `ToolServerUnreachable` or `ToolBlocks`."""
        self.n_calls += 1
        try:
            return await self._call(call)
        except SDK_FAILURES as error:
            raise await self._failure(call.tool, error) from None
        except ConnectFailed as failure:
            text = f"The tool server cannot be reached: {failure}"
            raise self._unreachable(str(failure), text) from None
        finally:
            self.n_calls -= 1

    async def check(self) -> None:
        """Check that the server can be connected to. Raises `ConnectFailed`."""
        await shake_hands(self._wires, self._handshake_s)

    async def _call(self, call: ToolRequest) -> CallToolResult:
        connection = self._connection
        assert connection is not None, "the session is not entered"
        if connection.ended:
            connection = await self._again(connection)
        try:
            return await self._send(connection, call)
        except MCPError as error:
            if not session_is_gone(error):
                raise
        # The server has forgotten the session and not executed the call.
        connection.abandon()
        return await self._send(await self._again(connection), call)

    async def _send(self, connection: Connection, call: ToolRequest) -> CallToolResult:
        return await connection.client.call_tool(
            call.tool,
            call.arguments,
            read_timeout_seconds=self._spec.timeout_s,
            meta=cast(RequestParamsMeta, dict(call.meta)),
        )

    async def _begin(self) -> Connection:
        """Connect; for a record's own session, also call `create_session`."""
        owned = self._ownership
        connection = await Connection.open(
            self._wires, self._handshake_s, with_session=owned is not None
        )
        self._connection = connection
        if owned is not None and owned.create is not None:
            try:
                await self._create(connection, owned.create)
            except BaseException:
                await connection.close()
                raise
        return connection

    async def _create(self, connection: Connection, create: ToolRequest) -> None:
        try:
            made = read_result(await self._send(connection, create))
        except SDK_FAILURES as error:
            raise await self._failure(create.tool, error) from None
        if made.is_error:
            raise CallFailed(made.text)

    async def _again(self, lost: Connection) -> Connection:
        """A new connection in place of `lost`. The first call that needs one opens it for all."""
        n_failed = self._n_failed
        async with self._beginning:
            connection = self._connection
            if self._n_failed != n_failed:
                # Fail too. Otherwise waiting calls would each try in turn, one handshake each.
                raise ConnectFailed(self._why)
            if connection is None or connection is lost:
                await lost.close()
                try:
                    connection = await self._begin()
                except (ConnectFailed, CallFailed, ToolServerUnreachable) as failure:
                    self._n_failed += 1
                    self._why = str(failure)
                    raise
                log.warning("connected to tool server %s again", self._spec.label)
        if self._ownership is not None:
            text = (
                "The connection to the tool server was lost, and the state of its tools with it. "
                "They begin anew; this call was not made."
            )
            if self._spec.transport is ToolTransport.STDIO:  # only this record used the process
                raise CallFailed(text)
            raise self._unreachable("it has lost the session of a record, and its state", text)
        return connection

    async def _say_goodbye(self, connection: Connection, close: ToolRequest | None) -> None:
        if close is None:
            return
        with contextlib.suppress(TimeoutError, *SDK_FAILURES):
            async with asyncio.timeout(_CLOSE_CALL_S):
                await self._send(connection, close)
                return
        log.warning("tool server %s failed at %s", self._spec.label, close.tool)

    async def _failure(self, tool: str, error: Exception) -> CallFailed | ToolServerUnreachable:
        """The exception for a failed request: the call's own failure, or an outage."""
        text = self._explain(tool, error)
        if others_are_to_blame(error):
            return self._unreachable(text, text)
        if isinstance(error, MCPError) and error.code == REQUEST_TIMEOUT:
            if await self._shows_life():
                return CallFailed(text)
            if self._spec.transport is ToolTransport.STDIO and self._connection is not None:
                self._connection.abandon()  # the next call starts another process
        elif not server_is_out_of_reach(error) and not connection_is_lost(error):
            return CallFailed(text)
        if self._ownership is not None and await self._can_be_reached():
            return CallFailed(text)
        return self._unreachable(text, text)

    async def _shows_life(self) -> bool:
        """Whether the server answers another request in this session."""
        with contextlib.suppress(TimeoutError, *SDK_FAILURES):
            async with asyncio.timeout(_SIGN_OF_LIFE_S):
                await self.client.list_tools(cache_mode="bypass")
                return True
        return False

    async def _can_be_reached(self) -> bool:
        # What is started for it, a process or a lifespan, takes as long as it takes.
        starts = self._spec.started_here
        limit_s = self._handshake_s if starts else min(self._handshake_s, _SIGN_OF_LIFE_S)
        with contextlib.suppress(ConnectFailed):
            await shake_hands(self._wires, limit_s)
            return True
        return False

    def _unreachable(self, why: str, text: str | None = None) -> ToolServerUnreachable:
        label = self._spec.label
        message = f"the tool server {label} is out of reach: {why}"
        return ToolServerUnreachable(message, label, text=text, probe=self.check)

    def _explain(self, tool: str, error: Exception) -> str:
        """The text on a failed call, for the model."""
        if isinstance(error, MCPError) and error.code == REQUEST_TIMEOUT:
            return f"The tool {tool} did not answer within {self._spec.timeout_s:g} s."
        if connection_is_lost(error):
            return f"The connection to the tool server was lost while {tool} was at work."
        if isinstance(error, MCPError):
            return f"The tool {tool} failed: {error.message}"
        return f"The tool {tool} gave an answer that cannot be read ({type(error).__name__})."
