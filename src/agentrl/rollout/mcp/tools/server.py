"""Tools of an MCP server over streamable HTTP, for all records of a process.

One connection serves all of them: sessions of their own would cost more processor time per call
and isolate nothing, because a call says in its `_meta` what it serves (`agentrl/task_id`,
`agentrl/record_id`). What goes wrong with a call (a time-out, a dead server, garbage, an error of
the tool) costs that call and becomes a text for the model; an exception is only that the server
cannot be reached at start.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, cast

import anyio
import orjson
from mcp import Client, MCPError
from mcp_types import (
    REQUEST_TIMEOUT,
    CallToolResult,
    EmbeddedResource,
    RequestParamsMeta,
    TextContent,
    TextResourceContents,
    Tool,
)
from pydantic import ValidationError

from agentrl.rollout.mcp.tools.connection import ConnectFailed, Connection, session_is_gone
from agentrl.rollout.mcp.tools.results import ToolAnswer

log = logging.getLogger(__name__)

TASK_ID_KEY = "agentrl/task_id"
RECORD_ID_KEY = "agentrl/record_id"
MAX_RESULT_CHARS = 500_000  # of one tool's answer: a turn must fit a MongoDB document
_RETRY_PAUSE_S = 0.25
_HANDSHAKE_TIMEOUT_S = 10.0  # of each request before the first call
_CALL_FAILURES = (
    MCPError,  # an error answer, a time-out, a closed connection
    ValidationError,  # an answer that is no CallToolResult
    RuntimeError,  # content that does not fit the tool's schema, a request for input
    ValueError,
    anyio.ClosedResourceError,
    anyio.BrokenResourceError,
)


class ToolServerUnreachable(ConnectionError):
    """The MCP server does not answer, or refuses us. The message is one sentence for the user."""


@dataclass
class ToolServer:
    """A connection to an MCP server, kept open as an async context manager.

    `url`: of the streamable HTTP endpoint. `token`: bearer token. `name`: the server's, for people.
    `call_timeout_s`: of one call.
    `startup_timeout_s`: how long entering waits for the server before `ToolServerUnreachable`.
    """

    url: str
    token: str | None = None
    name: str | None = None
    call_timeout_s: float = 60.0
    startup_timeout_s: float = 30.0
    schemas: tuple[dict[str, Any], ...] = field(default=(), init=False)  # for the chat template
    n_reconnects: int = field(default=0, init=False)
    _names: frozenset[str] = field(default=frozenset(), init=False)
    _connection: Connection | None = field(default=None, init=False)
    _reconnecting: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    async def __aenter__(self) -> Self:
        began = time.monotonic()
        while True:
            try:
                await self._connect()
                break
            except ConnectFailed as failure:
                if failure.refused or time.monotonic() - began > self.startup_timeout_s:
                    raise ToolServerUnreachable(
                        f"the MCP server {self._label} could not be used, tried for "
                        f"{time.monotonic() - began:.1f} s: {failure}"
                    ) from None
            await asyncio.sleep(_RETRY_PAUSE_S)
        log.info("MCP server %s: tools %s", self._label, ", ".join(sorted(self._names)) or "none")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._connection is not None:
            await self._connection.close()
            self._connection = None

    @property
    def _label(self) -> str:
        return f"{self.name} at {self.url}" if self.name else f"at {self.url}"

    async def call(
        self, name: str, arguments: dict[str, Any], meta: Mapping[str, str]
    ) -> ToolAnswer:
        """Call a tool; every failure is an answer."""
        began = time.monotonic()
        if name not in self._names:
            known = ", ".join(sorted(self._names)) or "none"
            return ToolAnswer(f"There is no tool {name[:80]!r}. Tools: {known}.", True, 0.0)
        try:
            text, is_error = _read(await self._call(name, arguments, meta))
        except _CALL_FAILURES as error:
            text, is_error = self._explain(name, error), True
        except ConnectFailed as failure:
            text, is_error = f"The tool server cannot be reached: {failure}", True
        return ToolAnswer(_storable(text), is_error, time.monotonic() - began)

    async def _call(
        self, name: str, arguments: dict[str, Any], meta: Mapping[str, str]
    ) -> CallToolResult:
        connection = self._connection
        assert connection is not None, "the tool server is not entered"
        if connection.ended:
            connection = await self._reconnect(connection)
        try:
            return await self._send(connection, name, arguments, meta)
        except MCPError as error:
            # A server that restarted: the call can be sent again.
            if not session_is_gone(error):
                raise
        connection = await self._reconnect(connection)
        return await self._send(connection, name, arguments, meta)

    async def _send(
        self,
        connection: Connection,
        name: str,
        arguments: dict[str, Any],
        meta: Mapping[str, str],
    ) -> CallToolResult:
        return await connection.client.call_tool(
            name,
            arguments,
            read_timeout_seconds=self.call_timeout_s,
            meta=cast(RequestParamsMeta, dict(meta)),
        )

    async def _connect(self) -> Connection:
        """Open a connection and list its tools. Raises `ConnectFailed`."""
        timeout_s = min(_HANDSHAKE_TIMEOUT_S, self.startup_timeout_s)
        connection = await Connection.open(self.url, self.token, timeout_s)
        try:
            tools = await _list_tools(connection.client)
        except _CALL_FAILURES as error:
            await connection.close()
            raise ConnectFailed.of(error) from None
        self._connection = connection
        self._names = frozenset(tool.name for tool in tools)
        self.schemas = tuple(_as_function(tool) for tool in tools)
        return connection

    async def _reconnect(self, broken: Connection) -> Connection:
        """A connection in the place of `broken`. Raises `ConnectFailed`."""
        async with self._reconnecting:
            if self._connection is not None and self._connection is not broken:
                return self._connection  # another call has made it
            await broken.close()
            connection = await self._connect()
            self.n_reconnects += 1
            log.warning("connected to MCP server %s again", self._label)
            return connection

    def _explain(self, name: str, error: Exception) -> str:
        """A failed call, for the model to read."""
        if isinstance(error, MCPError) and error.code == REQUEST_TIMEOUT:
            return f"The tool {name} did not answer within {self.call_timeout_s:g} s."
        if isinstance(error, MCPError):
            return f"The tool {name} failed: {error.message}"
        return f"The tool {name} gave an answer that cannot be read ({type(error).__name__})."


async def _list_tools(client: Client) -> list[Tool]:
    """All tools, page by page."""
    page = await client.list_tools()
    tools = list(page.tools)
    while page.next_cursor:
        page = await client.list_tools(cursor=page.next_cursor)
        tools += page.tools
    return tools


def _as_function(tool: Tool) -> dict[str, Any]:
    """A tool as OpenAI's function schema, which chat templates expect."""
    return {
        "type": "function",
        "function": {
            "name": tool.name,
            "description": tool.description or "",
            "parameters": tool.input_schema,
        },
    }


def _read(result: CallToolResult) -> tuple[str, bool]:
    """A tool's answer as text, and whether it is an error."""
    parts = [_text_of(part) for part in result.content]
    if not parts and result.structured_content is not None:
        parts = [orjson.dumps(result.structured_content).decode()]
    text = "\n".join(parts)
    if result.is_error and not text:
        text = "The tool failed and gave no reason."
    return text, bool(result.is_error)


def _text_of(part: object) -> str:
    if isinstance(part, TextContent):
        return part.text
    if isinstance(part, EmbeddedResource) and isinstance(part.resource, TextResourceContents):
        return part.resource.text
    return f"[{getattr(part, 'type', 'content')} left out: only text can be read]"


def _storable(text: str) -> str:
    """A text that UTF-8 can hold and that fits a document."""
    if len(text) > MAX_RESULT_CHARS:
        text = f"{text[:MAX_RESULT_CHARS]}\n[{len(text) - MAX_RESULT_CHARS} characters left out]"
    return text.encode("utf-8", "replace").decode("utf-8")
